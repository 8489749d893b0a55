"""Collectives and messages that were started and not yet waited for."""

from collections import deque
from collections.abc import Callable
from typing import Any

from phalanx.core._handle import Handle, c_timeout
from phalanx.core._lib import ffi, lib
from phalanx.core.errors import PhalanxError, check, stored_error
from phalanx.core.uncopied import Uncopied

_IN_PROGRESS = 1


class Work(Uncopied):
    """A collective or message in progress. Its buffers must stay valid, and its output unread, until `wait`.

    It moves on inside every call of this rank that waits, and in `test`. Buffers that were given as objects are kept
    alive until it is complete, even when the Work is dropped.

    Example:
        >>> x = array("i", [1])
        >>> work = group.all_reduce(x, blocking=False)
        >>> work.wait()
        >>> x
        array('i', [2])
    """

    def __init__(
        self,
        pointer: Any,
        what: str,
        owner: Handle,
        buffers: tuple[object, ...],
        abandon: Callable[[Handle, object], None],
    ) -> None:
        # Retained, so that __del__ still has it when this is part of a cycle of garbage.
        self._handle = Handle(pointer, lib.phx_work_release, what, (owner,)).retain()
        self._buffers = buffers
        self._abandon = abandon

    @property
    def pointer(self) -> Any:
        """The phx_work pointer, for calls through `lib`."""
        return self._handle.pointer

    def wait(self, timeout_ms: int = 0) -> None:
        """Wait until it is complete here. A second call returns at once.

        Args:
            timeout_ms: How long, in milliseconds; 0 is the group's default.

        Raises:
            WaitTimeoutError: Peers did not come in time; the text names them.
            PeerDeadError: A peer died.
            MismatchError: Ranks disagree about the call.
            RevokedError: The group failed before.
        """
        check(lib.phx_work_wait(self._handle.pointer, c_timeout(timeout_ms)))
        self._buffers = ()

    def expire(self, timeout_ms: int = 0) -> None:
        """What `wait` does when its time is over: for a caller that looks with `test` and keeps the time itself.

        Args:
            timeout_ms: How long the caller has waited, in milliseconds; the error names it. 0 is the group's default.

        Raises:
            WaitTimeoutError: It was not complete.
            PhalanxError: As in `wait`.
        """
        check(lib.phx_work_expire(self._handle.pointer, c_timeout(timeout_ms)))
        self._buffers = ()

    def test(self) -> bool:
        """Whether it is complete. Never blocks.

        Raises:
            PhalanxError: It failed.
        """
        if check(lib.phx_work_test(self._handle.pointer)) != 0:
            return False
        self._buffers = ()
        return True

    def error(self) -> PhalanxError | None:
        """What it failed with, or None. Never blocks."""
        return stored_error(lib.phx_work_get_error, self._handle.pointer)

    def source(self) -> int:
        """The group rank from which a completed receive came. Never blocks.

        Raises:
            NotFoundError: It is not complete, or no receive.
        """
        rank = ffi.new("int32_t *")
        check(lib.phx_work_get_source(self._handle.pointer, rank))
        return int(rank[0])

    def __del__(self) -> None:
        # A dropped work still runs: its buffers must outlive it.
        if self._buffers and self._handle.alive():
            self._abandon(self._handle, self._buffers)
        else:
            self._handle.drop()


class OrphanedWorks(Uncopied):
    """Works that were dropped before they were complete, with their buffers. One per group.

    Args:
        group: Its handle.
    """

    def __init__(self, group: Handle) -> None:
        self._group = group
        self._works: deque[tuple[object, Handle]] = deque()  # threads may sweep at once: no lock, see Handle

    def add(self, handle: Handle, buffers: object) -> None:
        """Keep a work, and one use of it, with its buffers until it is complete."""
        self._works.append((buffers, handle))

    def __del__(self) -> None:
        # Nobody can wait for them any more; but as long as somebody else holds the group, such as a view of a peer's
        # block, they move on while this rank waits for something on another.
        for buffers, handle in self._works:
            self._group.keep(buffers)
            handle.drop()

    def sweep(self) -> None:
        """Let go of those that are complete or failed. Called at each later collective or message."""
        for _ in range(len(self._works)):
            try:
                buffers, handle = self._works.popleft()
            except IndexError:  # another thread was faster
                break
            if lib.phx_work_test(handle.pointer) == _IN_PROGRESS:
                self._works.append((buffers, handle))
            else:
                handle.drop()
