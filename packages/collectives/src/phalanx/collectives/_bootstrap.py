"""How the ranks of a process group agree on whether the core serves it, through torch's store.

A store may hold what an earlier run of the same program left in it. So nothing is believed because it is there: every
rank says hello with a number drawn at random, the first rank of the group answers all of them with a *token*, and each
rank acknowledges an answer that quotes its own number. What the core then writes goes below the token.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

from phalanx.core import AbiError, PeerDeadError, PhalanxError, RevokedError, WaitTimeoutError, ffi, lib
from phalanx.core.timeouts import timed_out

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


def _build() -> str:
    """What this rank runs."""
    known = json.loads(ffi.string(lib.phx_build_info()).decode())
    return f"{known['version']} (build {known['build']})"


class BootstrapResult(NamedTuple):
    """What all ranks of the group know when it is over.

    Attributes:
        token: Drawn for this time; the same on all ranks.
        refusal: Why a rank cannot use the core; "" when all can.
        hosts: What the ranks call their hosts, in order.
    """

    token: str
    refusal: str
    hosts: list[str]


class Bootstrap:
    """How the ranks of a group meet, once.

    Args:
        store: A torch Store that the ranks share.
        name: Name of the group.
        ranks: Its global ranks, in order.
        position: Of this rank among them.
        timeout_ms: How long to wait for the others.
        check_peer: Raises PeerDeadError if it knows that a rank, by its global number, has ended.
        default_ms: The timeout of the group; None where `timeout_ms` is that.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        ranks: Sequence[int],
        position: int,
        timeout_ms: int,
        check_peer: Callable[[int], None] = lambda _: None,
        default_ms: int | None = None,
    ) -> None:
        self._store = store
        self._name = name
        self._ranks = ranks
        self._position = position
        self._timeout_ms = timeout_ms
        self._check_peer = check_peer
        self._default_ms = default_ms
        self._deadline = time.monotonic() + timeout_ms / 1000
        self._pause_s = _FIRST_PAUSE_S

    def run(self, refusal: str, host: str = "") -> BootstrapResult:
        """Meet the others. Collective among the ranks of the group.

        Args:
            refusal: Why this rank cannot use the core, or "".
            host: What this rank calls its host; alike exactly on ranks that can share memory.

        Raises:
            WaitTimeoutError: Ranks did not come in time; the text names them.
            AbiError: Ranks run different builds of phalanx-core. Raised on all of them.
            PeerDeadError: One has ended, as is known from another group of this process.
        """
        if len(self._ranks) == 1:
            return BootstrapResult(uuid4().hex, refusal, [host])
        hello = [uuid4().hex, refusal, host, _build()]
        self._write(f"hello/{self._position}", hello)
        return self._lead(hello) if self._position == 0 else self._follow(hello)

    def _lead(self, hello: list[str]) -> BootstrapResult:
        token = uuid4().hex
        answered: list[list[str]] = []
        hosts: list[str] = []
        builds: list[str] = []
        others = range(1, len(self._ranks))
        while True:
            hellos = [hello, *(self._read(f"hello/{i}", len(hello)) for i in others)]
            if None not in hellos and hellos != answered:
                answered = hellos
                refusal = next(
                    (f"rank {rank}: {no}" for rank, (_, no, *_) in zip(self._ranks, hellos, strict=True) if no), ""
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
            if answer is not None and answer[2][self._position] == hello[0]:
                break
            if self._read(f"hello/{self._position}") is None:  # removed at the end of the meeting before
                self._write(f"hello/{self._position}", hello)
            self._pause(None)
        self._write(f"thanks/{self._position}", answer[0])
        self._compare(answer[4])
        return BootstrapResult(answer[0], answer[1], answer[3])

    def _compare(self, builds: list[str]) -> None:
        for i, build in enumerate(builds):
            if build != builds[0]:
                raise AbiError(
                    f"group '{self._name}': rank {self._ranks[0]} runs phalanx {builds[0]} and rank {self._ranks[i]} "
                    f"runs phalanx {build}; ranks of different builds would compute wrong values together. Install one "
                    "build of phalanx-core for all ranks.",
                    rank=self._ranks[self._position],
                    peer=self._ranks[i],
                    operation="enable_group",
                    group=self._name,
                )

    def _pause(self, late: list[int] | None) -> None:
        for rank in self._ranks if late is None else [self._ranks[i] for i in late]:
            if rank != self._ranks[self._position]:
                self._look_at(rank)
        if time.monotonic() > self._deadline:
            if late is None:  # whoever has not said hello; if all have, the first rank did not answer
                late = [i for i in range(len(self._ranks)) if self._read(f"hello/{i}") is None] or [0]
            names = ", ".join(str(self._ranks[i]) for i in late)
            me = self._ranks[self._position]
            raise WaitTimeoutError(
                f"group '{self._name}': {timed_out(self._timeout_ms, self._default_ms)}: rank {me} still waits for "
                f"rank(s) {names} to call their first collective on it. The first collective on a group is where its "
                "ranks meet: every rank of the group must call it.",
                rank=me,
                peer=self._ranks[late[0]],
                operation="enable_group",
                group=self._name,
            )
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _look_at(self, rank: int) -> None:
        try:
            self._check_peer(rank)
        except PeerDeadError as error:
            raise PeerDeadError(
                f"group '{self._name}': {error}, and its ranks have not met yet. Make a new process group without it.",
                rank=self._ranks[self._position],
                peer=rank,
                operation="enable_group",
                group=self._name,
            ) from None

    def _write(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _read(self, key: str, length: int = 0) -> Any:
        """What is there; None if nothing is, or not a list of that length: something else has written it."""
        value = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return value if not length or (isinstance(value, list) and len(value) == length) else None

    def _remove(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # not every store can; the keys are of no use to anybody
            self._store.delete_key(key)


class FirstFailure:
    """A context in which the ranks of a group meet. Where that fails, later entries raise RevokedError.

    A timeout may be tried again: nothing has been sent, and a late rank may still come.

    Args:
        group: Its name.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._error: PhalanxError | None = None

    def __enter__(self) -> None:
        if self._error is not None:
            raise RevokedError(
                f"the ranks of group '{self._group}' could not meet before, so they may be out of step; make a new "
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

    def set(self, key: str, value: bytes) -> None:
        self._local.store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._local.store.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._local.store.compare_set(key, expected, desired))

    def add(self, key: str, amount: int) -> int:
        return int(self._local.store.add(key, amount))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._local.store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._local.store.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._local.store.delete_key(key))
