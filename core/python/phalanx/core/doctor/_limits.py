"""Memory and limits of this process, against what ranks need."""

import resource
import shutil

from phalanx.core.doctor._host import FAIL, MIB, OK, WARN, Finding, Host, count, memory_limit, process_limit, size

# ---- memory: how much there is, and in what pages ----------------------------------------------

_LEAST = 256 * MIB  # below it, a program with symmetric memory does not get far
_GROUP = MIB  # that each rank's part of a group holds from the beginning: one lane of slots
_PAGES = "/sys/kernel/mm"


def check_memory(host: Host) -> Finding:
    fields = host.fields("/proc/meminfo")
    available = _kib(fields.get("MemAvailable"))
    limit = memory_limit(host)
    if available is None:
        return Finding(OK, "memory", "what is available cannot be read")
    text = f"{size(available)} available of {size(_kib(fields.get('MemTotal')) or 0)}"
    if limit is not None:
        text += f", {size(limit.left)} left of the cgroup's {size(limit.limit)}"
        available = min(available, limit.left)
    if available < max(_LEAST, 2 * host.ranks * _GROUP):
        text += f"; each group of {host.ranks} takes {size(host.ranks * _GROUP)}"
        advice = "symmetric memory is ordinary RAM, and counts for the rank that touches it first: free some"
        if limit is not None and limit.left == available:
            advice += ", or raise the limit of the container"
        return Finding(WARN, "memory", text, advice)
    return Finding(OK, "memory", text)


def check_dev_shm(host: Host) -> Finding:
    """A note: memfds do not live there."""
    place = str(host.root / "dev/shm")
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        advice = "Phalanx does not use it, but torch's DataLoader does: mount a tmpfs there"
        return Finding(OK, "/dev/shm", f"not usable ({error.strerror})", advice)
    low = free < _LEAST
    advice = "Phalanx does not use it, but torch's DataLoader and MPI do: --shm-size=1g" if low else ""
    return Finding(OK, "/dev/shm", f"{size(free)} free", advice)


def check_huge_pages(host: Host) -> Finding:
    """Transparent ones, which blocks of 2 MiB and more ask for (core/src/base/shared_memory.cpp)."""
    folder = f"{_PAGES}/transparent_hugepage"
    modes = {name: _chosen(host.read(f"{folder}/{name}")) for name in ("enabled", "shmem_enabled")}
    shared = modes["shmem_enabled"]
    text = f"for ordinary memory {modes['enabled']}, for shared memory {shared}"
    if shared == "not readable":
        return Finding(OK, "huge pages", text)
    if host.fields("/proc/self/status").get("THP_enabled") == "0":
        advice = "prctl(PR_SET_THP_DISABLE) was called"
        return Finding(OK, "huge pages", f"{text}; switched off for this process", advice)
    if shared in ("never", "deny"):
        advice = f"a few percent for large blocks: echo advise > {folder}/shmem_enabled, as root"
        return Finding(OK, "huge pages", text, advice)
    return Finding(OK, "huge pages", f"{text}: symmetric memory gets them where it is large")


def check_hugetlb(host: Host) -> Finding:
    reserved, parts = 0, []
    for name in host.names(f"{_PAGES}/hugepages"):
        pages = host.number(f"{_PAGES}/hugepages/{name}/nr_hugepages") or 0
        free = host.number(f"{_PAGES}/hugepages/{name}/free_hugepages") or 0
        page = name.removeprefix("hugepages-").removesuffix("kB")
        if pages and page.isdecimal():
            reserved += pages * int(page) * 1024
            parts.append(f"{pages} of {size(int(page) * 1024)}, {free} free")
    text = "; ".join(parts) or "none reserved"
    total = _kib(host.fields("/proc/meminfo").get("MemTotal"))
    if total is not None and reserved > total // 2:
        advice = "Phalanx uses transparent huge pages only, so these are lost to it: reserve fewer (vm.nr_hugepages)"
        return Finding(WARN, "hugetlb", text, advice)
    return Finding(OK, "hugetlb", text)


def _kib(value: str | None) -> int | None:
    number = (value or "").removesuffix("kB").strip()
    return int(number) * 1024 if number.isdecimal() else None


def _chosen(text: str | None) -> str:
    """The one in brackets."""
    if text is None:
        return "not readable"
    return text.partition("[")[2].partition("]")[0] or text


# ---- limits of the process -------------------------------------------------------------------------

_SPARE_FILES = 512  # of a program besides its group: libraries, data, a file for each block of memory
_THREADS = 2  # of a rank besides torch's: itself, and its monitor


def descriptors(ranks: int) -> int:
    """How many a rank of so many holds once it has made a group: core/src/world.

    Its listener, epoll, eventfd and file store; for each peer a socket and a pidfd.
    """
    return 4 + 2 * (ranks - 1)


def segment_bytes(ranks: int) -> int:
    """What a rank shares in each group of so many, with the usual staging and channels: core/src/group/control.h.

    Four lanes of four slots of 256 KiB; for each rank a ring for messages, of 512 KiB, or of less so that all have
    32 MiB together, but of 128 KiB at least; 128 KiB for headers and the flight recorder.
    """
    ring = next((kib << 10 for kib in (512, 256) if (kib << 10) * ranks <= 32 * MIB), 128 << 10)
    return 4 * MIB + ring * ranks + (128 << 10)


def check_files(host: Host) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held, moment = descriptors(host.ranks), 2 * host.ranks  # for a moment, the signal pad and a block of each rank
    whose, wanted = count(host.ranks, "rank"), held + moment + _SPARE_FILES
    need = f"each of {whose} needs {held}, {moment} more while groups are made, and one for each block"
    most = max(4096, 2 * wanted)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        advice = f"the hard limit {hard} is too low as well: limits.conf, or --ulimit nofile={most}"
    else:
        advice = f"raise it: ulimit -n {most if hard == resource.RLIM_INFINITY else min(hard, most)}"
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return Finding(OK, "open files", f"limit {_limit(soft)}, hard limit {_limit(hard)}; {need}")
    level = FAIL if soft < held + moment else WARN
    return Finding(level, "open files", f"limit {soft}; {need}", advice)


def check_file_size(host: Host) -> Finding:
    need = segment_bytes(host.ranks)
    text = f"which holds for memfds; a group of {host.ranks} takes {size(need)} of each rank"
    advice = "no block of symmetric memory can be larger: ulimit -f unlimited"
    return _size_limit("file size", resource.RLIMIT_FSIZE, need, f", {text}", advice)


def check_address_space(host: Host) -> Finding:
    need = host.ranks * segment_bytes(host.ranks)
    text = f"each group of {host.ranks} maps {size(need)}, and each block of every rank"
    advice = "every rank maps the memory of all: ulimit -v unlimited"
    return _size_limit("address space", resource.RLIMIT_AS, need, f"; {text}", advice)


def _size_limit(name: str, which: int, need: int, text: str, advice: str) -> Finding:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY:
        return Finding(OK, name, "unlimited")
    return Finding(FAIL if soft < need else WARN, name, f"limit {size(soft)}{text}", advice)


def check_processes(host: Host) -> Finding:
    """The user's limit and the control group's: each rank is a process with a monitor thread, and torch's threads."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    group = process_limit(host)
    need = _THREADS * host.ranks
    text = f"limit {_limit(soft)} of the user"
    left = None if soft == resource.RLIM_INFINITY else soft
    if group is not None:
        most, present = group
        text += f", {most} of the cgroup, which has {present}"
        left = most - present if left is None else min(left, most - present)
    text += f"; {count(host.ranks, 'rank')} start {need} threads, and those of torch"
    if left is not None and left < need:
        return Finding(FAIL, "processes", text, "raise it: ulimit -u, --pids-limit, pids.max")
    if left is not None and left < 16 * need:
        advice = "torch may start a thread for each core in each rank: raise it, or set OMP_NUM_THREADS"
        return Finding(WARN, "processes", text, advice)
    return Finding(OK, "processes", text)


def check_locked_memory(host: Host) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    return Finding(OK, "locked memory", f"limit {locked} (Phalanx locks none; RDMA and CUDA's pinned memory may)")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
