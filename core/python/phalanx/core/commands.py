"""For the commands of `phalanx`: their parser, their errors, numbers on the command line, and colours on a terminal.

A package adds a command through the entry-point group `phalanx.commands`: a function that takes the arguments after the
command's name and returns the exit status. `phalanx` itself handles what every command needs: Ctrl-C, a reader of the
output that goes away, and errors without a traceback.
"""

import argparse
import ctypes
import difflib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO

__all__ = ["CommandError", "Parser", "end_with_parent", "number_from", "paint"]


class CommandError(Exception):
    """A command cannot do what was asked for. `phalanx` prints the text without a traceback.

    Args:
        text: The reason, and what to do.
        status: The exit status: 1 if something was found wrong, 2 if what was given cannot be used.
    """

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, name what may have been meant, and end the program with exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Print the error and end the program."""
        unknown = message.partition("unrecognized arguments: ")[2].split()[:1]
        known = [option for option in self._option_string_actions if option.startswith("--")]
        meant = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1) if unknown else []
        hint = f"Did you mean {meant[0]}? " if meant else ""
        self.exit(2, f"{self.prog}: {message}\n{hint}`{self.prog} --help` lists the options.\n")


def number_from(least: int) -> Callable[[str], int]:
    """A type of an argument for argparse: a whole number.

    Args:
        least: The smallest that is allowed.
    """

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of {least} or more, got {text!r}")
        return number

    return read


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when the one that started it ends, however that ends.

    Args:
        parent: Its pid. If it has ended already, so does this process, with exit status 1.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request above
        os._exit(1)


_CODES = {"red": "31", "yellow": "33", "green": "32", "bold": "1"}


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Text in a colour where a stream is a terminal that shows colours, else the text as it is.

    Args:
        text: The text.
        colour: "red", "yellow", "green" or "bold".
        stream: Where it will be printed; None is standard output.
    """
    stream = sys.stdout if stream is None else stream
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if plain or stream is None or not stream.isatty() else f"\x1b[{_CODES[colour]}m{text}\x1b[0m"
