"""The life of a road (see _hosts_road.py): its thread, its messages, and what goes wrong."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from phalanx.collectives._hosts import Spanning
from phalanx.collectives.c10d._hosts_mail import Mail
from phalanx.collectives.c10d._hosts_pending import Joined, Pending, revoked, told
from phalanx.core import Group, PhalanxError, RevokedError, WaitTimeoutError
from phalanx.core.timeouts import timed_out

_LONGER_S = 11.0  # than its timeout a Spanning may take to say who is to blame
_HEAR_S = 2.0  # between the end of a connection and the message that says why
_SOON_S = 1.0  # what it began a little later than the wait, it says a little later


class Task(Pending):
    """A call that the thread runs.

    Args:
        what: Its name.
        run: What it does.
        owner: As of Pending.
        timeout_ms: As of Pending.
        road: Whose thread runs it.
    """

    def __init__(self, what: str, run: Callable[[], None], owner: Any, timeout_ms: int, road: "BaseRoad") -> None:
        super().__init__(what, owner, timeout_ms, road.late, road.patience_s)
        self.run = run


class Beside(Protocol):
    """What ends with a road."""

    def fail(self, error: PhalanxError) -> None: ...

    def close(self) -> None: ...


class BaseRoad:
    """A group on several hosts, as one of its ranks sees it.

    Args:
        name: Of the group, for errors.
        ranks: Its global ranks, in order.
        position: Of this rank.
        spanning: Its collectives. Belongs to this, as all the following.
        inside: The core's group of the ranks on this host.
        mail: Makes the messages; takes a function that is told of failures.
        timeout_ms: Of the Spanning.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        position: int,
        spanning: Spanning,
        inside: Group,
        mail: Callable[[Callable[[PhalanxError, bool], None]], Mail],
        timeout_ms: int,
    ) -> None:
        self._name = name
        self._ranks = ranks
        self._position = self.position = position
        self._size = self.size = len(ranks)
        self._spanning = spanning
        self._inside: Group | None = inside
        self._limit_s = timeout_ms / 1000
        self._lock = threading.Lock()
        self._failure: PhalanxError | None = None
        self._has_failed = threading.Event()
        self._exchanges = 0
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._begun_s: float | None = None  # when what runs began; None: nothing does
        self._closed = False
        self._beside: Beside | None = None
        self._mail = mail(self._fail)
        self._mail.start()
        spanning.heard = self.heard

    # ---- how calls are run --------------------------------------------------------------------------

    def _run(
        self,
        what: str,
        run: Callable[[], None],
        *,
        timeout_ms: int,
        blocking: bool,
        channel: int = 0,
        owner: Any = None,
    ) -> Task | None:
        """Let the thread run it after what came before. `channel` is the core's: here there is one."""
        task = Task(what, run, owner, timeout_ms, self)
        with self._lock:
            self._check(what)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="phalanx_hosts", daemon=True)
                self._thread.start()
            self._tasks.put(task)
        if not blocking:
            return task
        task.wait(timeout_ms)
        return None

    def _work(self) -> None:
        with torch.inference_mode():  # it only sees memory
            while (task := self._tasks.get()) is not None:
                self._limit_s = task.timeout_ms / 1000
                self._spanning.set_timeout(task.timeout_ms)
                self._begun_s = time.monotonic()
                error = self._outcome(task)
                self._begun_s = None
                task.run = _nothing  # and what it refers to
                task.end(error)
                del task, error

    def _outcome(self, task: Task) -> PhalanxError | None:
        return self.attempt(task.what, task.run)

    def attempt(self, what: str, run: Callable[[], None]) -> PhalanxError | None:
        """Run it. What goes wrong, which is returned, ends the group."""
        if self._failure is not None:
            return revoked(what, self._name, self._failure)
        try:
            run()
        except PhalanxError as problem:
            error = problem
        except Exception as problem:
            error = PhalanxError(f"{what} on group '{self._name}': {type(problem).__name__}: {problem}")
        else:
            return None
        self._fail(error, False)
        cause = self._failure
        return error if cause is None or cause is error else told(what, self._name, cause)

    def next_exchange(self, what: str) -> int:
        """The number of an exchange of blocks among those of the group, alike on all ranks."""
        with self._lock:
            self._check(what)
            self._exchanges += 1
            return self._exchanges

    def check(self, what: str) -> None:
        """Raise what has ended the group."""
        with self._lock:
            self._check(what)

    # ---- what goes wrong ----------------------------------------------------------------------------

    def stop_receiving(self) -> None:
        """Before the end: messages that nobody has sent do not come any more. The group is as good as before."""
        rank = self._ranks[self._position]
        self._mail.stop_receiving(RevokedError(f"rank {rank} destroyed group '{self._name}'", group=self._name))

    def revoke(self, reason: str) -> None:
        """Make every later call on the group fail, on every rank, and those that wait."""
        self._fail(RevokedError(reason, group=self._name), False)

    def fail(self, error: PhalanxError) -> None:
        """The group is of no use any more. Only the first cause counts."""
        self._fail(error, False)

    def error(self) -> PhalanxError | None:
        """What has ended the group, for what comes later."""
        failure = self._failure
        return None if failure is None else revoked("a call", self._name, failure)

    def _fail(self, error: PhalanxError, known: bool) -> None:
        """The group is of no use any more. `known`: the other ranks have been told. Only the first cause counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
        self._has_failed.set()
        if not known:
            self._mail.give_up(str(error))
        self._mail.fail(error)
        inside = self._inside
        if inside is not None and inside.state == "active":
            inside.revoke(str(error))
        self._spanning.close()
        if self._beside is not None:
            self._beside.fail(error)

    def heard(self) -> PhalanxError | None:
        """Why the group has failed, or is about to: messages say it before connections of collectives are closed."""
        self._has_failed.wait(_HEAR_S)
        return self._failure

    def patience_s(self) -> float:
        """How long it is at most until the Spanning says who is to blame; 0 if that is not about to happen."""
        begun_s = self._begun_s
        left = 0.0 if begun_s is None else begun_s + self._limit_s + _LONGER_S - time.monotonic()
        return left if 0 < left <= _LONGER_S + _SOON_S else 0.0

    def late(self, pending: Pending, timeout_ms: int) -> PhalanxError:
        """The error of a collective that took too long. The ranks are out of step then."""
        rank = self._ranks[self._position]
        text = f"{pending.what} on group '{self._name}': {timed_out(timeout_ms)}: it did not end on rank {rank}"
        if isinstance(pending, Joined):
            text = next((str(part.late(part, timeout_ms)) for part in pending.parts if not part.is_over), text)
        error = WaitTimeoutError(text, rank=rank, operation=pending.what, group=self._name)
        self._fail(error, False)
        return error

    def _check(self, what: str) -> None:
        if self._failure is not None or self._closed:
            raise revoked(what, self._name, self._failure or "it was destroyed")

    def close(self) -> None:
        """Let go of connections, threads and the core's group. Not collective, and not from a thread of its own."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._begun_s is not None:
            self.revoke(f"rank {self._ranks[self._position]} destroyed group '{self._name}' while a call was under way")
        if self._beside is not None:
            self._beside.close()
        self._mail.close()
        self._spanning.close()
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
        self._inside = None


def _nothing() -> None: ...
