"""Cores against ranks, and what the processor can."""

import os
from collections.abc import Iterator

from phalanx.core.doctor import _cgroup
from phalanx.core.doctor._finding import OK, WARN, Finding
from phalanx.core.doctor._host import Host, count, ranges

# Of /proc/cpuinfo, in the order of their age: those that kernels are built for, or will be.
_INSTRUCTIONS = (
    *("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "asimd", "asimdhp", "sve", "sve2", "bf16", "i8mm"),
)
# What the kernels named so need: the same as core/src/kernels/dispatch.cpp.
_NEEDS = {
    "avx512": {"avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx2": {"avx2", "f16c", "fma"},
}


def default_ranks() -> int:
    """LOCAL_WORLD_SIZE as torchrun sets it, else as many as cores that this process may use; two at least."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() and int(given) > 0 else max(2, len(os.sched_getaffinity(0)))


def check_cores(host: Host) -> Iterator[Finding]:
    allowed = sorted(os.sched_getaffinity(0))
    text = f"{count(os.cpu_count() or 0, 'core')}, this process may use {len(allowed)}: {ranges(allowed)}"
    quota = _cgroup.cpu_quota(host)
    if quota is not None:
        text += f", cgroup quota {quota:g}"
    usable = len(allowed) if quota is None else min(float(len(allowed)), quota)
    if host.ranks > usable:
        text += f"; for {count(host.ranks, 'rank')}"
        advice = (
            "ranks that share a core take turns, so a small all_reduce takes ten times as long: "
            f"run at most {max(1, int(usable))}, or allow a core for each (taskset, --cpus, cpu limit)"
        )
        yield Finding(WARN, "cores", text, advice)
    else:
        yield Finding(OK, "cores", f"{text}; enough for {count(host.ranks, 'rank')}")


def check_siblings(host: Host) -> Iterator[Finding]:
    allowed = sorted(os.sched_getaffinity(0))
    whole = set()
    for core in allowed:
        folder = f"/sys/devices/system/cpu/cpu{core}/topology"
        siblings = host.read(f"{folder}/core_cpus_list") or host.read(f"{folder}/thread_siblings_list")
        if siblings is None:
            yield Finding(OK, "hyper-threads", "cannot be read")
            return
        whole.add(siblings)
    shared = len(allowed) - len(whole)
    if shared == 0:
        yield Finding(OK, "hyper-threads", "no two of these cores are one")
        return
    text = f"the {len(allowed)} are hyper-threads of {count(len(whole), 'whole core')}"
    if host.ranks > len(whole):
        advice = f"{count(host.ranks, 'rank')} compute on {len(whole)}: bind one to each, or expect less from the rest"
    else:
        advice = "bind each rank to a core of its own, so that no two meet on one"
    yield Finding(OK, "hyper-threads", text, advice)


def check_instructions(host: Host) -> Iterator[Finding]:
    """What the processor has, and which kernels were chosen. Silent if the library cannot be loaded: see `library`."""
    try:
        from phalanx.core._lib import lib
    except ImportError:
        return
    fields = host.fields("/proc/cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    known = [name for name in _INSTRUCTIONS if name in flags]
    chosen = next((name for name in ("avx512", "avx2", "neon", "scalar") if lib.phx_has(name.encode())), "unknown")
    text = f"{chosen}; the processor has {' '.join(known)}" if known else f"{chosen}; of the processor nothing is known"
    best = next((name for name, needed in _NEEDS.items() if needed <= flags), None)
    wish = os.environ.get("PHALANX_ISA")
    if best is None or best == chosen:
        yield Finding(OK, "isa", text)
    elif wish:
        yield Finding(WARN, "isa", text, f"{best} would be faster: unset PHALANX_ISA, which is {wish}")
    else:
        yield Finding(WARN, "isa", text, f"{best} would be faster: this library was built without it, build it anew")
