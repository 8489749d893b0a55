"""What the control group of this process allows it, in version 1 and 2."""

from collections.abc import Iterator
from typing import NamedTuple

from phalanx.core.doctor._host import Host

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as nearly 2^63


class MemoryLimit(NamedTuple):
    """Of the group that leaves least.

    Attributes:
        limit: Bytes that the group may use.
        left: Of them not in use; what only caches files counts as left.
    """

    limit: int
    left: int


def cpu_quota(host: Host) -> float | None:
    """Cores' worth of time, or None where there is no quota."""
    quotas = []
    for folder in _folders(host, "cpu"):
        words = (host.read(f"{folder}/cpu.max") or "").split()
        if not words:
            words = [host.read(f"{folder}/cpu.cfs_{part}_us") or "" for part in ("quota", "period")]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit(host: Host) -> MemoryLimit | None:
    """The tightest limit on memory, or None where there is none."""
    limits = []
    for folder in _folders(host, "memory"):
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
    for folder in _folders(host, "pids"):
        most = host.number(f"{folder}/pids.max")
        if most is not None:
            limits.append((most, host.number(f"{folder}/pids.current") or 0))
    return min(limits, key=lambda each: each[0] - each[1], default=None)


def _folders(host: Host, controller: str) -> Iterator[str]:
    """Folders of the groups that hold this process, innermost first.

    In a container the path of the group may be the one that the host sees. Its folders are not there, and then the root
    of the mount is the container's own group.
    """
    for line in (host.read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2; beside version 1 it has a folder of its own
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
