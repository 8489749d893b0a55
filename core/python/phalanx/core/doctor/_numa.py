"""NUMA: which cores and which memory belong together."""

import ctypes
import mmap
import os
from collections.abc import Iterator

from phalanx.core.doctor import _calls
from phalanx.core.doctor._finding import OK, WARN, Finding
from phalanx.core.doctor._host import Host, count, parse_ranges, ranges

_NODES = "/sys/devices/system/node"
_MPOL_BIND = 2  # linux/mempolicy.h
_WORD = ctypes.sizeof(ctypes.c_ulong) * 8


def check_nodes(host: Host) -> Iterator[Finding]:
    nodes = parse_ranges(host.read(f"{_NODES}/online"))
    if not nodes:
        yield Finding(OK, "numa", "nodes cannot be read; taken for one")
        return
    cores = {node: parse_ranges(host.read(f"{_NODES}/node{node}/cpulist")) for node in nodes}
    if len(nodes) == 1:
        yield Finding(OK, "numa", f"one node, cores {ranges(cores[nodes[0]]) or 'unknown'}")
        return
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
        advice = f"what cores of node {ranges(strange)} use is far away: allow its memory as well (--cpuset-mems)"
        yield Finding(WARN, "numa", text, advice)
    elif len(homes) > 1:
        text += f"; this process may use {len(homes)} of them"
        advice = "a block lies where its rank runs when it is made: bind ranks to cores first (numactl --cpunodebind)"
        yield Finding(OK, "numa", text, advice)
    else:
        yield Finding(OK, "numa", f"{text}; this process uses node {ranges(homes)}")


def check_binding(host: Host) -> Iterator[Finding]:
    allowed = parse_ranges(host.fields("/proc/self/status").get("Mems_allowed_list"))
    if not allowed:
        yield Finding(OK, "memory binding", "the nodes that are allowed cannot be read")
        return
    text = f"memory of {count(len(allowed), 'node')} is allowed: {ranges(allowed)}"
    try:
        _bind_a_page(allowed)
        yield Finding(OK, "memory binding", f"{text}; works")
    except OSError as error:
        advice = "Phalanx binds none, but numactl --membind does: allow mbind (seccomp; docker: --cap-add SYS_NICE)"
        yield Finding(OK, "memory binding", f"{text}; binding does not work ({error})", advice)


def _bind_a_page(nodes: list[int]) -> None:
    """One page of our own, to where it may lie anyway."""
    mask = (ctypes.c_ulong * (max(nodes) // _WORD + 1))()
    for node in nodes:
        mask[node // _WORD] |= 1 << node % _WORD
    page = ctypes.c_char.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))  # it keeps the mapping, and is its end
    bits = len(mask) * _WORD + 1  # the kernel reads one less
    _calls.call("mbind", ctypes.byref(page), mmap.PAGESIZE, _MPOL_BIND, ctypes.byref(mask), bits, 0)
