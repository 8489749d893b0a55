"""What a rank of a case does: meet, call, fail or survive, recover, leave; and say what it saw.

It is forked from a process that has imported torch. What it says goes, a line of JSON each, to the runner, which
judges it (judge.py); the rank itself judges only results of collectives.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import calls
import children
import leaks
import with_torch
from cases import CREATE_MS, LATE_MS, MANY, MISMATCHES, REST_MS, SHRINK_MS, TIMEOUT_MS, Case

from phalanx.core import FileStore, PhalanxError, RevokedError, World

LONG_MS = 60_000  # where running into a timeout would be a failure: longer than a case may take
TRY_SECONDS = 8  # how long a survivor goes on calling when no call raises
ROUNDS = 12  # of meeting again and again while strangers knock


class Rank:
    def __init__(self, case: Case, rank: int, directory: Path, pipe: int) -> None:
        self.case, self.rank, self.directory, self.pipe = case, rank, directory, pipe
        self.fails = rank == case.victim
        self.small = calls.Arguments(96)
        self.arguments = calls.Arguments(70_000 if case.size == "large" else 96)  # 256 KiB and more: see calls.FOUND
        self.world: Any = None
        self.exact = 0  # results that were checked
        self.limits = {each: resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)}

    def say(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "at": time.monotonic_ns(), **fields}) + "\n"
        os.write(self.pipe, line.encode())

    def run(self) -> None:
        before = leaks.held()
        try:
            self.live()
        except BaseException:
            self.say("wrong", text=traceback.format_exc())
        self.world = None
        if left := leaks.settled(lambda: leaks.held() - before):
            self.say("leak", found=sorted(left))
        self.say("done", exact=self.exact)

    def live(self) -> None:
        if self.fails and self.case.step:
            os.environ["PHALANX_FAILPOINT"] = f"{self.case.step}@{self.case.at}={self.case.action}"
            os.environ["PHALANX_FAILPOINT_LOG"] = str(self.directory / "fault")
        if self.case.with_torch:
            with_torch.live(self)
            return
        timed = self.case.kind in ("stop", "late")
        store = FileStore(self.directory / "store")
        timeout_ms = TIMEOUT_MS if timed else LONG_MS
        with World(self.rank, self.case.ranks, store, timeout_ms=timeout_ms, staging_bytes=64 << 10) as world:
            self.world = world
            self.say("sockets", names=leaks.sockets())
            getattr(self, f"phase_{self.case.phase}")()

    # ---- phases: where in the life of a group it happens ------------------------------------------

    def phase_create(self) -> None:
        everybody = range(self.case.ranks)
        group = self.attempt(lambda: self.world.create_group("tp", everybody, CREATE_MS))
        self.restore()
        if group is not None and self.case.kind in ("kill", "stop", "late"):
            self.call_until_error(group, None)
        self.shut_out_or(self.meet_again)

    def meet_again(self) -> None:
        """Without the one that is gone; under the same name when all are there."""
        members = self.case.survivors
        rest = self.world.create_group("tp" if len(members) == self.case.ranks else "rest", members, REST_MS)
        self.check_sum(rest)

    def phase_rendezvous(self) -> None:
        group, _ = self.begin(False)
        block = self.world.alloc(calls.block_bytes(self.case.ranks, 96))
        symm = self.attempt(lambda: group.rendezvous(block))
        self.restore()
        if symm is not None and self.case.kind in ("kill", "stop", "late"):
            self.call_until_error(group, symm)
        if symm is not None and self.case.kind in ("nofile", "nomem"):
            self.one(group, symm, 1)
        self.recover(group)

    def phase_collective(self) -> None:
        group, symm = self.begin(self.case.call in (*calls.SYMMETRIC, calls.IN_PLACE, *calls.FOUND, *calls.STEPLESS))
        if self.case.kind == "fork":
            for number in range(4):
                self.one(group, symm, number)
            self.check_sum(group)
            return
        self.call_until_error(group, symm)
        self.recover(group)

    def phase_groups(self) -> None:
        """Every pair of ranks, and all of them in every order, have groups; some were used, most never were."""
        group, _ = self.begin(False)
        many = []
        for number in range(MANY):
            size = 2 + number % (self.case.ranks - 1)
            members = [(number + each * (1 + number % 2 * (size > 2))) % self.case.ranks for each in range(size)]
            if self.rank in (members := list(dict.fromkeys(members))):
                many.append(self.world.create_group(f"group {number}", members))
                if number % 7 == 0:
                    many[-1].barrier()
        self.call_until_error(group, None)
        for each in many:
            if self.case.victim not in each.ranks:
                continue
            try:
                each.barrier()
                self.say("wrong", text=f"group {each.name} of ranks {each.ranks} did not learn of it")
            except PhalanxError as error:
                self.say_error("also", error, time.monotonic_ns())
        self.recover(group)

    def phase_agree(self) -> None:
        group, _ = self.begin(False)
        agreed = self.attempt(lambda: group.agree(0xFF ^ 1 << self.rank, timeout_ms=SHRINK_MS))
        if agreed is not None:
            self.say("agreed", bits=agreed.bits, alive=agreed.alive)
            if not (self.fails and self.case.kind != "kill"):
                self.call_until_error(group, None)
        self.recover(group)

    def phase_shrink(self) -> None:
        group, _ = self.begin(False)
        if self.rank == self.case.first_victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.case.first_victim >= 0:
            self.call_until_error(group, None)
        self.recover(group)

    def phase_knock(self) -> None:
        """Strangers knock all the while, and nothing comes of it."""
        self.await_file("knocking")
        group, _ = self.begin(False)
        for number in range(ROUNDS):
            if self.case.call == "group_create":
                self.check_sum(self.world.create_group(f"group {number}", range(self.case.ranks)))
            elif self.case.call == "symm_rendezvous":
                symm = group.rendezvous(self.world.alloc(calls.block_bytes(self.case.ranks, 96)))
                self.one(group, symm, number)
                del symm
            else:
                for each in range(25):
                    self.one(group, None, 100 * number + each)
        self.check_sum(group)

    # ---- parts of them --------------------------------------------------------------------------------

    def begin(self, symmetric: bool) -> tuple[Any, Any]:
        """A group, and a block of every rank where the case's collective needs one."""
        group = self.world.create_group("tp", range(self.case.ranks), LONG_MS)
        symm = None
        if symmetric:
            size = calls.block_bytes(self.case.ranks, self.arguments.count)
            symm = group.rendezvous(self.world.alloc(size), LONG_MS)
        return group, symm

    def one(self, group: Any, symm: Any, number: int) -> None:
        """The number-th call of the case's collective, with the result checked; or two, when they are started."""
        name, started = self.case.collective, self.case.mode == "started" and number > 0
        arguments = self.arguments if number > 0 else self.small
        odd = self.fails and self.case.kind in MISMATCHES and number == 1
        if self.fails and number == 1 and not self.case.step:
            self.fail_by_hand(group)
        if odd:
            name, arguments = deviate(self.case.kind, name, arguments)
        numbers = (2 * number, 2 * number + 1) if started else (number,)
        prepared = [calls.prepare(name, group, symm, each, arguments, rotate=started) for each in numbers]
        if self.case.kind == "order":
            other = calls.prepare("all_gather" if name != "all_gather" else "all_reduce", group, None, 0, arguments)
            prepared.insert(0 if odd else len(prepared), other)
        works = [work for each in prepared for work in each.issue(not started)]
        if self.fails and started and self.case.kind == "fork":
            self.fork(group)
        for work in works:
            work.wait()
        for each in prepared:
            self.verify(each)

    def verify(self, prepared: calls.Prepared) -> None:
        self.exact += 1
        if text := prepared.verify():
            self.say("wrong", text=f"result {self.exact}: {text}")

    def fork(self, group: Any) -> None:
        """A child that tries everything, is refused, leaves as a program does, and disturbs nobody."""
        if text := children.fork_and_try(self.world, group):
            self.say("wrong", text=text)

    def fail_by_hand(self, group: Any) -> None:
        """For what has no failpoints: between two calls."""
        if self.case.kind == "fork":
            self.fork(group)
        if self.case.kind in ("kill", "stop", "late"):
            (self.directory / "fault").write_text(f"{time.monotonic_ns()} call\n")
        if self.case.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.case.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.case.kind == "late":
            time.sleep(LATE_MS / 1000)

    def attempt(self, call: Callable[[], Any]) -> Any:
        """What it returns; or None, and the error is told."""
        try:
            return call()
        except (PhalanxError, MemoryError) as error:
            now = time.monotonic_ns()
            self.restore()
            self.say_error("error", error, now)
            return None

    def say_error(self, event: str, error: Exception, now: int = 0) -> None:
        fields = {"status": type(error).__name__, "peer": getattr(error, "peer", -1), "text": str(error)}
        self.say(event, raised_at=now, **fields)

    def restore(self) -> None:
        """Takes back the limits that a failpoint set."""
        for each, limits in self.limits.items():
            resource.setrlimit(each, limits)

    def call_until_error(self, group: Any, symm: Any) -> None:
        deadline = time.monotonic() + TRY_SECONDS
        for number in itertools.count():  # the first one is right on all ranks
            if time.monotonic() > deadline:
                self.say("wrong", text=f"{number} calls after the fault raised nothing")
                return
            try:
                self.one(group, symm, number)
            except PhalanxError as error:
                self.say_error("error", error, time.monotonic_ns())
                break
        try:
            group.barrier()
            self.say("later", status="")
        except PhalanxError as error:
            self.say_error("later", error)

    def recover(self, group: Any) -> None:
        self.shut_out_or(lambda: self.shrink(group), group)

    def shut_out_or(self, recover: Callable[[], None], group: Any = None) -> None:
        """A rank that was stopped and continued finds that the others went on; the others wait until it has."""
        if self.fails and self.case.shut_out:
            if group is not None:
                try:
                    alone = group.shrink("rest", timeout_ms=SHRINK_MS)
                    self.say("wrong", text=f"a rank that the others had given up made a group of {alone.ranks}")
                except PhalanxError as error:
                    self.say_error("shut out", error)
            return
        try:
            recover()
        except RevokedError as error:
            if not (self.fails and self.case.may_be_left_out):
                raise
            self.say_error("shut out", error)
        if self.case.shut_out or self.case.may_be_left_out:
            self.await_file("released")

    def shrink(self, group: Any) -> None:
        """Until a collective in the new group works: another rank may fail on the way."""
        symmetric = self.case.call in calls.SYMMETRIC or self.case.phase == "rendezvous"
        for attempt in range(3):
            began = time.monotonic_ns()
            try:
                rest = group.shrink(f"rest {attempt}", timeout_ms=self.case.shrink_ms)
                ended = time.monotonic_ns()
                self.check_sum(rest)
                if symmetric:
                    symm = rest.rendezvous(self.world.alloc(calls.block_bytes(rest.group_size, 96)), REST_MS)
                    prepared = calls.prepare("symm_all_reduce", rest, symm, attempt, self.small)
                    prepared.issue(True)
                    self.verify(prepared)
            except PhalanxError as error:
                too_late = isinstance(error, RevokedError) and self.fails
                if self.case.phase != "shrink" or too_late or attempt == 2:
                    raise
                self.say_error("again", error)
                continue
            self.say("shrunk", ranks=rest.ranks, ms=(ended - began) / 1e6)
            return

    def check_sum(self, group: Any) -> None:
        prepared = calls.prepare("all_reduce", group, None, 3, self.small)
        work = prepared.issue(False)[0]
        work.wait(REST_MS)
        self.verify(prepared)
        self.say("sum", ranks=group.ranks)

    def await_file(self, name: str) -> None:
        while not (self.directory / name).exists():  # the runner's deadline ends it
            time.sleep(0.002)


def deviate(kind: str, name: str, arguments: calls.Arguments) -> tuple[str, calls.Arguments]:
    """What the odd rank calls instead."""
    if kind == "size":
        arguments = replace(arguments, count=arguments.count // 2)
    if kind == "dtype":
        arguments = replace(arguments, dtype="int32")
    if kind == "op":
        arguments = replace(arguments, op="max")
    if kind == "root":
        arguments = replace(arguments, root=1)
    if kind == "collective":
        name = "all_reduce" if name == "all_gather" else "all_gather"
    return name, arguments


def run(case: Case, rank: int, directory: Path, pipe: int) -> int:
    with contextlib.suppress(BrokenPipeError):  # the runner has given the case up
        Rank(case, rank, directory, pipe).run()
    return 0
