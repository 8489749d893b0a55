"""Collectives that were started and not yet waited for."""

from collections.abc import Callable
from typing import Any

from phalanx.core import _callbacks
from phalanx.core._handle import Handle, c_timeout
from phalanx.core._lib import lib
from phalanx.core.errors import PhalanxError, check, error_from_info, new_info

_IN_PROGRESS = 1
_NOT_FOUND = -9


class Work:
    """A collective in progress. Its buffers must stay valid, and its output unread, until `wait`.

    Buffers that were given as objects are kept alive until then, even when the Work is dropped.
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
        self._buffers: tuple[object, ...] = buffers
        self._abandon = abandon

    @property
    def pointer(self) -> Any:
        """The phx_work pointer, for calls through `lib`."""
        return self._handle.pointer

    def wait(self, timeout_ms: int = 0) -> None:
        """Wait until the collective is complete here. A second call returns at once.

        Args:
            timeout_ms: How long, in milliseconds; 0 is that of the collective.

        Raises:
            WaitTimeoutError: Peers did not come in time; the text names them.
            PeerDeadError: A peer died.
            MismatchError: Ranks disagree about the call.
            RevokedError: The group failed before.
        """
        check(lib.phx_work_wait(self._handle.pointer, c_timeout(timeout_ms)))
        self._buffers = ()

    def test(self) -> bool:
        """Whether the collective is complete. Never blocks.

        Raises:
            PhalanxError: It failed.
        """
        if check(lib.phx_work_test(self._handle.pointer)) != 0:
            return False
        self._buffers = ()
        return True

    def error(self) -> PhalanxError | None:
        """What it failed with, or None. Never blocks."""
        info = new_info()
        status = lib.phx_work_error(self._handle.pointer, info)
        if status == _NOT_FOUND:
            return None
        check(status)
        return error_from_info(info)

    def __del__(self) -> None:
        # A dropped work still runs: its buffers must outlive it.
        if self._buffers and self._handle.alive():
            self._abandon(self._handle, self._buffers)
        else:
            self._handle.drop()


class Abandoned:
    """Works that were dropped before they were complete, with their buffers. One per group."""

    def __init__(self) -> None:
        self._works: list[tuple[object, Handle]] = []

    def add(self, handle: Handle, buffers: object) -> None:
        """Keep a work, and one use of it, with its buffers until it is complete."""
        self._works.append((buffers, handle))

    def __del__(self) -> None:
        # Nobody can wait for them any more, and without a call of ours nothing is written.
        for _, handle in self._works:
            handle.drop()

    def sweep(self) -> None:
        """Let go of those that are complete or failed. Called at each later collective."""
        if self._works:
            works, self._works = self._works, []
            for buffers, handle in works:
                if lib.phx_work_test(handle.pointer) == _IN_PROGRESS:
                    self._works.append((buffers, handle))
                else:
                    handle.drop()
            _callbacks.drain()
