"""Memory: how much there is, and in what pages."""

import shutil
from collections.abc import Iterator

from phalanx.core.doctor import _cgroup
from phalanx.core.doctor._finding import OK, WARN, Finding
from phalanx.core.doctor._host import MIB, Host, size

_LEAST = 256 * MIB  # below it, a program with symmetric memory does not get far
_GROUP = MIB  # that each rank's part of a group holds from the beginning: one lane of slots
_PAGES = "/sys/kernel/mm"


def check_memory(host: Host) -> Iterator[Finding]:
    fields = host.fields("/proc/meminfo")
    available = _kib(fields.get("MemAvailable"))
    limit = _cgroup.memory_limit(host)
    if available is None:
        yield Finding(OK, "memory", "what is available cannot be read")
        return
    text = f"{size(available)} available of {size(_kib(fields.get('MemTotal')) or 0)}"
    if limit is not None:
        text += f", {size(limit.left)} left of the cgroup's {size(limit.limit)}"
        available = min(available, limit.left)
    if available < max(_LEAST, 2 * host.ranks * _GROUP):
        text += f"; each group of {host.ranks} takes {size(host.ranks * _GROUP)}"
        advice = "symmetric memory is ordinary RAM, and counts for the rank that touches it first: free some"
        if limit is not None and limit.left == available:
            advice += ", or raise the limit of the container"
        yield Finding(WARN, "memory", text, advice)
    else:
        yield Finding(OK, "memory", text)


def check_dev_shm(host: Host) -> Iterator[Finding]:
    """A note: memfds do not live there."""
    place = str(host.root / "dev/shm")
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        advice = "Phalanx does not use it, but torch's DataLoader does: mount a tmpfs there"
        yield Finding(OK, "/dev/shm", f"not usable ({error.strerror})", advice)
        return
    low = free < _LEAST
    advice = "Phalanx does not use it, but torch's DataLoader and MPI do: --shm-size=1g" if low else ""
    yield Finding(OK, "/dev/shm", f"{size(free)} free", advice)


def check_huge_pages(host: Host) -> Iterator[Finding]:
    """Transparent ones, which blocks of 2 MiB and more ask for (core/src/base/shared_memory.cpp)."""
    folder = f"{_PAGES}/transparent_hugepage"
    modes = {name: _chosen(host.read(f"{folder}/{name}")) for name in ("enabled", "shmem_enabled")}
    shared = modes["shmem_enabled"]
    text = f"for ordinary memory {modes['enabled']}, for shared memory {shared}"
    if shared == "not readable":
        yield Finding(OK, "huge pages", text)
    elif host.fields("/proc/self/status").get("THP_enabled") == "0":
        yield Finding(
            OK, "huge pages", f"{text}; switched off for this process", "prctl(PR_SET_THP_DISABLE) was called"
        )
    elif shared in ("never", "deny"):
        advice = f"a few percent for large blocks: echo advise > {folder}/shmem_enabled, as root"
        yield Finding(OK, "huge pages", text, advice)
    else:
        yield Finding(OK, "huge pages", f"{text}: symmetric memory gets them where it is large")


def check_hugetlb(host: Host) -> Iterator[Finding]:
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
        yield Finding(WARN, "hugetlb", text, advice)
    else:
        yield Finding(OK, "hugetlb", text)


def _kib(value: str | None) -> int | None:
    number = (value or "").removesuffix("kB").strip()
    return int(number) * 1024 if number.isdecimal() else None


def _chosen(text: str | None) -> str:
    """The one in brackets."""
    if text is None:
        return "not readable"
    return text.partition("[")[2].partition("]")[0] or text
