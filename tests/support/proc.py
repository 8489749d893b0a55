"""What Linux tells of processes: which there are, what they hold open, and the shared memory that they use."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Stat",
    "descendants",
    "fds",
    "held",
    "in_use",
    "is_of_gpu_driver",
    "processes",
    "settled",
    "shared_memory_files",
]


@dataclass
class Stat:
    state: str
    parent: int
    group: int


def processes() -> Iterator[tuple[int, Stat]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                text = Path("/proc", name, "stat").read_text()
                state, parent, group = text[text.rindex(")") + 2 :].split()[:3]
                yield int(name), Stat(state, int(parent), int(group))


def descendants(known: Collection[int]) -> dict[int, str]:
    """Every process under this one, with its command line, but for those in `known`."""
    every = dict(processes())
    found: dict[int, str] = {}
    for pid in every:
        ancestor = pid
        while ancestor in every and ancestor != os.getpid():
            ancestor = every[ancestor].parent
        if ancestor == os.getpid() and pid != ancestor and pid not in known:
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() or "(ended)"
    return found


def is_of_gpu_driver(fd: str) -> bool:
    """What a driver of GPUs opens when somebody asks how many there are, it keeps."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia")
    return False


def fds(known: Collection[int]) -> set[str]:
    """What this process has open, but for the descriptors in `known` and those of a driver of GPUs."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory is closed by now
            if int(name) not in known and not is_of_gpu_driver(name):
                found.add(f"fd {name} -> {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def held(known: Collection[int]) -> set[str]:
    """The same, and the memory that this process shares with others."""
    gc.collect()
    found = fds(known)
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(("/memfd:", "/dev/shm/", "/dev/zero")):
            found.add(f"mapping {fields[5]}")
    return found


def shared_memory_files() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm")} if os.path.isdir("/dev/shm") else set()


def in_use(name: str) -> bool:
    """Whether a process holds this file of /dev/shm. Others than this test's may run on the machine."""
    path = f"/dev/shm/{name}"
    for pid, _ in processes():
        with contextlib.suppress(OSError):
            if path in Path(f"/proc/{pid}/maps").read_text():
                return True
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == path:
                    return True
    return False


def settled(look: Callable[[], set[str]], seconds: float = 2.0) -> set[str]:
    """look() when it is empty, else what it still finds after a while: the kernel frees some things a little later."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        select.select([], [], [], 0.02)
    return found
