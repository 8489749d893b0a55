"""Every collective, ready to be issued and with the exact result that it must have.

Inputs are small whole numbers that depend on the rank, on the number of the call and on the element, so sums are exact
in every dtype and no two calls have the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.core import Call

ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce_scatter", "reduce_scatter_v", "reduce")
ORDINARY = (
    *("all_reduce", "all_gather", "all_gather_v", "reduce_scatter", "reduce_scatter_v", "all_to_all", "all_to_all_v"),
    *("broadcast", "reduce", "gather", "scatter", "barrier", "coalesced"),
)
SYMMETRIC = tuple(f"symm_{name}" for name in ORDINARY if name not in ("barrier", "coalesced"))
IN_PLACE = "symm_all_reduce_in_place"
COLLECTIVES = (*ORDINARY, *SYMMETRIC, IN_PLACE)
# Ordinary calls on symmetric memory: that of all ranks, or of all but rank 0. Looked for in large ones only.
FOUND = (
    *("found_all_reduce", "found_all_to_all_v", "found_broadcast", "found_scatter", "found_coalesced"),
    *("mixed_all_reduce", "mixed_coalesced"),
)
MESSAGES = "messages"  # to the next rank, from the one before
STEPLESS = ("symm_barrier", "signals")  # without failpoints: a rank can only fail before it calls them
ALL = (*COLLECTIVES, MESSAGES, *STEPLESS)


def base(name: str) -> str:
    """The collective on ordinary memory that has the same arguments."""
    for prefix in ("symm_", "found_", "mixed_"):
        name = name.removeprefix(prefix)
    return name.removesuffix("_in_place")


def failpoint(name: str) -> str:
    """Its name in PHALANX_FAILPOINT."""
    return "symm_all_reduce" if name == IN_PLACE else base(name) if name in FOUND else name


@dataclass(frozen=True)
class Arguments:
    """What the ranks of a group must agree on."""

    count: int
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0


@dataclass(frozen=True)
class Prepared:
    """A call with its buffers. `issue(False)` returns works; `verify` says what is wrong with the result, or ""."""

    issue: Callable[[bool], list[Any]]
    verify: Callable[[], str]


def block_bytes(group_size: int, count: int) -> int:
    """Of a symmetric block with room for the inputs of four calls, of up to 8 bytes an element."""
    return 4 * _stride(group_size, count)


def _stride(group_size: int, count: int) -> int:
    return (group_size * (count + 3 * group_size) * 8 + 4095) // 4096 * 4096


def given(rank: int, number: int, count: int, dtype: str = "float32", start: int = 0) -> Any:
    """What a rank puts into a call, from element `start` on."""
    return ((np.arange(start, start + count) % 7 + 1) * (rank + 1) + number % 5).astype(dtype)


def prepare(name: str, group: Any, symm: Any, number: int, arguments: Arguments, *, rotate: bool = False) -> Prepared:
    """The `number`-th call of a group. rotate: leave the symmetric input of the last three calls alone."""
    if name == MESSAGES:
        return _messages(group, number, arguments)
    if name in ("barrier", *STEPLESS):
        return _moves_nothing(name, group, symm)
    if base(name) == "coalesced":
        found = name in FOUND and not (name.startswith("mixed_") and group.group_rank == 0)
        return _coalesced(group, symm if found else None, number if rotate else 0, number, arguments)
    return _collective(name, group, symm, number, arguments, rotate)


def _collective(name: str, group: Any, symm: Any, number: int, arguments: Arguments, rotate: bool) -> Prepared:
    kind, me, n = base(name), group.group_rank, group.group_size
    count, dtype, root = arguments.count, arguments.dtype, arguments.root

    def inputs(size: int) -> list[Any]:
        return [given(rank, number, size, dtype) for rank in range(n)]

    counts = [count + 3 * rank for rank in range(n)]
    sent, received = [count + me + 2 * j for j in range(n)], [count + j + 2 * me for j in range(n)]
    here = me == root
    if kind == "all_reduce":
        source, expected, extra = given(me, number, count, dtype), sum(inputs(count)), {"op": arguments.op}
    elif kind == "all_gather":
        source, expected, extra = given(me, number, count, dtype), np.concatenate(inputs(count)), {}
    elif kind == "all_gather_v":
        source = given(me, number, counts[me], dtype)
        expected = np.concatenate([given(rank, number, counts[rank], dtype) for rank in range(n)])
        extra = {"counts": counts}
    elif kind == "reduce_scatter":
        source, extra = given(me, number, n * count, dtype), {"op": arguments.op}
        expected = sum(inputs(n * count))[me * count :][:count]
    elif kind == "reduce_scatter_v":
        source, extra = given(me, number, sum(counts), dtype), {"counts": counts, "op": arguments.op}
        expected = sum(inputs(sum(counts)))[sum(counts[:me]) :][: counts[me]]
    elif kind == "all_to_all":
        source, extra = given(me, number, n * count, dtype), {}
        expected = np.concatenate([given(rank, number, count, dtype, me * count) for rank in range(n)])
    elif kind == "all_to_all_v":
        source, extra = given(me, number, sum(sent), dtype), {"source_counts": sent, "out_counts": received}
        starts = [sum(count + rank + 2 * j for j in range(me)) for rank in range(n)]
        expected = np.concatenate([given(rank, number, received[rank], dtype, starts[rank]) for rank in range(n)])
    elif kind == "broadcast":
        source, expected, extra = given(me, number, count, dtype), given(root, number, count, dtype), {}
    elif kind == "reduce":
        source, expected, extra = given(me, number, count, dtype), sum(inputs(count)) if here else None, {}
        extra = {"op": arguments.op}
    elif kind == "gather":
        source, expected, extra = given(me, number, count, dtype), np.concatenate(inputs(count)) if here else None, {}
    else:
        source, extra = given(me, number, n * count, dtype), {}
        expected = given(root, number, count, dtype, me * count)
    if kind in ROOTED:
        extra["root_group_rank"] = root
    out = np.zeros(0 if expected is None else len(expected), dtype)
    if name in FOUND and not (name.startswith("mixed_") and me == 0):
        block = _block(symm, number if rotate else 0, source)
        return _ordinary(group, kind, block, out, expected, extra)
    if name == kind or name in FOUND:
        return _ordinary(group, kind, source, out, expected, extra)
    return _symmetric(name, symm, number if rotate else 0, source, out, expected, extra)


def _ordinary(group: Any, kind: str, source: Any, out: Any, expected: Any, extra: dict[str, Any]) -> Prepared:
    call = getattr(group, kind)
    if kind == "broadcast":
        return Prepared(lambda blocking: _works(call(source, **extra, blocking=blocking)), _compare(source, expected))
    if kind == "all_to_all_v":
        counts = extra["source_counts"], extra["out_counts"]
        return Prepared(
            lambda blocking: _works(call(source, counts[0], out, counts[1], blocking=blocking)),
            _compare(out, expected),
        )
    place = out if expected is not None else None
    return Prepared(lambda blocking: _works(call(source, place, **extra, blocking=blocking)), _compare(out, expected))


def _offset(symm: Any, turn: int) -> int:
    return turn % 4 * int(symm.size // 4)


def _block(symm: Any, turn: int, source: Any, behind: int = 0) -> Any:
    """The source, copied to symmetric memory, behind so many bytes of the same call."""
    block = np.frombuffer(symm.buffer(symm.group_rank), source.dtype, len(source), _offset(symm, turn) + behind)
    block[:] = source
    return block


def _symmetric(
    name: str, symm: Any, turn: int, source: Any, out: Any, expected: Any, extra: dict[str, Any]
) -> Prepared:
    kind = base(name)
    offset = _offset(symm, turn)
    block = _block(symm, turn, source)
    shape = {"count": len(source), "dtype": str(source.dtype)}
    call = getattr(symm, kind)
    if name == IN_PLACE:
        return Prepared(
            lambda blocking: _works(call(offset, **shape, **extra, blocking=blocking)), _compare(block, expected)
        )
    if kind == "broadcast":
        return Prepared(
            lambda blocking: _works(call(offset, **shape, **extra, blocking=blocking)), _compare(block, expected)
        )
    if expected is None:  # not the root: the shape is not known from an output
        return Prepared(lambda blocking: _works(call(offset, None, **shape, **extra, blocking=blocking)), lambda: "")
    if kind == "all_to_all_v":
        counts = extra["source_counts"], extra["out_counts"]
        return Prepared(
            lambda blocking: _works(call(offset, counts[0], out, counts[1], blocking=blocking)),
            _compare(out, expected),
        )
    return Prepared(lambda blocking: _works(call(offset, out, **extra, blocking=blocking)), _compare(out, expected))


def _coalesced(group: Any, symm: Any, turn: int, number: int, arguments: Arguments) -> Prepared:
    """symm: where the inputs lie, if that is not None."""
    me, n, count, dtype = group.group_rank, group.group_size, arguments.count, arguments.dtype
    mine = given(me, number, count, dtype)
    summed, gathered, sent = mine.copy(), np.zeros(n * count, dtype), given(me, number + 1, count, dtype)
    if symm is not None:
        mine, sent = _block(symm, turn, mine), _block(symm, turn, sent, behind=mine.nbytes)
    calls = [
        Call.all_reduce(mine, summed, op=arguments.op),
        Call.all_gather(mine, gathered),
        Call.broadcast(sent, root_group_rank=arguments.root),
    ]
    inputs = [given(rank, number, count, dtype) for rank in range(n)]
    checks = (
        _compare(summed, sum(inputs)),
        _compare(gathered, np.concatenate(inputs)),
        _compare(sent, given(arguments.root, number + 1, count, dtype)),
    )
    return Prepared(
        lambda blocking: _works(group.coalesced(calls, blocking=blocking)),
        lambda: next((text for check in checks if (text := check())), ""),
    )


def _messages(group: Any, number: int, arguments: Arguments) -> Prepared:
    me, n = group.group_rank, group.group_size
    after, before = (me + 1) % n, (me - 1) % n
    source = given(me, number, arguments.count, arguments.dtype)
    out = np.zeros(arguments.count, arguments.dtype)

    def issue(blocking: bool) -> list[Any]:
        sent = group.send(source, after, blocking=blocking)
        received = group.recv(out, before, blocking=blocking)
        return [] if blocking else [sent, received]

    return Prepared(issue, _compare(out, given(before, number, arguments.count, arguments.dtype)))


def _moves_nothing(name: str, group: Any, symm: Any) -> Prepared:
    def issue(blocking: bool) -> list[Any]:
        if name == "barrier":
            group.barrier()
        elif name == "symm_barrier":
            symm.barrier(2)
        else:
            for peer in range(group.group_size):
                symm.put_signal(peer, 1)
            for peer in range(group.group_size):
                symm.wait_signal(peer, 1)
        return []

    return Prepared(issue, lambda: "")


def _works(work: Any) -> list[Any]:
    return [] if work is None else [work]


def _compare(out: Any, expected: Any) -> Callable[[], str]:
    def verify() -> str:
        if expected is None or np.array_equal(out, expected):
            return ""
        index = int(np.flatnonzero(out != expected)[0])
        return f"element {index} of {len(out)} is {out[index]} instead of {expected[index]}"

    return verify
