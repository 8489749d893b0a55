"""The core's log: warnings and errors go to the logger "phalanx.core" until `set_log` is called."""

import logging

from phalanx.core import _log
from phalanx.core._lib import ffi, lib

LogFunction = _log.LogFunction


def set_log(function: LogFunction | logging.Logger | None, min_level: int = logging.WARNING) -> None:
    """Send what the core logs, in all worlds of this process, to a function or a logger.

    At first, warnings and errors go to `logging.getLogger("phalanx.core")`: a program that sets up no logging sees them
    on stderr. Among them are a wait for other ranks that takes long, and environment variables that are wrong.

    The function is called from any thread, also from several at once and from threads of the core, and must not call
    the core. Not collective.

    Args:
        function: Called with (level of `logging`, file, line, message); or a Logger; None turns
            logging off.
        min_level: A level of `logging`; what is below it is not logged.

    Example:
        >>> set_log(logging.getLogger("phalanx"), logging.ERROR)
        >>> set_log(None)
    """
    _log.send(ffi, lib, _log.to_logger(function) if isinstance(function, logging.Logger) else function, min_level)
