"""Limits of the process, against what ranks need."""

import resource
from collections.abc import Iterator

from phalanx.core.doctor import _cgroup
from phalanx.core.doctor._finding import FAIL, OK, WARN, Finding
from phalanx.core.doctor._host import MIB, Host, count, size

_SPARE_FILES = 512  # of a program besides its group: libraries, data, a file for each block of memory
_THREADS = 2  # of a rank besides torch's: itself, and its monitor


def descriptors(ranks: int) -> int:
    """How many a rank of so many holds once it has made a group: core/src/world.

    Its listener, epoll, eventfd and file store; for each peer a socket and a pidfd.
    """
    return 4 + 2 * (ranks - 1)


def meeting_descriptors(ranks: int) -> int:
    """How many more it holds for a moment, while it makes a group or a rendezvous.

    For each rank its signal pad and its block, on their way.
    """
    return 2 * ranks


def segment_bytes(ranks: int) -> int:
    """What a rank shares in each group of so many, with the usual staging and channels: core/src/group/control.h.

    Four lanes of four slots of 256 KiB; for each rank a ring for messages, of 512 KiB, or of less so that all have
    32 MiB together, but of 128 KiB at least; 128 KiB for headers and the flight recorder.
    """
    ring = next((kib << 10 for kib in (512, 256) if (kib << 10) * ranks <= 32 * MIB), 128 << 10)
    return 4 * MIB + ring * ranks + (128 << 10)


def check_files(host: Host) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held, moment = descriptors(host.ranks), meeting_descriptors(host.ranks)
    need = (
        f"each of {count(host.ranks, 'rank')} needs {held}, {moment} more while groups are made, and one for each block"
    )
    wanted = held + moment + _SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        advice = f"the hard limit {hard} is too low as well: limits.conf, or --ulimit nofile={max(4096, 2 * wanted)}"
    else:
        most = max(4096, 2 * wanted)
        advice = f"raise it: ulimit -n {most if hard == resource.RLIM_INFINITY else min(hard, most)}"
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield Finding(OK, "open files", f"limit {_limit(soft)}, hard limit {_limit(hard)}; {need}")
    else:
        level = FAIL if soft < held + moment else WARN
        yield Finding(level, "open files", f"limit {soft}; {need}", advice)


def check_file_size(host: Host) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    need = segment_bytes(host.ranks)
    if soft == resource.RLIM_INFINITY:
        yield Finding(OK, "file size", "unlimited")
        return
    text = f"limit {size(soft)}, which holds for memfds; a group of {host.ranks} takes {size(need)} of each rank"
    level = FAIL if soft < need else WARN
    yield Finding(level, "file size", text, "no block of symmetric memory can be larger: ulimit -f unlimited")


def check_address_space(host: Host) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    need = host.ranks * segment_bytes(host.ranks)
    if soft == resource.RLIM_INFINITY:
        yield Finding(OK, "address space", "unlimited")
        return
    text = f"limit {size(soft)}; each group of {host.ranks} maps {size(need)}, and each block of every rank"
    advice = "every rank maps the memory of all: ulimit -v unlimited"
    yield Finding(FAIL if soft < need else WARN, "address space", text, advice)


def check_processes(host: Host) -> Iterator[Finding]:
    """Of the user and of the control group: each rank is a process with a monitor thread, and torch's threads."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    group = _cgroup.process_limit(host)
    need = _THREADS * host.ranks
    text = f"limit {_limit(soft)} of the user"
    left = None if soft == resource.RLIM_INFINITY else soft
    if group is not None:
        most, present = group
        text += f", {most} of the cgroup, which has {present}"
        left = most - present if left is None else min(left, most - present)
    text += f"; {count(host.ranks, 'rank')} start {need} threads, and those of torch"
    if left is not None and left < need:
        yield Finding(FAIL, "processes", text, "raise it: ulimit -u, --pids-limit, pids.max")
    elif left is not None and left < 16 * need:
        yield Finding(
            WARN,
            "processes",
            text,
            "torch may start a thread for each core in each rank: raise it, or set OMP_NUM_THREADS",
        )
    else:
        yield Finding(OK, "processes", text)


def check_locked_memory(host: Host) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    yield Finding(OK, "locked memory", f"limit {locked} (Phalanx locks none; RDMA and CUDA's pinned memory may)")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
