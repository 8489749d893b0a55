"""`phalanx doctor`: what this host offers, and what is wrong with it."""

import argparse
import contextlib
import errno
import fcntl
import importlib.metadata
import json
import mmap
import os
import platform
import resource
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

OK, WARN, FAIL = "ok", "warn", "fail"
MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: "ok", "warn" or "fail".
        name: What was looked at.
        text: What was found.
        advice: What to do, "" when all is well.
    """

    level: str
    name: str
    text: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Look at everything, in a fixed order. Changes nothing, and leaves nothing behind."""
    for look in _CHECKS:
        try:
            yield from look()
        except Exception as error:
            name = look.__name__.removeprefix("_check_")
            yield Finding(FAIL, name, f"{type(error).__name__}: {error}", "please report this")


def main(argv: list[str]) -> int:
    """Print the report.

    Args:
        argv: Arguments after "doctor".

    Returns:
        Exit status: 1 if something fails, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="phalanx doctor", description="What this host offers, and what is wrong with it."
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of lines")
    options = parser.parse_args(argv)
    findings = list(examine())
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for each in findings:
            print(f"{each.level:4}  {each.name:16}  {each.text}")
            if each.advice:
                print(f"{'':24}-> {each.advice}")
    return 1 if any(finding.level == FAIL for finding in findings) else 0


def _check_python() -> Iterator[Finding]:
    text = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    yield Finding(OK, "python", text)


def _check_torch() -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(OK, "torch", "not installed (phalanx.core needs none)")
        return
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < (2, 11):
        yield Finding(WARN, "torch", version, "the packages above the core need torch >= 2.11")
    else:
        yield Finding(OK, "torch", version)


def _check_kernel() -> Iterator[Finding]:
    text = f"{platform.system()} {platform.release()}"
    if platform.system() != "Linux":
        yield Finding(FAIL, "kernel", text, "Phalanx runs on Linux")
        return
    yield Finding(OK, "kernel", text)
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Finding(OK, "pidfd", "works: a dead rank is noticed at once")
    except (AttributeError, OSError) as error:
        advice = "Linux 5.3 or later has it; a dead rank is noticed by its closed socket instead"
        yield Finding(WARN, "pidfd", f"does not work ({error})", advice)


def _check_cores() -> Iterator[Finding]:
    cores, allowed = os.cpu_count() or 0, sorted(os.sched_getaffinity(0))
    text = f"{cores} cores, this process may use {len(allowed)}: {_ranges(allowed)}"
    quota = _cpu_quota()
    if quota is not None:
        text += f", cgroup quota {quota:g}"
    usable = len(allowed) if quota is None else min(len(allowed), quota)
    if usable < 2:
        advice = "ranks that share a core take turns: allow at least one core per rank"
        yield Finding(WARN, "cores", text, advice)
    else:
        yield Finding(OK, "cores", text)


def _check_memory() -> Iterator[Finding]:
    fields = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
    available = fields.get("MemAvailable")
    if available is not None:
        level = OK if available >= 256 * MIB else WARN
        advice = "" if level == OK else "symmetric memory is ordinary RAM: free some"
        yield Finding(level, "memory", f"{_size(available)} available", advice)
    try:
        _try_memfd()
        yield Finding(OK, "memfd", "works, with seals")
    except (AttributeError, OSError) as error:
        advice = "symmetric memory is made of memfds: allow memfd_create (seccomp, noexec policies)"
        yield Finding(FAIL, "memfd", f"does not work ({error})", advice)
    try:
        free = shutil.disk_usage("/dev/shm").free
        low = free < 64 * MIB
        advice = "Phalanx does not use it, but torch's DataLoader and gloo do" if low else ""
        yield Finding(WARN if low else OK, "/dev/shm", f"{_size(free)} free", advice)
    except OSError as error:
        advice = "Phalanx does not use it, but torch's DataLoader does: mount a tmpfs there"
        yield Finding(WARN, "/dev/shm", f"not usable ({error})", advice)


def _check_sockets() -> Iterator[Finding]:
    try:
        _try_abstract_socket()
        yield Finding(OK, "abstract sockets", "work, and pass descriptors and credentials")
    except OSError as error:
        advice = "ranks meet through abstract Unix sockets: allow AF_UNIX in the sandbox"
        yield Finding(FAIL, "abstract sockets", f"do not work ({error})", advice)


def _check_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 1024:
        advice = f"raise it: ulimit -n {hard if hard > soft else 4096} (each block needs one file)"
        yield Finding(WARN, "open files", f"limit {soft}", advice)
    else:
        yield Finding(OK, "open files", f"limit {_limit(soft)}, hard limit {_limit(hard)}")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else _size(soft)
    yield Finding(OK, "locked memory", f"limit {locked} (only huge pages and RDMA need it)")


def _check_library() -> Iterator[Finding]:
    try:
        from phalanx.core._lib import ffi, lib, library_path
    except ImportError as error:
        advice = "reinstall phalanx-core, or set PHALANX_LIBRARY to a build of it"
        yield Finding(FAIL, "library", str(error), advice)
        return
    build = json.loads(ffi.string(lib.phx_build_info()).decode())
    version, abi = ffi.string(lib.phx_version()).decode(), lib.phx_abi_version()
    yield Finding(OK, "library", f"{version}, ABI {abi}, {library_path}")
    yield Finding(OK, "compiler", str(build.get("compiler", "unknown")))
    names = ("avx512", "avx2", "neon", "scalar", "portable")
    known = [name for name in names if lib.phx_has(name.encode())]
    isa = str(build.get("isa", "")) or (known[0] if known else "unknown")
    yield Finding(OK, "isa", isa)
    features = build.get("features", [])
    yield Finding(OK, "features", ", ".join(map(str, features)) if features else "none")


def _check_tuning() -> Iterator[Finding]:
    from phalanx.core import tuning

    path = tuning.table_path()
    try:
        if path is None or not path.exists():
            yield Finding(OK, "tuning", f"built-in values; there is no {path or 'table'} (phalanx tune measures)")
            return
        if path.stat().st_uid not in (os.geteuid(), 0):
            yield Finding(WARN, "tuning", f"{path} belongs to another user", "it is not read: run phalanx tune")
            return
        rows = tuning.rows_of_host(path.read_text(errors="replace"))
    except OSError as error:
        yield Finding(WARN, "tuning", f"{path} cannot be read ({error})", "built-in values are used instead")
        return
    if not rows:
        yield Finding(OK, "tuning", f"built-in values; {path} has none for this host (phalanx tune measures)")
        return
    strange = [ranks for ranks, row in rows.items() if not all(value.isdecimal() for value in row.values())]
    text = f"{path}, for groups of {', '.join(map(str, rows))} ranks"
    if strange:
        advice = f"the row of {strange[0]} ranks is no work of phalanx tune: run phalanx tune --ranks {strange[0]}"
        yield Finding(WARN, "tuning", text, advice)
    else:
        yield Finding(OK, "tuning", text)


def _check_packages() -> Iterator[Finding]:
    versions = installed_versions()
    if versions:
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield Finding(OK, "packages", text)
    else:
        advice = "fine in a source tree; otherwise: pip install phalanx-core"
        yield Finding(WARN, "packages", "no phalanx distribution is installed", advice)


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _check_python,
    _check_torch,
    _check_kernel,
    _check_cores,
    _check_memory,
    _check_sockets,
    _check_limits,
    _check_library,
    _check_tuning,
    _check_packages,
)


def installed_versions() -> dict[str, str]:
    """Version of each installed distribution of this project, by name."""
    names = ("core", "collectives", "symm-mem", "dtensor", "inductor")
    found = {}
    for name in ("phalanx", *(f"phalanx-{part}" for part in names)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# ---- probes -------------------------------------------------------------------------------------


def _try_memfd() -> None:
    fd = os.memfd_create("phalanx-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        with mmap.mmap(fd, mmap.PAGESIZE) as block:
            block[0] = 1
        with contextlib.suppress(PermissionError):
            os.ftruncate(fd, 0)
            raise OSError(errno.EINVAL, "seals have no effect")
    finally:
        os.close(fd)


def _try_abstract_socket() -> None:
    name = f"\0phalanx-doctor-{os.getpid()}"
    kind = socket.SOCK_SEQPACKET
    with (
        socket.socket(socket.AF_UNIX, kind) as server,
        socket.socket(socket.AF_UNIX, kind) as client,
        open(os.devnull, "rb") as sent,
    ):
        for each in (server, client):
            each.settimeout(5)
        server.bind(name)
        server.listen(1)
        client.connect(name)
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(5)
            size = struct.calcsize("3i")
            raw = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            if struct.unpack("3i", raw)[1] != os.getuid():
                raise OSError(errno.EPROTO, "SO_PEERCRED names another user")
            socket.send_fds(client, [b"x"], [sent.fileno()])
            _, received, _, _ = socket.recv_fds(accepted, 1, 1)
            for fd in received:
                os.close(fd)
            if len(received) != 1:
                raise OSError(errno.EPROTO, "no descriptor arrived")


def _cpu_quota() -> float | None:
    # The cgroup of this process, version 2; inside a container it is usually the root.
    with contextlib.suppress(OSError, ValueError, IndexError):
        line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
        folder = Path("/sys/fs/cgroup") / line.split(":")[2].lstrip("/")
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    return None


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
