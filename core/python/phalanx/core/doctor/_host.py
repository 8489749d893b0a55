"""What checks say, and what they read: files of /proc and /sys, through one place, so that tests can have others."""

import ctypes
import errno
import importlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: "ok", "warn" or "fail".
        name: What was looked at.
        text: What was found.
        advice: What to do. With "ok" it may be had for the asking, or is good to know; "" when there is nothing.
    """

    level: str
    name: str
    text: str
    advice: str = ""


MIB = 1 << 20


def core_module(module: str = "_lib") -> Any:
    """A module of phalanx.core; None where the library cannot be loaded, which the check `library` reports."""
    try:
        return importlib.import_module(f"phalanx.core.{module}")
    except ImportError:
        return None


@dataclass(frozen=True)
class Host:
    """The host as its files tell it. What cannot be read is None or empty, never an error.

    Attributes:
        ranks: How many are to run here.
        root: The root of all files that are read.
    """

    ranks: int
    root: Path = Path("/")

    def read(self, path: str) -> str | None:
        """A file's text without white space around it. None if it cannot be read."""
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


Check = Callable[[Host], Finding | Iterable[Finding] | None]


def findings_of(check: Check, host: Host) -> Iterator[Finding]:
    """What a check finds: one thing, several, or nothing worth a word."""
    found = check(host)
    if isinstance(found, Finding):
        yield found
    elif found is not None:
        yield from found


def parse_ranges(text: str | None) -> list[int]:
    """The numbers of a list such as "0-3,8". Empty for a text that is not a list."""
    numbers: list[int] = []
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def ranges(numbers: list[int]) -> str:
    """A list such as "0-3,8" of numbers in order."""
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


# ---- control groups, version 1 and 2 ---------------------------------------------------------------

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as nearly 2^63


class MemoryLimit(NamedTuple):
    """The limit of the group that leaves least.

    Attributes:
        limit: Bytes that the group may use.
        left: Bytes of them that are not in use; what only caches files counts as left.
    """

    limit: int
    left: int


def cpu_quota(host: Host) -> float | None:
    """Cores' worth of time, or None where there is no quota."""
    quotas = []
    for folder in _cgroup_folders(host, "cpu"):
        words = (host.read(f"{folder}/cpu.max") or "").split()
        if not words:
            words = [host.read(f"{folder}/cpu.cfs_{part}_us") or "" for part in ("quota", "period")]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit(host: Host) -> MemoryLimit | None:
    """The tightest limit on memory, or None where there is none."""
    limits = []
    for folder in _cgroup_folders(host, "memory"):
        for most, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = host.number(f"{folder}/{most}")
            if limit is None or limit >= _UNLIMITED:
                continue
            rows = (line.split() for line in (host.read(f"{folder}/memory.stat") or "").splitlines())
            reclaimable = next((int(row[1]) for row in rows if len(row) == 2 and row[0] == cached), 0)
            busy = max(0, (host.number(f"{folder}/{used}") or 0) - reclaimable)
            limits.append(MemoryLimit(limit, max(0, limit - busy)))
    return min(limits, key=lambda each: each.left, default=None)


def process_limit(host: Host) -> tuple[int, int] | None:
    """How many processes and threads the tightest group allows, and how many it has. None where there is no limit."""
    limits = []
    for folder in _cgroup_folders(host, "pids"):
        most = host.number(f"{folder}/pids.max")
        if most is not None:
            limits.append((most, host.number(f"{folder}/pids.current") or 0))
    return min(limits, key=lambda each: each[0] - each[1], default=None)


def _cgroup_folders(host: Host, controller: str) -> Iterator[str]:
    """Folders of the groups that hold this process, innermost first.

    In a container the path of the group may be the one that the host sees. Its folders are not there, and then the root
    of the mount is the container's own group.
    """
    for line in (host.read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2; next to version 1 it has a folder of its own
            mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = list(dict.fromkeys([f"/sys/fs/cgroup/{controllers}", f"/sys/fs/cgroup/{controller}"]))
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                folder = "/".join([mount, *parts[:depth]])
                if host.exists(folder):
                    yield folder


# ---- system calls that Python has no function for --------------------------------------------------

_NUMBERS = {  # asm/unistd.h
    "x86_64": {"futex": 202, "mbind": 237, "membarrier": 324},
    "aarch64": {"futex": 98, "mbind": 235, "membarrier": 283},
}


def system_call_number(name: str) -> int:
    """The number of a system call on this processor. Raises OSError where it is not known."""
    known = _NUMBERS.get(platform.machine(), {})
    if name not in known:
        raise OSError(errno.ENOSYS, f"the number of {name} on {platform.machine()} is not known here")
    return known[name]


def system_call(name: str, *arguments: Any) -> int:
    """Make a system call with ints, and what ctypes passes as a pointer. Raises OSError if it fails."""
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(_libc().syscall(ctypes.c_long(system_call_number(name)), *words))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc
