"""What was started on a group of several hosts. It has those calls of the core's Work that works of torch make."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.core import ANY_RANK, PhalanxError, RevokedError

Late = Callable[["Pending", int], PhalanxError]


def told(what: str, group: str, cause: PhalanxError) -> PhalanxError:
    """The cause of a failure as the error of a call that it ended."""
    text = f"{what} on group '{group}': {cause}"
    return type(cause)(text, rank=cause.rank, peer=cause.peer, operation=what, group=group)


def revoked(what: str, group: str, cause: object) -> PhalanxError:
    """The error of a call that comes after a failure."""
    text = f"{what} on group '{group}': the group was revoked by an earlier failure: {cause}"
    return RevokedError(text, operation=what, group=group)


class Pending:
    """A collective or message under way.

    Args:
        what: Its name.
        owner: What keeps the memory that it reads and writes, as long as this lives.
        timeout_ms: What it may take.
        late: Makes the error of a wait that took too long, and sees to it that nobody waits in vain.
        patience_s: How much longer than it was told a wait goes on, because who is to blame will be known by then.

    Attributes:
        error: What it failed with, once it has ended.
    """

    def __init__(
        self, what: str, owner: Any, timeout_ms: int, late: Late, patience_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.what = what
        self.late = late
        self.error: PhalanxError | None = None
        self._owner = owner
        self.timeout_ms, self._begun_s = timeout_ms, time.monotonic()
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._source = -1
        self._then: Callable[[Pending], None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def end(self, error: PhalanxError | None = None, source: int = -1) -> None:
        """Once: it is complete, or has failed. What comes later does not count."""
        with self._lock:
            if self._ended.is_set():
                return
            self.error, self._source = error, source
            self._ended.set()
            then, self._then = self._then, None
        if then is not None:
            then(self)

    def then(self, call: Callable[["Pending"], None]) -> None:
        """Call it at the end, which may be now."""
        with self._lock:
            if not self._ended.is_set():
                self._then = call
                return
        call(self)

    # ---- as the core's Work -------------------------------------------------------------------------

    def test(self) -> bool:
        if not self._ended.is_set():
            return False
        if self.error is not None:
            raise self.error
        return True

    def expire(self, timeout_ms: int = 0) -> None:
        self.wait(1)  # its time is over, which the error says

    def wait(self, timeout_ms: int = 0) -> None:
        if not self._ended.wait(timeout_ms / 1000) and not self._ended.wait(self._patience_s()):
            over = time.monotonic() - self._begun_s >= self.timeout_ms / 1000  # then it is asked without waiting
            self.end(self.late(self, max(timeout_ms, self.timeout_ms if over else 0)))
        self.test()

    def source(self) -> int:
        return self._source


class Joined(Pending):
    """Several as one. It ends with the first error, or when all are complete.

    Args:
        what: Its name.
        parts: What it waits for.
        owner: As of Pending.
        timeout_ms: As of Pending.
        late: As of Pending.
    """

    def __init__(self, what: str, parts: Sequence[Pending], owner: Any, timeout_ms: int, late: Late) -> None:
        super().__init__(what, owner, timeout_ms, late)
        self.parts = tuple(parts)
        self._left = len(self.parts)
        if not self.parts:
            self.end()
        for part in self.parts:
            part.then(self._one_ended)

    def _one_ended(self, part: Pending) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last or part.error is not None:
            self.end(part.error)


class Receive(Pending):
    """A message that is awaited, or on its way."""

    def __init__(
        self,
        what: str,
        source: int,
        tag: int,
        about: str,
        into: memoryview,
        owner: Any,
        timeout_ms: int,
        late: Late,
    ) -> None:
        super().__init__(what, owner, timeout_ms, late)
        self.wanted_from, self.tag, self.about, self.into = source, tag, about, into

    def takes(self, source: int, tag: int) -> bool:
        """Whether a message of that sender and tag is awaited by it."""
        return tag == self.tag and self.wanted_from in (source, ANY_RANK)


class Send(Pending):
    """A message that is sent."""

    def __init__(self, what: str, to: int, data: memoryview, owner: Any, timeout_ms: int, late: Late) -> None:
        super().__init__(what, owner, timeout_ms, late)
        self.to, self.data = to, data
