"""The machine: its kernel, what isolates and identifies processes on it, its cores and its NUMA nodes."""

import ctypes
import mmap
import os
import platform
from collections.abc import Iterator

from phalanx.core.doctor._host import (
    FAIL,
    OK,
    WARN,
    Finding,
    Host,
    core_module,
    count,
    cpu_quota,
    parse_ranges,
    ranges,
    system_call,
)

# ---- the kernel, and what guards processes from each other -------------------------------------

_GLOBAL_EXPEDITED, _REGISTER = 1 << 1, 1 << 2  # linux/membarrier.h: MEMBARRIER_CMD_(REGISTER_)GLOBAL_EXPEDITED
_SECCOMP = {"0": "no seccomp", "1": "seccomp strict", "2": "seccomp filter"}
_PTRACE = {
    0: "any process of the same user may attach",
    1: "only a parent may attach",
    2: "only root may attach",
    3: "nobody may attach",
}
# Clocks that the kernel lets a process read without a system call.
_FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")


def check_kernel(host: Host) -> Finding:
    text = f"{platform.system()} {platform.release()}"
    if platform.system() == "Linux":
        return Finding(OK, "kernel", text)
    return Finding(FAIL, "kernel", text, "Phalanx runs on Linux")


def check_membarrier(host: Host) -> Finding:
    needed = _GLOBAL_EXPEDITED | _REGISTER
    try:
        if system_call("membarrier", 0, 0, 0) & needed != needed:
            raise OSError("the kernel has no global expedited form")
        system_call("membarrier", _REGISTER, 0, 0)
        system_call("membarrier", _GLOBAL_EXPEDITED, 0, 0)
        return Finding(OK, "membarrier", "works: a collective passes no full fence to publish")
    except OSError as error:
        advice = "each collective passes a full fence instead: use Linux 4.16 or later, or allow it (seccomp)"
        return Finding(WARN, "membarrier", f"does not work ({error})", advice)


def check_security(host: Host) -> Finding:
    """Notes: whether these matter is what the trials say."""
    status = host.fields("/proc/self/status")
    text = _SECCOMP.get(status.get("Seccomp", ""), "seccomp: cannot be read")
    text += ", no new privileges" if status.get("NoNewPrivs") == "1" else ""
    profile = host.read("/proc/self/attr/current")  # of AppArmor or SELinux
    text += f", {profile}" if profile else ", no security label"
    enforcing = host.number("/sys/fs/selinux/enforce")
    if enforcing is not None:
        text += f", SELinux {'enforcing' if enforcing else 'permissive'}"
    return Finding(OK, "security", text)


def check_ptrace(host: Host) -> Finding:
    scope = host.number("/proc/sys/kernel/yama/ptrace_scope")
    if scope is None:
        text = "no yama: any process of the same user may attach"
    else:
        text = f"yama {scope}: {_PTRACE.get(scope, 'not known')}"
    return Finding(OK, "ptrace", f"{text} (for debuggers and cross-memory attach; Phalanx needs neither)")


def check_clock(host: Host) -> Finding:
    folder = "/sys/devices/system/clocksource/clocksource0"
    clock = host.read(f"{folder}/current_clocksource")
    if clock is None:
        return Finding(OK, "clock", "the clock source cannot be read")
    if clock in _FAST_CLOCKS:
        return Finding(OK, "clock", f"{clock}, read without a system call")
    available = ", ".join((host.read(f"{folder}/available_clocksource") or "").split())
    advice = f"every wait reads the clock, and this one is slow: boot with clocksource=tsc (available: {available})"
    return Finding(WARN, "clock", clock, advice)


# ---- ranks of this host and of this user -----------------------------------------------------------

# The namespaces that the kernel starts with (linux/proc_ns.h). The one of net has a fixed number in new kernels only.
_FIRST = {"ipc": 0xEFFFFFFF, "user": 0xEFFFFFFD, "pid": 0xEFFFFFFC, "net": 0xEFFFFFF9}
_EFFECTS = {
    "user": "ranks must be in one user namespace, else each takes the other for another user",
    "net": "ranks in different network namespaces count as different hosts: let containers share one "
    "(--network container:NAME or host; a pod has one)",
    "pid": "the death of a rank in another pid namespace is noticed by its closed socket",
    "ipc": "Phalanx does not use it",
}
_HOST = "the one of the host"
_WHOLE_RANGE = ["0", "0", "4294967295"]


def check_container(host: Host) -> Finding:
    """A note for readers of the report."""
    groups = host.read("/proc/self/cgroup") or ""
    if host.exists("/.dockerenv"):
        text = "docker"
    elif host.exists("/run/.containerenv"):
        text = "podman"
    elif "KUBERNETES_SERVICE_HOST" in os.environ or "kubepods" in groups:
        text = "kubernetes"
    else:
        text = os.environ.get("container", "") or "none seen"  # noqa: SIM112 (systemd calls it so)
    return Finding(OK, "container", text)


def check_namespaces(host: Host) -> Iterator[Finding]:
    """One line for each; none is wrong in itself."""
    for kind, effect in _EFFECTS.items():
        name = f"{kind} namespace"
        mine = host.link(f"/proc/self/ns/{kind}")
        if mine is None:
            yield Finding(OK, name, "cannot be read", effect)
            continue
        whose = _whose(host, kind, mine)
        yield Finding(OK, name, f"{mine}, {whose}", "" if whose == _HOST else effect)


def _whose(host: Host, kind: str, mine: str) -> str:
    if mine == f"{kind}:[{_FIRST[kind]}]":
        return _HOST
    # Process 1 is the host's only in the host's pid namespace.
    first = None
    if host.link("/proc/self/ns/pid") == f"pid:[{_FIRST['pid']}]":
        first = host.link(f"/proc/1/ns/{kind}")
    if first == mine:
        return _HOST
    known = kind != "net" or first is not None
    return "not the one of the host" if known else "unknown whether it is the one of the host"


def check_user(host: Host) -> Finding:
    real, effective = os.getuid(), os.geteuid()
    text = f"uid {effective}"
    mapping = (host.read("/proc/self/uid_map") or "").split()
    if mapping and mapping != _WHOLE_RANGE:
        text += f", mapped in a user namespace ({' '.join(mapping)})"
    if real != effective:
        text += f", started by uid {real}"
    return Finding(OK, "user", f"{text}; ranks of another user are refused")


def check_host_id(host: Host) -> Finding:
    wish = os.environ.get("PHALANX_HOST_ID", "").strip()
    boot = host.read("/proc/sys/kernel/random/boot_id")
    if wish:
        advice = "ranks with the same number share memory: unset it unless you mean that"
        return Finding(OK, "host id", f"{wish}, from PHALANX_HOST_ID", advice)
    if boot:
        return Finding(OK, "host id", f"made of the boot id {boot} and the network namespace")
    advice = "ranks of two hosts may be taken for ranks of one: set PHALANX_HOST_ID to another number on each host"
    return Finding(WARN, "host id", "the boot id cannot be read", advice)


# ---- cores -----------------------------------------------------------------------------------------

# Names in /proc/cpuinfo of what kernels are built for, or will be, in the order of their age.
_INSTRUCTIONS = (
    *("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "asimd", "asimdhp", "sve", "sve2", "bf16", "i8mm"),
)
_KERNELS = ("avx512", "avx2", "neon", "scalar")  # the best first: the values of PHALANX_ISA
# What the kernels named so need: the same as core/src/kernels/dispatch.cpp.
_NEEDS = {
    "avx512": {"avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx2": {"avx2", "f16c", "fma"},
}


def default_ranks() -> int:
    """LOCAL_WORLD_SIZE as torchrun sets it, else as many as cores that this process may use; two at least."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() and int(given) > 0 else max(2, len(os.sched_getaffinity(0)))


def check_cores(host: Host) -> Finding:
    allowed = sorted(os.sched_getaffinity(0))
    text = f"{count(os.cpu_count() or 0, 'core')}, this process may use {len(allowed)}: {ranges(allowed)}"
    quota = cpu_quota(host)
    if quota is not None:
        text += f", cgroup quota {quota:g}"
    usable = len(allowed) if quota is None else min(float(len(allowed)), quota)
    if host.ranks > usable:
        text += f"; for {count(host.ranks, 'rank')}"
        advice = (
            "ranks that share a core take turns, so a small all_reduce takes ten times as long: "
            f"run at most {max(1, int(usable))}, or allow a core for each (taskset, --cpus, cpu limit)"
        )
        return Finding(WARN, "cores", text, advice)
    return Finding(OK, "cores", f"{text}; enough for {count(host.ranks, 'rank')}")


def check_siblings(host: Host) -> Finding:
    allowed = sorted(os.sched_getaffinity(0))
    whole = set()
    for core in allowed:
        folder = f"/sys/devices/system/cpu/cpu{core}/topology"
        siblings = host.read(f"{folder}/core_cpus_list") or host.read(f"{folder}/thread_siblings_list")
        if siblings is None:
            return Finding(OK, "hyper-threads", "cannot be read")
        whole.add(siblings)
    shared = len(allowed) - len(whole)
    if shared == 0:
        return Finding(OK, "hyper-threads", "each of these cores is a whole core: no hyper-thread siblings")
    text = f"the {len(allowed)} cores are hyper-threads of {count(len(whole), 'physical core')}"
    if host.ranks > len(whole):
        advice = f"{count(host.ranks, 'rank')} share {len(whole)} physical cores: run fewer, or expect less of each"
    else:
        advice = "bind each rank to a physical core of its own"
    return Finding(OK, "hyper-threads", text, advice)


def check_instructions(host: Host) -> Finding | None:
    """What the processor has, and which kernels were chosen. Silent if the library cannot be loaded: see `library`."""
    library = core_module()
    if library is None:
        return None
    fields = host.fields("/proc/cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    known = [name for name in _INSTRUCTIONS if name in flags]
    chosen = next((name for name in _KERNELS if library.lib.phx_has(name.encode())), "unknown")
    text = f"{chosen}; {'the processor has ' + ' '.join(known) if known else '/proc/cpuinfo names no instruction set'}"
    best = next((name for name, needed in _NEEDS.items() if needed <= flags), None)
    wish = os.environ.get("PHALANX_ISA")
    if wish is not None and (wish not in _KERNELS or _KERNELS.index(wish) > [*_KERNELS, "unknown"].index(chosen)):
        advice = f"it has no effect: unset it, or set one of {', '.join(_KERNELS)} that this processor has"
        return Finding(WARN, "isa", f"{text}; PHALANX_ISA is {wish!r}", advice)
    if best is None or best == chosen:
        return Finding(OK, "isa", text)
    advice = f"unset PHALANX_ISA, which is {wish}" if wish else "this library was built without it; build it again"
    return Finding(WARN, "isa", text, f"{best} would be faster: {advice}")


# ---- NUMA: which cores and which memory belong together --------------------------------------------

_NODES = "/sys/devices/system/node"
_MPOL_BIND = 2  # linux/mempolicy.h
_WORD = ctypes.sizeof(ctypes.c_ulong) * 8


def check_nodes(host: Host) -> Finding:
    nodes = parse_ranges(host.read(f"{_NODES}/online"))
    if not nodes:
        return Finding(OK, "numa", "nodes cannot be read; assuming one")
    cores = {node: parse_ranges(host.read(f"{_NODES}/node{node}/cpulist")) for node in nodes}
    if len(nodes) == 1:
        return Finding(OK, "numa", f"one node, cores {ranges(cores[nodes[0]]) or 'unknown'}")
    allowed = os.sched_getaffinity(0)
    parts = [
        f"node {node} has cores {ranges(cores[node])}" if cores[node] else f"node {node} has none" for node in nodes
    ]
    text = f"{len(nodes)} nodes: {'; '.join(parts)}"
    homes = [node for node in nodes if allowed & set(cores[node])]
    memory = parse_ranges(host.fields("/proc/self/status").get("Mems_allowed_list"))
    strange = [node for node in homes if memory and node not in memory]
    if strange:
        text += f"; memory is allowed on {ranges(memory)} only"
        advice = f"cores of node {ranges(strange)} use remote memory: allow its memory as well (--cpuset-mems)"
        return Finding(WARN, "numa", text, advice)
    if len(homes) > 1:
        text += f"; this process may use {len(homes)} of them"
        advice = "a block is placed on the node where its rank runs: bind ranks to cores first (numactl --cpunodebind)"
        return Finding(OK, "numa", text, advice)
    return Finding(OK, "numa", f"{text}; this process uses node {ranges(homes)}")


def check_binding(host: Host) -> Finding:
    allowed = parse_ranges(host.fields("/proc/self/status").get("Mems_allowed_list"))
    if not allowed:
        return Finding(OK, "memory binding", "the allowed nodes cannot be read")
    text = f"memory of {count(len(allowed), 'node')} is allowed: {ranges(allowed)}"
    try:
        _bind_a_page(allowed)
        return Finding(OK, "memory binding", f"{text}; works")
    except OSError as error:
        advice = "Phalanx binds none, but numactl --membind does: allow mbind (seccomp; docker: --cap-add SYS_NICE)"
        return Finding(OK, "memory binding", f"{text}; binding does not work ({error})", advice)


def _bind_a_page(nodes: list[int]) -> None:
    """One page of our own, to where it may lie anyway."""
    mask = (ctypes.c_ulong * (max(nodes) // _WORD + 1))()
    for node in nodes:
        mask[node // _WORD] |= 1 << node % _WORD
    page = ctypes.c_char.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))  # it keeps the mapping, and is its end
    bits = len(mask) * _WORD + 1  # the kernel reads one less
    system_call("mbind", ctypes.byref(page), mmap.PAGESIZE, _MPOL_BIND, ctypes.byref(mask), bits, 0)
