"""Types of arguments that the commands have in common, for argparse."""

import argparse
from collections.abc import Callable
from pathlib import Path

UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def size_between(least: int, most: int) -> Callable[[str], int]:
    """A type: a number of bytes such as 4096, 4k or 1m, within limits."""

    def read(text: str) -> int:
        word = text.lower()
        try:
            size = int(word[:-1]) * UNITS[word[-1]] if word[-1:] in UNITS else int(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid size {text!r}; examples: 4096, 4k, 1m") from None
        if not least <= size <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not between {short(least)} and {short(most)} bytes")
        return size

    return read


def names_of(known: tuple[str, ...], what: str) -> Callable[[str], tuple[str, ...]]:
    """A type: known names, separated by commas.

    Args:
        known: The names.
        what: What they name, for the error.
    """

    def read(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r} (choose from {', '.join(known)})")
        return names

    return read


def positive_number(text: str) -> float:
    """A type: a number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return number


def new_file(text: str) -> Path:
    """A type: a file to write, whose folder exists."""
    path = Path(text)
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: the folder {path.resolve().parent} does not exist")
    return path


def short(size: int) -> str:
    """A number of bytes as it is given: 65536 as "64k"."""
    for unit in "gmk":
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)
