"""What a case is: a call of torch.distributed with its memory, and what one process computes for it.

A case is one row of data, the same on all ranks. `arguments` makes the tensors of one rank, as views of larger pieces
of memory. `expected` makes those of every rank in one process, and writes the results where they belong: the inputs of
all ranks are read before anything is written. Whatever a rank's call leaves in its memory, within the views and around
them, must be what `expected` has there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")
REDUCING += ("reduce_scatter_tensor_coalesced",)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
DTYPES += ("uint64", "bool", "complex64", "complex128", "complex32", *FLOAT8)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
FACTOR = 2.0
PADDING = 7  # elements around a view


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        kind: The collective.
        entry: What is called: "dist.all_reduce", or "pg.allreduce(opts)" for a method of ProcessGroup.
        layout: How the tensors lie in memory; see `_view`.
        dtype, op, root: Of the call, where they have a meaning.
        is_async: Whether the work is waited for by the caller.
    """

    kind: str
    entry: str
    layout: str = "contiguous"
    dtype: str = "float32"
    op: str = "SUM"
    root: int = 0
    is_async: bool = False

    @property
    def name(self) -> str:
        op = f" {self.op}" if self.kind in REDUCING else ""
        return f"{self.entry}{op} {self.dtype} {self.layout}{' async' if self.is_async else ''} root={self.root}"


@dataclass
class Arguments:
    """The tensors of one rank, and the memory that they are in."""

    ins: list[Any] = field(default_factory=list)
    outs: list[Any] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _numbers(case: Case, rank: int, index: int, shape: Sequence[int]) -> torch.Tensor:
    """Values that say which rank, tensor and element they are, and whose sum is exact in the dtype."""
    steps = torch.arange(torch.Size(shape).numel()).view(tuple(shape))
    dtype = getattr(torch, case.dtype)
    narrow = dtype.itemsize == 1 or case.dtype in ("bfloat16", "complex32")
    if case.op == "PRODUCT":
        made = (rank + index + steps) % 3 + 1
    elif narrow:
        made = (rank + 2 * index + steps) % 3
    else:
        made = 100 * rank + 10 * index + steps
    if dtype.is_complex:
        return torch.complex(made.double(), (made + 1).double() % 3).to(dtype)
    return made.to(dtype)


def _view(case: Case, rank: int, index: int, shape: Sequence[int], made: Arguments, layout: str) -> torch.Tensor:
    """A tensor of a shape. Its memory has more elements, which a call must not write."""
    dtype = getattr(torch, case.dtype)
    numel = torch.Size(shape).numel()

    def memory(count: int) -> torch.Tensor:
        made.memory.append(torch.ones(count).to(dtype))
        return made.memory[-1]

    if layout == "strided":
        tensor = memory(2 * numel + PADDING)[: 2 * numel].view(shape[0], 2 * shape[1])[:, ::2]
    elif layout == "transposed":
        tensor = memory(numel + PADDING)[:numel].view(shape[1], shape[0]).t()
    elif layout == "sliced":
        tensor = memory(numel + 2 * PADDING)[PADDING : PADDING + numel].view(shape)
    elif layout == "expanded":
        tensor = memory(numel + PADDING)[: shape[1]].expand(shape)
        tensor[0].copy_(_numbers(case, rank, index, shape[1:]))
        return tensor
    elif layout == "conj":
        tensor = memory(numel)[:numel].view(shape).conj()
    elif layout == "requires_grad":
        tensor = memory(numel).view(shape).requires_grad_()
    else:
        tensor = memory(numel).view(shape)
    with torch.no_grad():
        tensor.copy_(_numbers(case, rank, index, shape))
    return tensor


def _shape(case: Case, blocks: int = 1) -> tuple[int, ...]:
    if case.layout == "scalar":
        return () if blocks == 1 else (blocks,)
    if case.layout == "empty":
        return (0, 3)
    return (2 * blocks, 3)


def _tensors(
    case: Case, rank: int, shapes: Sequence[Sequence[int]], made: Arguments, first: int = 0
) -> list[torch.Tensor]:
    """Several tensors, of which some layouts are about the list."""
    if case.layout == "same":
        one = _view(case, rank, first, shapes[0], made, "contiguous")
        return [one] * len(shapes)
    if case.layout in ("chunks", "columns", "overlapping"):
        count, numel = len(shapes), torch.Size(shapes[0]).numel()
        whole = _view(case, rank, first, (count * numel + 2 * PADDING,), made, "contiguous")
        if case.layout == "overlapping":  # each begins within the one before
            return [whole[i : i + numel].view(tuple(shapes[i])) for i in range(count)]
        inside = whole[PADDING : PADDING + count * numel]
        if case.layout == "chunks":
            return [part.view(tuple(shapes[0])) for part in inside.split(numel)]
        return [
            part.unflatten(0, tuple(shapes[0])) if shapes[0] else part[0]
            for part in inside.view(numel, count).unbind(1)
        ]
    return [_view(case, rank, first + i, shape, made, case.layout) for i, shape in enumerate(shapes)]


# ---- what is given ---------------------------------------------------------------------------------------------------


def arguments(case: Case, rank: int, size: int) -> Arguments:
    """The tensors of a rank."""
    made = Arguments()
    block = _shape(case)
    if case.kind in ("all_reduce", "broadcast", "reduce"):
        made.ins = made.outs = [_view(case, rank, 0, block, made, case.layout)]
    elif case.kind == "all_reduce_coalesced":
        shapes = [block, block, block] if case.layout in _OF_LISTS else [block, _shape(case, 2), block]
        made.ins = made.outs = _tensors(case, rank, shapes, made)
    elif case.kind in ("all_gather", "gather"):
        is_root = case.kind == "all_gather" or rank == case.root
        made.outs = _tensors(case, rank, [block] * size, made, 5) if is_root else []
        if case.layout == "aliased" and is_root:  # in place
            made.ins = [made.outs[rank]]
        else:
            made.ins = [_view(case, rank, 0, block, made, case.layout)]
    elif case.kind == "all_gather_uneven":
        made.outs = _tensors(case, rank, [(r + 1, 3) for r in range(size)], made, 5)
        made.ins = [_view(case, rank, 0, (rank + 1, 3), made, case.layout)]
    elif case.kind == "scatter":
        made.ins = _tensors(case, rank, [block] * size, made) if rank == case.root else []
        in_place = case.layout == "aliased" and rank == case.root
        made.outs = [made.ins[rank] if in_place else _view(case, rank, 9, block, made, case.layout)]
    elif case.kind == "reduce_scatter":
        made.ins = _tensors(case, rank, [block] * size, made)
        made.outs = [made.ins[rank] if case.layout == "aliased" else _view(case, rank, 9, block, made, case.layout)]
    elif case.kind in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        _blocks(case, rank, size, made)
    elif case.kind in ("all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"):
        for index in range(3):
            if case.layout == "same" and index:
                made.ins.append(made.ins[0])
                made.outs.append(made.outs[0])
            else:
                ins, outs = (_shape(case, size), block) if "scatter" in case.kind else (block, _shape(case, size))
                made.ins.append(_view(case, rank, index, ins, made, case.layout))
                made.outs.append(_view(case, rank, 5 + index, outs, made, case.layout))
    elif case.kind == "all_gather_coalesced":
        count = size if case.layout == "as many as ranks" else 3
        made.ins = _tensors(case, rank, [block] * count, made)
        made.outs = [_tensors(case, rank, [block] * count, made, 5) for _ in range(size)]
    elif case.kind == "all_to_all":
        counts = [(1 + (rank + r) % 3, 3) for r in range(size)] if case.layout == "uneven" else [block] * size
        made.ins = _tensors(case, rank, counts, made)
        made.outs = made.ins if case.layout == "aliased" else _tensors(case, rank, counts, made, 5)
    elif case.kind == "messages":
        made.ins = [_view(case, rank, 0, block, made, case.layout)]
        # A receive that is refused would leave the message to the next case.
        made.outs = [_view(case, rank, 5, block, made, "contiguous" if case.layout == "expanded" else case.layout)]
    return made


_OF_LISTS = ("same", "chunks", "columns", "overlapping")


def _blocks(case: Case, rank: int, size: int, made: Arguments) -> None:
    many, one = _shape(case, size), _shape(case)
    ins, outs = {"all_gather_into_tensor": (one, many), "reduce_scatter_tensor": (many, one)}.get(
        case.kind, (many, many)
    )
    if case.layout == "stacked":  # the blocks in a dim of their own
        ins, outs = ((2, 3), (size, 2, 3)) if case.kind == "all_gather_into_tensor" else ((size, 2, 3), (2, 3))
    if case.layout == "uneven":
        made.extra["splits"] = [1 + (rank + r) % 3 for r in range(size)]
        ins = outs = (sum(made.extra["splits"]), 3)
    if case.layout not in ("aliased", "shifted"):
        made.ins = [_view(case, rank, 0, ins, made, case.layout)]
        made.outs = [_view(case, rank, 5, outs, made, case.layout)]
        return
    whole = _view(case, rank, 0, (many[0] + 2, 3), made, "contiguous")
    small = whole[2 * rank : 2 * rank + 2] if case.layout == "aliased" else whole[1:3]
    large = whole[:-2]
    if case.kind == "all_to_all_single":
        made.ins, made.outs = [large], [large if case.layout == "aliased" else whole[1:-1]]
    elif case.kind == "all_gather_into_tensor":
        made.ins, made.outs = [small], [large]
    else:
        made.ins, made.outs = [large], [small]


# ---- what one process computes ---------------------------------------------------------------------------------------


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def _reduced(case: Case, tensors: list[torch.Tensor]) -> torch.Tensor:
    dtype = getattr(torch, case.dtype)
    stack = torch.stack(tensors)
    integers = stack.dtype == torch.int64
    if case.op == "PRODUCT":
        done = stack.prod(0)
    elif case.op in ("MIN", "MAX"):
        if dtype.is_complex:
            raise ValueError("complex numbers have no order")
        done = stack.amin(0) if case.op == "MIN" else stack.amax(0)
    elif case.op in ("BAND", "BOR", "BXOR"):
        if not integers:
            raise ValueError("bits of integers only")
        done = stack[0]
        for each in stack[1:]:
            done = {"BAND": done.__and__, "BOR": done.__or__, "BXOR": done.__xor__}[case.op](each)
    else:
        if dtype == torch.bool and case.op == "AVG":
            raise ValueError("no average of truths")
        if integers and case.op == "PREMUL_SUM":
            raise ValueError("a factor is for floats")
        done = stack.sum(0)
        if case.op == "AVG":
            done = torch.div(done, len(tensors), rounding_mode="trunc") if integers else done / len(tensors)
        elif case.op == "PREMUL_SUM":
            done = done * FACTOR
    return done


def _results(case: Case, given: list[list[torch.Tensor]], every: list[Arguments]) -> list[list[torch.Tensor | None]]:
    """By rank, what each of its outputs becomes; None: it stays as it is."""
    ranks = range(len(every))
    root = given[case.root] if case.root < len(given) else []
    kind = case.kind
    if kind in ("all_reduce", "all_reduce_coalesced"):
        done = [_reduced(case, list(column)) for column in zip(*given, strict=True)]
        return [list(done) for _ in ranks]
    if kind == "reduce":
        return [[_reduced(case, [each[0] for each in given])] if rank == case.root else [None] for rank in ranks]
    if kind == "broadcast":
        return [[root[0]] for _ in ranks]
    if kind in ("all_gather", "all_gather_uneven"):
        return [[each[0] for each in given] for _ in ranks]
    if kind == "gather":
        return [[each[0] for each in given] if rank == case.root else [] for rank in ranks]
    if kind == "scatter":
        return [[root[rank]] for rank in ranks]
    if kind == "reduce_scatter":
        return [[_reduced(case, [each[rank] for each in given])] for rank in ranks]
    if kind in ("all_gather_into_tensor", "all_gather_into_tensor_coalesced"):
        joined = [torch.cat([each.reshape(-1) for each in column]) for column in zip(*given, strict=True)]
        return [list(joined) for _ in ranks]
    if kind in ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"):
        sums = [_reduced(case, list(column)).reshape(len(ranks), -1) for column in zip(*given, strict=True)]
        return [[each[rank] for each in sums] for rank in ranks]
    if kind == "all_gather_coalesced":
        return [[tensor for each in given for tensor in each] for _ in ranks]
    if kind == "all_to_all":
        return [[each[rank] for each in given] for rank in ranks]
    if kind == "all_to_all_single":
        splits = [
            each.extra.get("splits") or [len(rows[0]) // len(ranks)] * len(ranks)
            for each, rows in zip(every, given, strict=True)
        ]
        parts = [rows[0].split(split) for rows, split in zip(given, splits, strict=True)]
        return [[torch.cat([each[rank] for each in parts])] for rank in ranks]
    if kind == "messages":
        return [[given[(rank - 1) % len(ranks)][0]] for rank in ranks]
    raise AssertionError(kind)


def expected(case: Case, rank: int, size: int) -> list[torch.Tensor] | None:
    """The memory of a rank after the call; None where the call has no one meaning."""
    every = [arguments(case, each, size) for each in range(size)]
    given = [[_wide(tensor).clone() for tensor in each.ins] for each in every]
    try:
        results = _results(case, given, every)
        outs: list[torch.Tensor] = []
        for out in every[rank].outs:
            outs += out if isinstance(out, list) else [out]
        dtype = getattr(torch, case.dtype)
        written = [(out, result) for out, result in zip(outs, results[rank], strict=True) if result is not None]
        with torch.no_grad():
            for out, result in written:
                out.copy_(result.reshape(out.shape).to(dtype))
            for out, result in written:  # no later one has written over it
                if not torch.equal(_wide(out), _wide(result.reshape(out.shape).to(dtype))):
                    return None
    except (ValueError, RuntimeError):
        return None
    return every[rank].memory


# ---- how it is called ------------------------------------------------------------------------------------------------

Entry = Callable[[dist.ProcessGroup, Case, Arguments], Any]


def _op(case: Case) -> Any:
    return dist._make_nccl_premul_sum(FACTOR) if case.op == "PREMUL_SUM" else getattr(dist.ReduceOp, case.op)


def _options(name: str, case: Case) -> Any:
    made = getattr(torch._C._distributed_c10d, name)()
    if hasattr(made, "asyncOp"):
        made.asyncOp = case.is_async
    if hasattr(made, "reduceOp"):
        made.reduceOp = _op(case)
    if hasattr(made, "rootRank"):
        made.rootRank = case.root
    return made


def _splits(a: Arguments) -> list[int]:
    return list(a.extra.get("splits", []))


def _gathered(case: Case, a: Arguments, group: Any) -> Any:
    return a.outs if group.rank() == case.root else None


def _scattered(case: Case, a: Arguments, group: Any) -> Any:
    return a.ins if group.rank() == case.root else None


def _dist(name: str, *of: str, **fixed: Any) -> Entry:
    """A function of torch.distributed. `of`: its arguments; "in" and "out" are tensors, "ins" and "outs" are lists."""

    def call(group: dist.ProcessGroup, case: Case, a: Arguments) -> Any:
        values: dict[str, Any] = {"in": a.ins[:1] and a.ins[0], "out": a.outs[:1] and a.outs[0]}
        values |= {"ins": a.ins, "outs": a.outs, "op": _op(case), "root": case.root}
        values |= {"gathered": _gathered(case, a, group), "scattered": _scattered(case, a, group)}
        values |= {"splits": _splits(a) or None}
        given = [values[each] for each in of]
        return getattr(dist, name)(*given, group=group, async_op=case.is_async, **fixed)

    return call


def _pg(name: str, options: str, *of: str) -> Entry:
    """A method of ProcessGroup, with its options object."""

    def call(group: dist.ProcessGroup, case: Case, a: Arguments) -> Any:
        values: dict[str, Any] = {"in": a.ins[:1] and a.ins[0], "out": a.outs[:1] and a.outs[0]}
        values |= {"ins": a.ins, "outs": a.outs, "[outs]": [a.outs], "[ins]": [a.ins], "[in]": a.ins[:1]}
        values |= {"splits": _splits(a)}
        at_root = group.rank() == case.root
        values |= {"[gathered]": [a.outs] if at_root else [], "[scattered]": [a.ins] if at_root else []}
        return getattr(group, name)(*(values[each] for each in of), _options(options, case))

    return call


def _short(name: str, *of: str) -> Entry:
    """A method of ProcessGroup in the form without options."""

    def call(group: dist.ProcessGroup, case: Case, a: Arguments) -> Any:
        values: dict[str, Any] = {"in": a.ins[:1] and a.ins[0], "out": a.outs[:1] and a.outs[0], "ins": a.ins}
        values |= {"outs": a.outs, "op": _op(case), "root": case.root, "splits": _splits(a)}
        at_root = group.rank() == case.root
        values |= {"[gathered]": [a.outs] if at_root else [], "[scattered]": [a.ins] if at_root else []}
        return getattr(group, name)(*(values[each] for each in of))

    return call


def _messages(how: str) -> Entry:
    """To the next rank, from the one before."""

    def call(group: dist.ProcessGroup, case: Case, a: Arguments) -> Any:
        rank, size = group.rank(), group.size()
        to, source, sent, got = (rank + 1) % size, (rank - 1) % size, a.ins[0], a.outs[0]
        works: list[Any] = []
        if how == "send":
            for what in ("send", "recv") if rank % 2 == 0 else ("recv", "send"):
                dist.send(sent, to, group, 3) if what == "send" else dist.recv(got, source, group, 3)
        elif how == "recv_any":
            works.append(dist.isend(sent, to, group, 3))
            assert dist.recv(got, None, group, 3) == source
        elif how == "isend":
            works += [dist.isend(sent, to, group, 4), dist.irecv(got, source, group, 4)]
        elif how == "batch":
            ops = [dist.P2POp(dist.isend, sent, to, group, 5), dist.P2POp(dist.irecv, got, source, group, 5)]
            works += dist.batch_isend_irecv(ops)
        elif how == "pg":
            works += [group.send([sent], to, 6), group.recv([got], source, 6)]
        else:
            works += [group.send([sent], to, 7), group.recv_anysource([got], 7)]
        for work in works:
            work.wait()

    return call


ENTRIES: dict[str, dict[str, Entry]] = {
    "all_reduce": {
        "dist.all_reduce": _dist("all_reduce", "in", "op"),
        "pg.allreduce(opts)": _pg("allreduce", "AllreduceOptions", "[in]"),
        "pg.allreduce(tensors, op)": _short("allreduce", "ins", "op"),
        "pg.allreduce(tensor, op)": _short("allreduce", "in", "op"),
    },
    "all_reduce_coalesced": {
        "dist.all_reduce_coalesced": _dist("all_reduce_coalesced", "ins", "op"),
        "pg.allreduce_coalesced(opts)": _pg("allreduce_coalesced", "AllreduceCoalescedOptions", "ins"),
    },
    "broadcast": {
        "dist.broadcast": _dist("broadcast", "in", "root"),
        "pg.broadcast(opts)": _pg("broadcast", "BroadcastOptions", "[in]"),
        "pg.broadcast(tensor, root)": _short("broadcast", "in", "root"),
    },
    "reduce": {
        "dist.reduce": _dist("reduce", "in", "root", "op"),
        "pg.reduce(opts)": _pg("reduce", "ReduceOptions", "[in]"),
        "pg.reduce(tensor, root, op)": _short("reduce", "in", "root", "op"),
    },
    "all_gather": {
        "dist.all_gather": _dist("all_gather", "outs", "in"),
        "pg.allgather(opts)": _pg("allgather", "AllgatherOptions", "[outs]", "[in]"),
        "pg.allgather(tensors, tensor)": _short("allgather", "outs", "in"),
    },
    "all_gather_uneven": {"dist.all_gather": _dist("all_gather", "outs", "in")},
    "all_gather_into_tensor": {
        "dist.all_gather_into_tensor": _dist("all_gather_into_tensor", "out", "in"),
        "dist.all_gather_single": _dist("all_gather_single", "out", "in"),
        "dist._all_gather_base": _dist("_all_gather_base", "out", "in"),
        "pg._allgather_base(opts)": _pg("_allgather_base", "AllgatherOptions", "out", "in"),
        "pg.all_gather_single(opts)": _pg("all_gather_single", "AllgatherOptions", "out", "in"),
    },
    "all_gather_into_tensor_coalesced": {
        "pg.allgather_into_tensor_coalesced(opts)": _pg(
            "allgather_into_tensor_coalesced", "AllgatherOptions", "outs", "ins"
        ),
        "pg.all_gather_single_coalesced(opts)": _pg("all_gather_single_coalesced", "AllgatherOptions", "outs", "ins"),
    },
    "all_gather_coalesced": {
        "dist.all_gather_coalesced": _dist("all_gather_coalesced", "outs", "ins"),
        "pg.allgather_coalesced(opts)": _pg("allgather_coalesced", "AllgatherOptions", "outs", "ins"),
    },
    "gather": {
        "dist.gather": _dist("gather", "in", "gathered", "root"),
        "pg.gather(opts)": _pg("gather", "GatherOptions", "[gathered]", "[in]"),
        "pg.gather(tensors, tensor, root)": _short("gather", "outs", "in", "root"),
    },
    "scatter": {
        "dist.scatter": _dist("scatter", "out", "scattered", "root"),
        "pg.scatter(opts)": _pg("scatter", "ScatterOptions", "outs", "[scattered]"),
        "pg.scatter(tensor, tensors, root)": _short("scatter", "out", "ins", "root"),
    },
    "reduce_scatter": {
        "dist.reduce_scatter": _dist("reduce_scatter", "out", "ins", "op"),
        "pg.reduce_scatter(opts)": _pg("reduce_scatter", "ReduceScatterOptions", "outs", "[ins]"),
        "pg.reduce_scatter(tensor, tensors, op)": _short("reduce_scatter", "out", "ins", "op"),
    },
    "reduce_scatter_tensor": {
        "dist.reduce_scatter_tensor": _dist("reduce_scatter_tensor", "out", "in", "op"),
        "dist.reduce_scatter_single": _dist("reduce_scatter_single", "out", "in", "op"),
        "dist._reduce_scatter_base": _dist("_reduce_scatter_base", "out", "in", "op"),
        "pg._reduce_scatter_base(opts)": _pg("_reduce_scatter_base", "ReduceScatterOptions", "out", "in"),
        "pg.reduce_scatter_single(opts)": _pg("reduce_scatter_single", "ReduceScatterOptions", "out", "in"),
    },
    "reduce_scatter_tensor_coalesced": {
        "pg.reduce_scatter_tensor_coalesced(opts)": _pg(
            "reduce_scatter_tensor_coalesced", "ReduceScatterOptions", "outs", "ins"
        ),
        "pg.reduce_scatter_single_coalesced(opts)": _pg(
            "reduce_scatter_single_coalesced", "ReduceScatterOptions", "outs", "ins"
        ),
    },
    "all_to_all": {
        "dist.all_to_all": _dist("all_to_all", "outs", "ins"),
        "pg.alltoall(opts)": _pg("alltoall", "AllToAllOptions", "outs", "ins"),
    },
    "all_to_all_single": {
        "dist.all_to_all_single": _dist("all_to_all_single", "out", "in", "splits", "splits"),
        "pg.alltoall_base(opts)": _pg("alltoall_base", "AllToAllOptions", "out", "in", "splits", "splits"),
        "pg.all_to_all_single(opts)": _pg("all_to_all_single", "AllToAllOptions", "out", "in", "splits", "splits"),
        "pg.alltoall_base(splits)": _short("alltoall_base", "out", "in", "splits", "splits"),
    },
    "messages": {
        "dist.send, dist.recv": _messages("send"),
        "dist.recv from any": _messages("recv_any"),
        "dist.isend, dist.irecv": _messages("isend"),
        "dist.batch_isend_irecv": _messages("batch"),
        "pg.send, pg.recv": _messages("pg"),
        "pg.recv_anysource": _messages("pg_any"),
    },
}

ALWAYS = ("contiguous", "empty", "scalar", "strided", "transposed", "sliced", "requires_grad", "expanded", "conj")
LAYOUTS = {
    "all_reduce_coalesced": (*ALWAYS, *_OF_LISTS),
    "all_gather": (*ALWAYS, "chunks", "columns", "same", "overlapping", "aliased"),
    "gather": (*ALWAYS, "chunks", "columns", "same", "overlapping", "aliased"),
    "scatter": (*ALWAYS, "chunks", "columns", "same", "overlapping", "aliased"),
    "reduce_scatter": (*ALWAYS, "chunks", "columns", "same", "overlapping", "aliased"),
    "all_gather_into_tensor": (*ALWAYS, "stacked", "aliased", "shifted"),
    "reduce_scatter_tensor": (*ALWAYS, "stacked", "aliased", "shifted"),
    "all_to_all_single": (*ALWAYS, "uneven", "aliased", "shifted"),
    "all_to_all": (*ALWAYS, "uneven", "chunks", "columns", "same", "overlapping", "aliased"),
    "all_gather_coalesced": (*ALWAYS, "as many as ranks", "chunks", "columns", "same"),
    "all_gather_into_tensor_coalesced": (*ALWAYS, "same"),
    "reduce_scatter_tensor_coalesced": (*ALWAYS, "same"),
}
# What only some ranks can refuse. In gloo the others wait until their limit.
_REFUSED_BY_SOME = {"gather": ("same", "overlapping", "expanded"), "reduce": ("expanded",), "broadcast": ("expanded",)}


def tensor_cases(size: int) -> list[Case]:
    """Every entry with every layout, sync and async; and one of each kind with every dtype and reduction."""
    made: dict[Case, None] = {}
    for kind, entries in ENTRIES.items():
        roots = (0, size - 1) if kind in ("broadcast", "reduce", "gather", "scatter") else (0,)
        for entry in entries:
            can_be_async = kind != "messages" and not entry.endswith(("op)", "root)", "tensor)", "(splits)"))
            for layout in LAYOUTS.get(kind, ALWAYS):
                dtype = "complex64" if layout == "conj" else "float32"
                for root in roots:
                    if layout in _REFUSED_BY_SOME.get(kind, ()) and (root == 0 or entry != next(iter(entries))):
                        continue  # the others wait until their limit, so one is enough
                    for is_async in (False, True) if can_be_async else (False,):
                        made[Case(kind, entry, layout, dtype, "SUM", root, is_async)] = None
        entry = next(iter(entries))
        for dtype in DTYPES:
            for op in OPS if kind in REDUCING else ("SUM",):
                for layout in ("contiguous", "strided", "sliced"):
                    if layout == "contiguous" or op == "SUM":
                        made[Case(kind, entry, layout, dtype, op, roots[-1])] = None
    return list(made)
