"""What stands for calls whose work is not known to the ops: works, and what pending results wait with."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Work

from phalanx.collectives._async_tensor import AsyncCollectiveTensor
from phalanx.collectives._torch_compat import make_wrapper
from phalanx.collectives._works import CoreWork


class Together(AsyncCollectiveTensor):
    """What pending results have in common: as if they were views of it, they wait when it does."""

    __slots__ = ("settle",)
    settle: Callable[[], Any]

    @staticmethod
    def of(settle: Callable[[], Any]) -> "Together":
        """That of results which are there when `settle` returns."""
        elem = torch.empty(0)
        made: Together = make_wrapper(Together, elem.size(), None, None, None, elem.dtype)
        made.elem, made.settle, made._state = elem, settle, True
        return made

    def trigger_wait(self) -> torch.Tensor:
        self.settle()
        return self.elem


class Body(Protocol):
    """What was recorded in a body."""

    @property
    def is_over(self) -> bool: ...

    @property
    def error(self) -> BaseException | None: ...

    def settle(self, timeout: timedelta | None = None) -> None: ...


class BodyWork(Work):
    """The work of all collectives and messages of one body.

    Args:
        body: They.
    """

    def __init__(self, body: Body) -> None:
        super().__init__()
        self._body = body

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all are complete, and their results are where they belong. A later call returns at once.

        Args:
            timeout: How long; None or zero is the default of the process group, as with torch.

        Returns:
            True.

        Raises:
            PhalanxError: One failed.
        """
        self._body.settle(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether it is over. Never blocks. What is left to do in `wait`, such as a copy, counts as not over."""
        return self._body.is_over

    def is_success(self) -> bool:
        """Whether it is over without an error. Never blocks."""
        return self._body.is_over and self._body.error is None

    def exception(self) -> Any:
        """What a wait for it raised, or None. Never blocks."""
        return self._body.error


class LaterWork(Work):
    """The work of a message that is sent or received at the end of a body.

    Args:
        start: Sends or receives it, and gives its work.
        refuse: Raises, as long as the body has not been left.
    """

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
            raise RuntimeError("the message was never issued: its coalescing_manager failed before")
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
        """Whether it is over. Never blocks."""
        return self._waited or (self._real is not None and bool(self._real.is_completed()))

    def is_success(self) -> bool:
        """Whether it is over with success. Never blocks."""
        return self._waited or (self._real is not None and bool(self._real.is_success()))

    def exception(self) -> Any:
        """What it failed with, or None. Never blocks."""
        return None if self._real is None or self._waited else self._real.exception()

    def source_rank(self) -> int:
        """The global rank from which a completed receive came."""
        return source_of(self._begun())

    _source_rank = source_rank  # torch has both names


def source_of(work: Any) -> int:
    """The global rank from which a completed receive came."""
    return int(work.source_rank() if isinstance(work, (LaterWork, CoreWork)) else work._source_rank())
