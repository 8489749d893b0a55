"""Errors of the native ops as exceptions of phalanx.core."""

import threading
from typing import NoReturn

from phalanx.collectives import _library
from phalanx.core import interrupts


class _Stash(threading.local):
    error: BaseException | None = None


_stash = _Stash()


def keep(error: BaseException) -> None:
    """Remember what a kernel in Python raised: the native op that called it can pass on its text only."""
    if isinstance(error, Exception) or not interrupts.keep(error):
        _stash.error = error


def better(error: BaseException) -> BaseException:
    """The exception to raise for one that a native op raised in this thread just now: a PhalanxError with all that the
    core knows, the exception of torch.distributed, or `error` itself."""
    stashed, _stash.error = _stash.error, None
    if stashed is not None and str(stashed) and str(stashed) in str(error):
        return stashed
    return _library.loaded().explain(error)


def fail(error: Exception) -> NoReturn:
    """Raise the better exception for one that a native op raised in this thread just now."""
    raise better(error) from None
