"""How the ranks of a process group agree on whether the core serves it, through torch's store.

A store may hold values that an earlier run of the same program left in it. So no value is trusted because it exists:
every rank writes a hello with a random number, the first rank of the group answers all of them with a *token*, and each
rank acknowledges an answer that quotes its own number. The keys that the core then writes begin with the token.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from phalanx.core import AbiError, PeerDeadError, PhalanxError, RevokedError, WaitTimeoutError, ffi, lib
from phalanx.core.timeouts import timed_out

log = logging.getLogger("phalanx.collectives")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_WARN_AFTER_S = 10.0


def _warning_interval_s() -> float:
    """How long a rank waits before it says so in the log: PHALANX_WAIT_WARNING_S, as for the waits of the core."""
    try:
        seconds = float(os.environ.get("PHALANX_WAIT_WARNING_S") or _WARN_AFTER_S)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e6:  # the core warns about such a value
        seconds = _WARN_AFTER_S
    return seconds or float("inf")


def _build() -> str:
    """The version and the build of the core that this rank runs."""
    known = json.loads(ffi.string(lib.phx_build_info()).decode())
    return f"{known['version']} (build {known['build']})"


class BootstrapResult(NamedTuple):
    """The facts that all ranks of the group know after the bootstrap.

    Attributes:
        token: Drawn for this bootstrap; the same on all ranks.
        refusal: The reason for which a rank cannot use the core; "" if all can.
        hosts: The names of the hosts of the ranks, in the order of the ranks.
    """

    token: str
    refusal: str
    hosts: list[str]


@dataclass
class Bootstrap:
    """One bootstrap of a group: its ranks exchange what they need to connect."""

    store: Any  # a torch Store that the ranks share
    name: str
    ranks: Sequence[int]  # global, in order
    position: int  # of this rank among them
    timeout_ms: int  # how long to wait for the others
    check_peer: Callable[[int], None] = lambda _: None  # raises PeerDeadError if it knows that a rank has ended
    default_ms: int | None = None  # the timeout of the group; None where `timeout_ms` is that

    def __post_init__(self) -> None:
        self._begin = time.monotonic()
        self._deadline = self._begin + self.timeout_ms / 1000
        self._pause_s = _FIRST_PAUSE_S
        self._interval_s = self._next_warning_s = _warning_interval_s()

    def run(self, refusal: str, host: str = "") -> BootstrapResult:
        """Exchange the facts with the other ranks. Collective among the ranks of the group.

        Args:
            refusal: The reason for which this rank cannot use the core, or "".
            host: A name of this rank's host, the same on exactly those ranks that can share memory.

        Raises:
            WaitTimeoutError: Ranks did not call it in time; the text names them.
            AbiError: Ranks run different builds of phalanx-core. Raised on all of them.
            PeerDeadError: A rank has ended, as is known from another group of this process.
        """
        if len(self.ranks) == 1:
            return BootstrapResult(uuid4().hex, refusal, [host])
        hello = [uuid4().hex, refusal, host, _build()]
        self._write(f"hello/{self.position}", hello)
        return self._lead(hello) if self.position == 0 else self._follow(hello)

    def _lead(self, hello: list[str]) -> BootstrapResult:
        token = uuid4().hex
        answered: list[list[str]] = []
        hosts: list[str] = []
        builds: list[str] = []
        others = range(1, len(self.ranks))
        while True:
            hellos = [hello, *(self._read(f"hello/{i}", len(hello)) for i in others)]
            if None not in hellos and hellos != answered:
                answered = hellos
                refusal = next(
                    (f"rank {rank}: {no}" for rank, (_, no, *_) in zip(self.ranks, hellos, strict=True) if no), ""
                )
                numbers, _, hosts, builds = (list(column) for column in zip(*hellos, strict=True))
                self._write("answer", [token, refusal, numbers, hosts, builds])
            late = [i for i in others if hellos[i] is None]
            late = late or [i for i in others if self._read(f"thanks/{i}") != token]
            if not late:
                break
            self._pause(late)
        for i in others:
            self._remove(f"hello/{i}")
            self._remove(f"thanks/{i}")
        self._remove("hello/0")
        self._remove("answer")
        self._compare(builds)
        return BootstrapResult(token, refusal, hosts)

    def _follow(self, hello: list[str]) -> BootstrapResult:
        while True:
            answer = self._read("answer", len(BootstrapResult._fields) + 2)
            if answer is not None and answer[2][self.position] == hello[0]:
                break
            if self._read(f"hello/{self.position}") is None:  # removed at the end of an earlier bootstrap
                self._write(f"hello/{self.position}", hello)
            self._pause(None)
        self._write(f"thanks/{self.position}", answer[0])
        self._compare(answer[4])
        return BootstrapResult(answer[0], answer[1], answer[3])

    def _compare(self, builds: list[str]) -> None:
        for i, build in enumerate(builds):
            if build != builds[0]:
                raise AbiError(
                    f"group '{self.name}': rank {self.ranks[0]} runs phalanx {builds[0]} and rank {self.ranks[i]} "
                    f"runs phalanx {build}; ranks of different builds would compute wrong values together. Install one "
                    "build of phalanx-core for all ranks.",
                    **self._about(self.ranks[i]),
                )

    def _pause(self, late: list[int] | None) -> None:
        for rank in self.ranks if late is None else [self.ranks[i] for i in late]:
            if rank != self.ranks[self.position]:
                self._look_at(rank)
        now = time.monotonic()
        if now > self._deadline:
            late = self._late(late)
            raise WaitTimeoutError(
                f"group '{self.name}': {timed_out(self.timeout_ms, self.default_ms)}: rank "
                f"{self.ranks[self.position]} still waits for rank(s) {self._names(late)} to call their first "
                "collective on it. Every rank of the group must call it, because it connects the ranks. Check that all "
                "processes were started, and find out what those ranks are doing (for example `py-spy dump --pid "
                "PID`), or raise the timeout of the group.",
                **self._about(self.ranks[late[0]]),
            )
        if now - self._begin >= self._next_warning_s:
            self._warn(now - self._begin, self._names(self._late(late)))
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _late(self, late: list[int] | None) -> list[int]:
        """The positions of the ranks that this rank waits for: those without a hello, or the first, if none answers."""
        if late is None:
            late = [i for i in range(len(self.ranks)) if self._read(f"hello/{i}") is None] or [0]
        return late

    def _names(self, positions: list[int]) -> str:
        return ", ".join(str(self.ranks[i]) for i in positions)

    def _warn(self, waited_s: float, late: str) -> None:
        """Log that this rank still waits. As the core: after 1, 3 and 6 intervals, then after every 6."""
        interval, due = self._interval_s, self._next_warning_s
        self._next_warning_s = 3 * interval if due == interval else 6 * interval * (waited_s // (6 * interval) + 1)
        log.warning(
            "rank %d: still waiting for rank%s %s on group '%s': connecting its ranks (%.1f s of %.10g s)",
            self.ranks[self.position],
            "s" if "," in late else "",
            late,
            self.name,
            waited_s,
            self.timeout_ms / 1000,
        )

    def _look_at(self, rank: int) -> None:
        try:
            self.check_peer(rank)
        except PeerDeadError as error:
            raise PeerDeadError(
                f"group '{self.name}': {error}, and the ranks of the group are not connected yet. Make a new process "
                "group without that rank.",
                **self._about(rank),
            ) from None

    def _about(self, peer: int) -> dict[str, Any]:
        """The attributes of an error about that rank."""
        return {"rank": self.ranks[self.position], "peer": peer, "operation": "enable_group", "group": self.name}

    def _write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def _read(self, key: str, length: int = 0) -> Any:
        """The value of a key; None if it has none, or one that is not a list of that length."""
        value = json.loads(self.store.get(key)) if self.store.check([key]) else None
        return value if not length or (isinstance(value, list) and len(value) == length) else None

    def _remove(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # not every store can delete; nothing reads the keys any more
            self.store.delete_key(key)


class FirstFailure:
    """A context in which the ranks of the group of that name connect. If that fails, later entries raise RevokedError.

    After a timeout it may be tried again: nothing was sent, and a late rank may still call it.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._error: PhalanxError | None = None

    def __enter__(self) -> None:
        if self._error is not None:
            raise RevokedError(
                f"group '{self._group}': its ranks failed to connect before, so they may be out of step; make a new "
                f"process group. The first failure was: {self._error}",
                operation="enable_group",
                group=self._group,
            )

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, PhalanxError) and not isinstance(error, WaitTimeoutError):
            self._error = error


class _Local(threading.local):
    making: int = 0


_local = _Local()


def in_group_creation() -> bool:
    """Whether the calling thread is inside the core's group_create, where no other call into it is allowed."""
    return _local.making > 0


class StoreInUse:
    """The store of the group that the calling thread makes, as the core sees it: that of a world has many groups."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextlib.contextmanager
    def use(self, store: Any) -> Iterator[None]:
        """A context in which the calling thread makes a group, and the core uses this torch store."""
        self._local.store = store
        _local.making += 1
        try:
            yield
        finally:
            _local.making -= 1
            self._local.store = None

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: getattr(self._local.store, method)(*args)
