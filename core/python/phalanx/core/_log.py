"""The log callback of the core. `_lib` sets it when it loads the library; `log.set_log` changes it."""

import atexit
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.core import _callbacks

if TYPE_CHECKING:
    import logging

LogFunction = Callable[[int, str, int, str], object]

_LEVELS = (10, 20, 30, 40)  # DEBUG, INFO, WARNING and ERROR of `logging`, which is only imported for the first line
_alive: list[Any] = []  # C may call any callback that it was ever given until the next one is set


def send(ffi: Any, lib: Any, write: LogFunction | None, min_level: int) -> None:
    """Let the core call `write` for every line of at least `min_level`; None: for none."""
    if write is None:
        lib.phx_set_log(ffi.NULL, ffi.NULL, 0)
        _alive.clear()
        return

    def log(user: Any, level: int, file: Any, line: int, message: Any) -> None:
        write(
            _LEVELS[max(0, min(level, len(_LEVELS) - 1))],
            "" if file == ffi.NULL else ffi.string(file).decode("utf-8", "replace"),
            line,
            ffi.string(message).decode("utf-8", "replace"),
        )

    callback = ffi.callback("phx_log_fn", _callbacks.guarded(log, None))
    lib.phx_set_log(callback, ffi.NULL, sum(min_level > level for level in _LEVELS))
    _alive[:] = [callback]
    atexit.register(lib.phx_set_log, ffi.NULL, ffi.NULL, 0)  # the core's monitor threads may outlive the interpreter


def to_logger(logger: "logging.Logger | str") -> LogFunction:
    """A function that makes each line a record of a logger, given by itself or by name, with the core's file."""

    def write(level: int, file: str, line: int, message: str) -> None:
        import logging

        target = logging.getLogger(logger) if isinstance(logger, str) else logger
        if target.isEnabledFor(level):
            target.handle(target.makeRecord(target.name, level, file, line, message, (), None))

    return write


def install(ffi: Any, lib: Any) -> None:
    """Send warnings and errors to the logger "phalanx.core", which prints them where a program set up no logging."""
    send(ffi, lib, to_logger("phalanx.core"), _LEVELS[2])
