"""The core's log, which is off until `set_log` is called."""

import atexit
import logging
from collections.abc import Callable
from typing import Any

from phalanx.core import _callbacks
from phalanx.core._lib import ffi, lib
from phalanx.core.errors import check

LogFunction = Callable[[int, str, int, str], object]

_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
_alive: list[Any] = []  # C may call any callback that it was ever given until the next one is set


def set_log(function: LogFunction | logging.Logger | None, min_level: int = logging.WARNING) -> None:
    """Send what the core logs, in all worlds of this process, to a function or a logger.

    The function is called from any thread, also from threads of the core, and must not call the
    core. Not collective.

    Args:
        function: Called with (level of `logging`, file, line, message); or a Logger; None turns
            logging off.
        min_level: A level of `logging`; what is below it is not logged.

    Example:
        >>> set_log(logging.getLogger("phalanx"), logging.ERROR)
        >>> set_log(None)
    """
    if function is None:
        check(lib.phx_set_log(ffi.NULL, ffi.NULL, 0))
        _alive.clear()
        return
    write = _to_logger(function) if isinstance(function, logging.Logger) else function

    def body(user: Any, level: int, file: Any, line: int, message: Any) -> int:
        write(
            _LEVELS[max(0, min(level, len(_LEVELS) - 1))],
            "" if file == ffi.NULL else ffi.string(file).decode("utf-8", "replace"),
            line,
            ffi.string(message).decode("utf-8", "replace"),
        )
        return 0

    run = _callbacks.guarded(body, 0)

    def log(*args: Any) -> None:
        run(*args)

    callback = ffi.callback("phx_log_fn", log)
    wished = sum(min_level > level for level in _LEVELS)
    check(lib.phx_set_log(callback, ffi.NULL, wished))
    _alive[:] = [callback]
    atexit.unregister(_off)
    atexit.register(_off)


def _to_logger(logger: logging.Logger) -> LogFunction:
    def write(level: int, file: str, line: int, message: str) -> None:
        logger.log(level, "%s (%s:%d)", message, file, line)

    return write


def _off() -> None:
    # The monitor threads of the core may outlive the interpreter.
    lib.phx_set_log(ffi.NULL, ffi.NULL, 0)
