"""What a rank, and what a whole case, may not leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

OURS = re.compile(r"phalanx|phx", re.IGNORECASE)


def held() -> set[str]:
    """Of this process: open descriptors, memory shared with other processes, children, and threads but for one."""
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory is closed by now
            found.add(f"descriptor {name} of {os.readlink(f'/proc/self/fd/{name}')}")
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(("/memfd:", "/dev/shm/", "/dev/zero")):
            found.add(f"mapping {fields[5]}")
    tasks = os.listdir("/proc/self/task")
    found |= {f"thread {Path('/proc/self/task', task, 'comm').read_text().strip()}" for task in tasks[1:]}
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return found | {f"child {pid}" for pid in children}


def sockets() -> list[str]:
    """Names of this process's sockets in the abstract namespace."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [line[7] for line in lines if len(line) == 8 and f"socket:[{line[6]}]" in inodes and line[7][0] == "@"]


def shared_files() -> set[str]:
    """Files of ours in /dev/shm."""
    return {entry.name for entry in os.scandir("/dev/shm") if entry.is_file() and OURS.search(entry.name)}


def left_by_case(names: Iterable[str], files_before: set[str]) -> set[str]:
    """Of a case whose processes have ended: abstract sockets by these names, and new files in /dev/shm."""
    listed = Path("/proc/net/unix").read_text().split()
    found = {f"socket {name}" for name in names if name in listed}
    return found | {f"file /dev/shm/{name}" for name in shared_files() - files_before}


def settled(look: Callable[[], set[str]], seconds: float = 2.0) -> set[str]:
    """look() when it is empty, else what it still finds after a while: the kernel frees some things a little later."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
