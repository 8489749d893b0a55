"""What checks read: files of /proc and /sys, through one place, so that tests can have others."""

import os
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class Host:
    """The host as its files tell it. What cannot be read is None or empty, never an error.

    Attributes:
        ranks: How many are to run here.
        root: Of all files that are read.
    """

    ranks: int
    root: Path = Path("/")

    def read(self, path: str) -> str | None:
        """A file's text without white space around it. None if it cannot be read.

        Args:
            path: Absolute.
        """
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip("\0\n ")
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """The integer that is all of a file. None if it cannot be read, or holds something else."""
        try:
            return int(self.read(path) or "")
        except ValueError:
            return None

    def fields(self, path: str) -> dict[str, str]:
        """The lines "name: value" of a file; of equal names the first."""
        found: dict[str, str] = {}
        for line in (self.read(path) or "").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                found.setdefault(name.strip(), value.strip())
        return found

    def names(self, path: str) -> list[str]:
        """What is in a directory, sorted."""
        try:
            return sorted(os.listdir(self.root / path.lstrip("/")))
        except OSError:
            return []

    def link(self, path: str) -> str | None:
        """What a symbolic link says."""
        try:
            return os.readlink(self.root / path.lstrip("/"))
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return (self.root / path.lstrip("/")).exists()


def parse_ranges(text: str | None) -> list[int]:
    """The numbers of a list such as "0-3,8". Empty for what is no list."""
    numbers: list[int] = []
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def ranges(numbers: list[int]) -> str:
    """The reverse; the numbers are in order."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def size(count: int) -> str:
    """Bytes as people read them."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def count(number: int, thing: str) -> str:
    """ "1 core", "2 cores"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
