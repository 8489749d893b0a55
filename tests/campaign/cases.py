"""The list of cases: which rank fails how, where, in a group of how many.

A case's name says all of it, so that `run.py --only NAME` runs it again:

    kill:collective:all_reduce:all_reduce.4@2:small:blocking:4
    kind:phase:call:step@passing:size:mode:ranks[:ending]
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import calls

TIMEOUT_MS = 400  # of the world, where ranks stop or are late
CREATE_MS = 800  # of making a group in which a rank fails: some wait for one that never comes
LATE_MS = 1000  # how long a late rank sleeps: beyond both
MANY = 60  # groups that a rank belongs to in the phase groups
SHRINK_MS = 3000  # where a rank is silent in it: half of it is waited for that rank
REST_MS = 15_000  # of what must work again

MISMATCHES = ("size", "dtype", "op", "root", "collective", "order")
KINDS = ("kill", "stop", "late", *MISMATCHES, "nofile", "nomem", "fork", "stranger", "garbage")
TITLES = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "late": "late",
    "size": "wrong size",
    "dtype": "wrong dtype",
    "op": "wrong reduce op",
    "root": "wrong root",
    "collective": "wrong collective",
    "order": "other order",
    "nofile": "no descriptors left",
    "nomem": "no memory left",
    "fork": "a child calls, and ends",
    "stranger": "another user knocks",
    "garbage": "malformed handshakes",
}
STEPS = {"group_create": 8, "exchange": 3, "group_agree": 4, "symm_rendezvous": 5}
COLLECTIVE_STEPS = 7


@dataclass(frozen=True)
class Case:
    kind: str
    phase: str  # create, rendezvous, collective, agree, shrink, groups, knock; handmade, nested: see with_torch.py
    ranks: int
    call: str = ""  # the collective; in knock: what is done meanwhile
    step: str = ""  # a failpoint; "": before the call, by hand
    at: int = 1  # at which passing of it
    size: str = "small"  # large: several rounds
    mode: str = "blocking"  # started: split-phase, two at a time
    ending: str = ""  # of a stopped rank: killed, or continued

    @property
    def name(self) -> str:
        where = f"{self.step}@{self.at}" if self.step else "by hand"
        parts = (self.kind, self.phase, self.call or "-", where, self.size, self.mode, str(self.ranks))
        return ":".join(parts) + (f":{self.ending}" if self.ending else "")

    @classmethod
    def parse(cls, name: str) -> Case:
        kind, phase, call, where, size, mode, ranks, *ending = name.split(":")
        step, _, at = where.partition("@")
        if not at:
            step, at = "", "1"
        return cls(kind, phase, int(ranks), call.strip("-"), step, int(at), size, mode, "".join(ending))

    @property
    def collective(self) -> str:
        if self.call in (*calls.ALL, *calls.FOUND):
            return self.call
        return "symm_all_reduce" if self.call == "symm_rendezvous" else "all_reduce"

    @property
    def victim(self) -> int:
        """The rank that fails, or that is odd. Another one from case to case, but always the same for one case."""
        if self.kind == "root":
            return self.ranks - 1
        if self.step.startswith("places."):  # rank 0 passes none
            return 1 + zlib.crc32(self.name.encode()) % (self.ranks - 1)
        return zlib.crc32(self.name.encode()) % self.ranks

    @property
    def with_torch(self) -> bool:
        """Whether it is about process groups of torch, which have errors of their own and no shrink."""
        return self.phase in ("handmade", "nested")

    @property
    def named(self) -> int:
        """The victim's number in the errors of the others: a group made by hand has the ranks in reverse."""
        return self.ranks - 1 - self.victim if self.phase == "handmade" else self.victim

    @property
    def first_victim(self) -> int:
        """In the phase shrink: the rank whose death is why the others shrink, -1 for none."""
        return (self.victim + 1) % self.ranks if self.phase == "shrink" and self.ranks > 2 else -1

    @property
    def gone(self) -> list[int]:
        """Those that the survivors go on without."""
        lost = [self.victim] if self.kind in ("kill", "stop") else []
        return lost + ([self.first_victim] if self.first_victim >= 0 else [])

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.gone]

    @property
    def shut_out(self) -> bool:
        """Whether the failing rank lives on, and finds that the others went on without it."""
        return self.kind == "stop" and self.ending == "continued"

    @property
    def may_be_left_out(self) -> bool:
        """Whether the failing rank comes too late, or just in time, by where in the agreement it is late."""
        return self.kind == "late" and self.phase == "shrink"

    @property
    def action(self) -> str:
        late_ms = LATE_MS + SHRINK_MS // 2 if self.phase in ("agree", "shrink") else LATE_MS
        return f"sleep:{late_ms}" if self.kind == "late" else self.kind

    @property
    def shrink_ms(self) -> int:
        return SHRINK_MS if self.shut_out or self.may_be_left_out else REST_MS

    @property
    def waits(self) -> bool:
        """Whether it mostly waits, so that several can run at once."""
        return self.kind in ("stop", "late", "nofile", "nomem") or self.step == "group_create.1"


def steps_of(call: str, started: bool = False) -> list[str]:
    """The failpoints of a call."""
    if call == calls.MESSAGES:  # a receive has no step 2, and what was started none after its wait
        return ["send.1", "send.2", "recv.1"] + ([] if started else ["send.3", "recv.3"])
    if call in calls.STEPLESS:
        return [""]
    return [f"{calls.failpoint(call)}.{step}" for step in range(1, COLLECTIVE_STEPS + 1)]


def meetings(ranks: int) -> Iterator[tuple[str, str, int]]:
    """Phase, failpoint and passing of each step of making a group and of mapping each other's memory."""
    for step in range(1, STEPS["group_create"] + 1):
        yield "create", f"group_create.{step}", 1
    for step in range(1, STEPS["symm_rendezvous"] + 1):
        yield "rendezvous", f"symm_rendezvous.{step}", 1
    # Making a group has two exchanges (what is shared, and the confirmation), a rendezvous has one: it confirms in its
    # pads. Each passes steps 1 and 3 once for each peer.
    for step in range(1, STEPS["exchange"] + 1):
        per_exchange = 1 if step == 2 else ranks - 1
        for exchange, phase in enumerate(("create", "create", "rendezvous")):
            yield phase, f"exchange.{step}", exchange * per_exchange + 1


def agreements() -> Iterator[tuple[str, int]]:
    """Failpoint and passing of each step of an agreement, in its first and second round."""
    for step in range(1, STEPS["group_agree"]):
        yield f"group_agree.{step}", 1
        yield f"group_agree.{step}", 2
    yield f"group_agree.{STEPS['group_agree']}", 1


def losses(kind: str, ranks: int) -> Iterator[Case]:
    """A rank is killed, stops or is late, at every step of everything."""
    for phase, step, at in meetings(ranks):
        yield Case(kind, phase, ranks, step=step, at=at)
    for call in calls.ALL:
        for step in steps_of(call):
            yield Case(kind, "collective", ranks, call, step, 2 if step else 1)
    for step, at in agreements():
        if at == 1:
            yield Case(kind, "agree", ranks, "all_reduce", step, at)
        if at == 1 or ranks > 2:
            yield Case(kind, "shrink", ranks, "all_reduce", step, at)
    for step in range(5, STEPS["group_create"] + 1):
        yield Case(kind, "shrink", ranks, "all_reduce", f"group_create.{step}", 2)


def deeper(kind: str, ranks: int) -> Iterator[Case]:
    """In the middle of a long collective, of one on symmetric memory, and of several that were started."""
    for call in (*calls.ORDINARY, *calls.SYMMETRIC, calls.IN_PLACE):
        for step in (2, 3, 4, 5) if call != "barrier" else ():
            yield Case(kind, "collective", ranks, call, f"{calls.failpoint(call)}.{step}", 3, "large")
    for call in calls.FOUND:
        own = ("places.1", "places.2") if call.startswith("mixed_") else ()
        for place in (*(f"{calls.failpoint(call)}.{step}" for step in (2, 3, 4, 5)), *own):
            yield Case(kind, "collective", ranks, call, place, 2, "large")
    for call in ("all_reduce", "all_gather", "all_to_all_v", "broadcast", "coalesced", "symm_all_reduce", "messages"):
        for step in steps_of(call, started=True):
            yield Case(kind, "collective", ranks, call, step, 3, "small", "started")


def disagreements(ranks: int) -> Iterator[Case]:
    for call in (*calls.COLLECTIVES, calls.MESSAGES):
        kind = calls.base(call)
        fitting = {
            "size": kind != "barrier",
            "dtype": kind != "barrier",
            "op": kind in calls.REDUCING,
            "root": kind in calls.ROOTED,
            "collective": call != calls.MESSAGES,
            "order": call != calls.MESSAGES,
        }
        for mismatch in MISMATCHES:
            if fitting[mismatch]:
                yield Case(mismatch, "collective", ranks, call)
            if fitting[mismatch] and call in ("all_reduce", "all_gather", "broadcast", "messages"):
                yield Case(mismatch, "collective", ranks, call, mode="started")


def shortages(kind: str, ranks: int) -> Iterator[Case]:
    for phase, step, at in meetings(ranks):
        yield Case(kind, phase, ranks, step=step, at=at)


def forks(ranks: int) -> Iterator[Case]:
    """A rank forks between two calls, and between the start of a call and its end."""
    for call in calls.ALL:
        yield Case("fork", "collective", ranks, call)
    for call in ("all_reduce", "all_gather", "broadcast", "coalesced", "symm_all_reduce", "messages"):
        yield Case("fork", "collective", ranks, call, mode="started")


def crowds(ranks: int) -> Iterator[Case]:
    """A rank of many groups dies: the others learn it in each of them."""
    yield Case("kill", "groups", ranks, "all_reduce")


def with_torch(ranks: int) -> Iterator[Case]:
    """A rank of a process group made by hand, or of works whose futures wait for others, fails between two calls."""
    for kind in ("kill", "stop"):
        for phase in ("handmade", "nested"):
            yield Case(kind, phase, ranks, "all_reduce")


def knocks(kind: str, ranks: int) -> Iterator[Case]:
    for call in ("group_create", "symm_rendezvous", "all_reduce"):
        yield Case(kind, "knock", ranks, call)


def full(sizes: Sequence[int]) -> list[Case]:
    """Everything. Cases that mostly wait are shared out: each is run with one of the numbers of ranks."""
    cases: list[Case] = []
    for ranks in sizes:
        cases += losses("kill", ranks)
        cases += deeper("kill", ranks)
        cases += disagreements(ranks)
        cases += forks(ranks)
        cases += crowds(ranks)
        cases += with_torch(ranks)
        for kind in ("nofile", "nomem"):
            cases += shortages(kind, ranks)
        for kind in ("stranger", "garbage"):
            cases += knocks(kind, ranks)
    for kind in ("stop", "late"):
        rows = [list(losses(kind, ranks)) for ranks in sizes]
        # Not every step exists for every number, so the rows are matched from the name without it.
        named = [{(each.phase, each.call, each.step, each.at): each for each in row} for row in rows]
        places = list(dict.fromkeys(place for row in named for place in row))
        for index, place in enumerate(places):
            fitting = [row[place] for row in named if place in row]
            cases.append(fitting[index % len(fitting)])
    return [_with_ending(each, index) for index, each in enumerate(cases)]


def quick(sizes: Sequence[int]) -> list[Case]:
    """A sample of every kind and phase, with 2 and 4 ranks."""
    cases = full([ranks for ranks in sizes if ranks <= 4])
    taken: dict[tuple[str, str], int] = {}
    sample = []
    for case in sorted(cases, key=lambda each: zlib.crc32(each.name.encode())):
        place = case.kind, case.phase
        limit = 2 if case.waits or case.phase == "knock" else 8 if case.kind == "kill" else 4
        if taken.setdefault(place, 0) < limit:
            taken[place] += 1
            sample.append(case)
    return sorted(sample, key=lambda each: KINDS.index(each.kind))


def matching(cases: Iterable[Case], pattern: str) -> list[Case]:
    """The one of that name, or all whose name contains it."""
    if pattern.count(":") >= 6 and Case.parse(pattern).name == pattern:
        return [Case.parse(pattern)]
    return [case for case in cases if pattern in case.name]


def _with_ending(case: Case, index: int) -> Case:
    if case.kind != "stop":
        return case
    ending = "continued" if index % 2 or case.phase in ("agree", "shrink") else "killed"
    return Case(case.kind, case.phase, case.ranks, case.call, case.step, case.at, case.size, case.mode, ending)
