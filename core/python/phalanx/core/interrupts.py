"""Signal handlers of Python that run while the core waits, such as the one for Ctrl-C.

Python runs signal handlers between the steps of the main thread, and a call of the core is one step. So the core asks
a hook about every 100 ms while the main thread waits in it (phx_set_interrupt), and handlers run in there. What a
handler raises ends the wait and is raised by the call, instead of the error of the core.
"""

import atexit
import os
import threading
from typing import Any

# What a handler raised in the main thread, until it is raised from the call that it has interrupted.
kept: list[BaseException] = []

_hook: list[Any] = []  # the callback, once installed; C may call it as long as the process lives
_ffi: Any = None
_slots: Any = None  # see `slots`


def install(ffi: Any, lib: Any) -> None:
    """Set the hook of the main thread. A later call, or one in another thread, does nothing."""
    global _ffi, _slots
    if _hook or threading.current_thread() is not threading.main_thread():
        return
    _ffi = ffi
    _slots = ffi.new("void *[3]")
    _slots[2] = ffi.cast("void *", threading.get_ident())
    null = ffi.NULL

    def asked(_: Any) -> int:
        return 0 if _slots[1] == null else 1  # pending handlers have run when this line is reached

    def raised(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        _keep(error.with_traceback(trace))

    _hook.append(ffi.callback("phx_interrupt_fn", asked, error=1, onerror=raised))
    lib.phx_set_interrupt(_hook[0], null)

    def in_child() -> None:  # the hook is of the process that set it; the thread that forked is the main one now
        kept.clear()
        _slots[1], _slots[2] = null, ffi.cast("void *", threading.get_ident())
        lib.phx_set_interrupt(_hook[0], null)

    os.register_at_fork(after_in_child=in_child)
    atexit.register(lib.phx_set_interrupt, null, null)


def slots() -> Any:
    """Where native code looks for what is kept: three pointers, the type, the exception (or NULL) and the main thread.

    Native code that raises the exception sets the second to NULL.
    """
    return _slots


def keep(error: BaseException) -> bool:
    """Let the call of the core that this thread is in raise `error`, once it has failed.

    For callbacks of the core, from which nothing can propagate.

    Returns:
        False in other threads than the main one, where nothing is kept.
    """
    if not _hook or threading.current_thread() is not threading.main_thread():
        return False
    _keep(error)
    return True


def _keep(error: BaseException) -> None:
    kept[:] = [error]
    _slots[0] = _ffi.cast("void *", id(type(error)))
    _slots[1] = _ffi.cast("void *", id(error))


def take() -> BaseException | None:
    """What a handler has raised while this thread waited in the core, to be raised now; None if there is nothing."""
    if not kept or threading.current_thread() is not threading.main_thread():
        return None
    error = kept.pop()
    raised = _slots[1] == _ffi.NULL  # by native code
    _slots[1] = _ffi.NULL
    return None if raised else error
