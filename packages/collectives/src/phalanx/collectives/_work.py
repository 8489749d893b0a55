"""The works that Python makes: of the core, of a stream of a GPU, of what a coalescing manager has recorded."""

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from phalanx.collectives import _errors
from phalanx.collectives._cuda import StreamMarker
from phalanx.core import PhalanxError, check, ffi, lib
from phalanx.core.timeouts import milliseconds
from phalanx.core.uncopied import Uncopied

_IN_PROGRESS = 1  # PHX_IN_PROGRESS

# Works that were dropped before they were complete, with what they read and write. They move on in every call of this
# rank that waits, so nobody has to wait for them here, where a garbage collection may have brought us.
_parked: deque[tuple[Any, tuple[Any, ...], bool]] = deque()


def _sweep() -> None:
    for _ in range(len(_parked)):
        try:
            work, kept, is_message = _parked.popleft()
        except IndexError:  # another thread was faster
            return
        if lib.phx_work_test(work) == _IN_PROGRESS:
            _parked.append((work, kept, is_message))
        else:
            lib.phx_work_release(work)


_MESSAGE_MS = 5000  # what a message that nobody has waited for gets at the end of the process
_made: list[bool] = []  # not empty: there were works


def complete_works() -> None:
    """At the end of the process: wait for works that nobody has waited for, because other ranks need them.

    Collectives get the timeout of their group; a message that no rank takes, or sends, gets some seconds.
    """
    if not _made:
        return
    live = [each for each in gc.get_objects() if type(each) is CoreWork]
    works = [(each._pointer, each._is_message) for each in live if each._kept]
    works += [(pointer, is_message) for pointer, _, is_message in _parked]
    end = time.monotonic() + _MESSAGE_MS / 1000
    for pointer, is_message in sorted(works, key=lambda work: work[1]):
        if not is_message:
            lib.phx_work_wait(pointer, 0)
            continue
        while lib.phx_work_test(pointer) == _IN_PROGRESS and time.monotonic() < end:
            time.sleep(0.0002)


class CoreWork(Uncopied, Work):
    """A collective or message of the core that was started.

    Args:
        start: A function of the core, without its last argument, the work.
        kept: The tensors that it reads and writes, or what has them.
        ranks: Global ranks of the group, in order.
        is_message: Whether it is a message, and not a collective.

    Raises:
        PhalanxError: It could not be started.
    """

    def __init__(self, start: Any, kept: tuple[Any, ...], ranks: tuple[int, ...], is_message: bool = False) -> None:
        super().__init__()
        self._kept: tuple[Any, ...] = ()
        if _parked:
            _sweep()
        out = ffi.new("phx_work **")
        check(start(out))
        self._pointer = out[0]
        self._kept = kept
        self._ranks = ranks
        self._is_message = is_message
        if not _made:
            _made.append(True)
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is complete. A later call returns at once, or raises the same.

        Args:
            timeout: How long; None or zero is the default of the process group, as with torch, and less is over at
                once.

        Returns:
            True.

        Raises:
            PhalanxError: It failed.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        try:
            check(lib.phx_work_wait(self._pointer, milliseconds(timeout) if timeout else 0))
        except PhalanxError as error:
            self._error = error
            _errors.keep(error)  # torch's wait_tensor passes only a text on
            raise
        self._kept = ()
        return True

    def is_completed(self) -> bool:
        """Whether it is complete, with success or not. Never blocks."""
        return bool(lib.phx_work_test(self._pointer) != _IN_PROGRESS)

    def is_success(self) -> bool:
        """Whether it is complete with success. Never blocks."""
        return bool(lib.phx_work_test(self._pointer) == 0)

    def exception(self) -> Any:
        """The error with which it failed, or None. Never blocks."""
        try:
            check(lib.phx_work_test(self._pointer))
        except PhalanxError as error:
            return error
        return None

    def source_rank(self) -> int:
        """The global rank from which a completed receive came.

        Raises:
            NotFoundError: It is not complete, or no receive.
        """
        group_rank = ffi.new("int32_t *")
        check(lib.phx_work_get_source(self._pointer, group_rank))
        return int(self._ranks[group_rank[0]])

    _source_rank = source_rank  # torch has both names

    def __del__(self) -> None:
        pointer = getattr(self, "_pointer", None)
        if pointer is None or sys.is_finalizing():
            return
        if self._kept:
            _parked.append((pointer, self._kept, self._is_message))
        else:
            lib.phx_work_release(pointer)


class StreamWork(Work):
    """Work that was put on the current stream of a GPU. A later call on the group raises an error of it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._mark = StreamMarker(device)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for it. The host goes on.

        Returns:
            True.
        """
        self._mark.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the stream has come past it. Never blocks."""
        return self._mark.query()

    is_success = is_completed

    def exception(self) -> None:
        """Always None."""


_OPEN, _ISSUED, _DONE, _DROPPED = "open", "issued", "done", "dropped"


class CompositeWork(Work):
    """The work of all collectives and messages that one coalescing manager has recorded on the group of that name."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self._group = group
        self._state = _OPEN
        self._error: BaseException | None = None
        self._works: list[Work] = []
        self._finish: list[Callable[[], Any]] = []
        self._kept: Any = None
        self._lock = threading.RLock()

    def issued(self, works: list[Work], finish: list[Callable[[], Any]], kept: Any) -> None:
        """Its parts have been started. `finish` is what is left to be done when these are complete, and `kept` lives
        until then."""
        self._works, self._finish, self._kept, self._state = works, finish, kept, _ISSUED

    def failed(self, error: BaseException) -> None:
        """Its parts could not be started."""
        self._state, self._error = _ISSUED, error

    def dropped(self) -> None:
        """Its parts are never started: the body raised."""
        self._state = _DROPPED

    def refuse_until_issued(self) -> None:
        """Raise RuntimeError if it has not been issued yet, or never will be."""
        if self._state is _OPEN:
            raise RuntimeError(
                f"a collective on group '{self._group}' has not been issued yet: it was called inside a "
                "coalescing_manager that is still open; use its result after the with block"
            )
        if self._state is _DROPPED:
            raise RuntimeError(
                f"a collective on group '{self._group}' was never issued: the body of its coalescing_manager raised"
            )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all are complete, and their results are where they belong. A later call returns at once, or raises
        the same.

        Args:
            timeout: How long to wait for each; None or zero is the default of the process group, as with torch.

        Returns:
            True.

        Raises:
            RuntimeError: It has not been issued yet, or never will be.
            PhalanxError: One failed.
        """
        if self._state is _DONE:
            return True
        self.refuse_until_issued()
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._state is _DONE:
                return True
            try:
                for work in self._works:
                    work.wait(timeout) if timeout else work.wait()
                with torch.no_grad():
                    for finish in self._finish:
                        finish()
            except BaseException as error:
                self._error = error
                raise
            self._state = _DONE
            self._works, self._finish, self._kept = [], [], None
        return True

    def is_completed(self) -> bool:
        """Whether it is complete. Never blocks. It is not while `wait` has something left to do, such as a copy."""
        if self._state is _ISSUED and self._error is None:
            return not self._finish and all(work.is_completed() for work in self._works)
        return self._state is _DONE or self._error is not None

    def is_success(self) -> bool:
        """Whether it is complete without an error. Never blocks."""
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        """The error that a wait for it raised, or None. Never blocks."""
        return self._error


class DeferredWork(Work):
    """The work of a message that `start` sends or receives at the end of a body; `refuse` raises before that."""

    def __init__(self, start: Callable[[], Work], refuse: Callable[[], None]) -> None:
        super().__init__()
        self._start = start
        self._refuse = refuse
        self._real: Work | None = None
        self._waited = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Send or receive it now."""
        self._real = self._start()

    def _begun(self) -> Work:
        if self._real is None:
            self._refuse()
            raise RuntimeError("a message was never issued: another call of its coalescing_manager failed before it")
        return self._real

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is complete. A later call returns at once.

        Raises:
            RuntimeError: The body has not been left yet.
            PhalanxError: It failed.
        """
        work = self._begun()
        with self._lock:  # gloo's work must be waited for once only
            if not self._waited:
                work.wait(timeout) if timeout else work.wait()
                self._waited = True
        return True

    def is_completed(self) -> bool:
        """Whether it is complete. Never blocks."""
        return self._waited or (self._real is not None and bool(self._real.is_completed()))

    def is_success(self) -> bool:
        """Whether it is complete with success. Never blocks."""
        return self._waited or (self._real is not None and bool(self._real.is_success()))

    def exception(self) -> Any:
        """The error with which it failed, or None. Never blocks."""
        return None if self._real is None or self._waited else self._real.exception()

    def source_rank(self) -> int:
        """The global rank from which a completed receive came."""
        return source_of(self._begun())

    _source_rank = source_rank  # torch has both names


def source_of(work: Any) -> int:
    """The global rank from which a completed receive came."""
    return int(work.source_rank() if isinstance(work, (DeferredWork, CoreWork)) else work._source_rank())
