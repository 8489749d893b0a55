"""What happens while the core calls back into Python.

Nothing may propagate into C, and nothing may call the core again: a garbage collection inside a
callback can drop the last reference to a handle, so releases wait until the callback is over.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from phalanx.core import interrupts

_INTERRUPTED = -16


class _State(threading.local):
    depth: int = 0
    failure: tuple[int | None, BaseException] | None = None


_state = _State()
_postponed: deque[Callable[[], object]] = deque()


def guarded(body: Callable[..., int | None], fallback: int | None) -> Callable[..., int | None]:
    """Wrap a callback: its exceptions become a status and are kept for the error that follows.

    Args:
        body: Returns a PHX_* status, or None for PHX_OK; may raise.
        fallback: The status when it raises, unless the exception has a status of its own. None is for a callback that
            returns nothing to C.
    """

    def run(*args: Any) -> int | None:
        _state.depth += 1
        try:
            status = body(*args)
            _state.failure = None
        except BaseException as error:
            if not isinstance(error, Exception) and interrupts.keep(error):  # such as Ctrl-C
                status = _INTERRUPTED
            else:
                status = getattr(error, "callback_status", fallback)
                _state.failure = (status, error)
        finally:
            _state.depth -= 1
        return None if fallback is None else status or 0

    return run


def take_exception(status: int) -> BaseException | None:
    """The exception of this thread's last callback, if it failed with this status."""
    failure, _state.failure = _state.failure, None
    return failure[1] if failure is not None and failure[0] == status else None


def release(action: Callable[[], object]) -> None:
    """Run a release now, or after the callback that this thread is in."""
    if _state.depth:
        _postponed.append(action)
        return
    action()
    drain()


def drain() -> None:
    """Run the releases that were put off. Cheap when there are none."""
    while _postponed and not _state.depth:
        try:
            action = _postponed.popleft()
        except IndexError:  # another thread was faster
            return
        action()
