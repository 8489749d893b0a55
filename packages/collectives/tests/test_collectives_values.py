"""What the collectives compute, against one process and against torch's own."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as reference

import phalanx.collectives as pc
from ranks import run_ranks

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int32, torch.int64]
ALGEBRA = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip


def data(rank, shape, dtype=torch.float32, seed=0):
    """The input of one rank: any rank can make that of any other."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def reduced(inputs, op):
    """In rank order; 16-bit floats in float32, rounded once."""
    dtype = inputs[0].dtype
    wide = [x.float() if dtype in (torch.float16, torch.bfloat16) else x for x in inputs]
    total = wide[0]
    for x in wide[1:]:
        total = ALGEBRA[op](total, x)
    if op == "avg":
        total = total / len(inputs) if dtype.is_floating_point else total.div(len(inputs), rounding_mode="trunc")
    return total.to(dtype)


def same(result, expected):
    assert isinstance(result, torch.Tensor)
    result = pc.wait_tensor(result)
    assert type(result) is torch.Tensor
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert torch.equal(result, expected), f"{result} instead of {expected}"


# ---- F1 to F3, F7, F9: every op, dtype and dim ----------------------------------------------------------------------


def each_op(rank, size):
    group = dist.group.WORLD
    assert pc.enable_group(group)
    for dtype in (*FLOATS, *INTEGERS):
        shape = (size * 2, 3, size)
        inputs = [data(r, shape, dtype) for r in range(size)]
        mine, kept = inputs[rank], inputs[rank].clone()
        for op in (
            "sum",
            "avg",
            "product",
            "min",
            "max",
            *(() if dtype.is_floating_point else ("band", "bor", "bxor")),
        ):
            same(pc.all_reduce(mine, op, group), reduced(inputs, op))  # F1
            for dim in (0, 2, -1):  # F2, F9
                same(pc.reduce_scatter_tensor(mine, op, dim, group), reduced(inputs, op).chunk(size, dim)[rank])
        for dim in (0, 1, 2, -1):  # F3, F9
            gathered = pc.all_gather_tensor(mine, dim, group)
            assert gathered.is_contiguous()
            same(gathered, torch.cat(inputs, dim))
        for sizes in ([3, 0, 1, 2][:size], [1] * size):  # F27: uneven parts, one is empty
            for dim in (0, 1, -1):
                parts = [
                    data(r, (*(2, 3, 4)[:dim], sizes[r], *(2, 3, 4)[dim:][1:]), dtype, seed=2) for r in range(size)
                ]
                gathered = pc.all_gather_v(parts[rank], sizes, dim, group)
                assert gathered.is_contiguous()
                same(gathered, torch.cat(parts, dim))
                wholes = [data(r, torch.cat(parts, dim).shape, dtype, seed=3) for r in range(size)]
                for op in ("sum", "avg", "max"):
                    part = pc.reduce_scatter_v(wholes[rank], op, sizes, dim, group)
                    assert part.is_contiguous()
                    same(part, reduced(wholes, op).split(sizes, dim)[rank])
        for src in range(size):
            same(pc.broadcast(mine, src, group), inputs[src])
        same(pc.all_to_all_single(mine, None, None, group), torch.cat([x.chunk(size)[rank] for x in inputs]))
        for join, split in ((0, 2), (2, 0), (1, -1), (1, 0)):  # F29
            moved = pc.shard_dim_alltoall(mine, join, split, group)
            assert moved.is_contiguous()
            same(moved, torch.cat([x.chunk(size, split)[rank] for x in inputs], join))
        split = [[(i + 2 * j) % 3 for j in range(size)] for i in range(size)]  # rows [from][to]
        rows = [data(r, (sum(split[r]), 2), dtype, seed=1) for r in range(size)]
        received = [split[r][rank] for r in range(size)]
        exchanged = torch.cat([rows[r].split(split[r])[rank] for r in range(size)])
        same(pc.all_to_all_single(rows[rank], received, split[rank], group), exchanged)
        assert torch.equal(mine, kept)  # the input is as it was
        for op in ("sum", "max"):  # F21
            target = mine.clone()
            assert pc.all_reduce_(target, op, group) is target
            same(target, reduced(inputs, op))
        target = mine.clone()
        assert pc.broadcast_(target, size - 1, group) is target
        same(target, inputs[-1])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_op_gives_what_one_process_computes(size):
    run_ranks(each_op, size, start_torch=True, timeout=120)


def along_dims(rank, size):
    """Rows that the core reads and writes where they lie, and shorter ones; small, and of several chunks."""
    group = dist.group.WORLD
    for shape in ((2, 3, 16), (3, 2, 5), (7, 40, 9), (1, 12, 8), (64, 4 * size, 512), (900, 300)):
        for dim in range(-1, len(shape) - 1):
            dims = [data(r, shape, seed=dim) for r in range(size)]
            x = dims[rank]
            same(pc.all_gather_tensor(x, dim, group), torch.cat(dims, dim))
            same(
                pc.all_gather_tensor(x.transpose(0, -1), dim, group), torch.cat([y.transpose(0, -1) for y in dims], dim)
            )
            rows = shape[dim]
            sizes = [rows + 3, 0, *[1] * (size - 2)]
            parts = [
                data(r, [sizes[r] if d == dim % len(shape) else n for d, n in enumerate(shape)]) for r in range(size)
            ]
            whole = torch.cat(parts, dim)
            gathered = pc.all_gather_v(parts[rank], sizes, dim, group)
            assert type(gathered) is pc.AsyncCollectiveTensor
            same(gathered, whole)
            wholes = [data(r, whole.shape, seed=7) for r in range(size)]
            same(
                pc.reduce_scatter_v(wholes[rank], "sum", sizes, dim, group),
                reduced(wholes, "sum").split(sizes, dim)[rank],
            )
            if rows % size == 0:
                same(pc.reduce_scatter_tensor(x, "max", dim, group), reduced(dims, "max").chunk(size, dim)[rank])
        for join, split in itertools.permutations(range(len(shape)), 2):
            inputs = [
                data(r, [n * size if d == split else n for d, n in enumerate(shape)], seed=9) for r in range(size)
            ]
            wanted = torch.cat([y.chunk(size, split)[rank] for y in inputs], join)
            same(pc.shard_dim_alltoall(inputs[rank], join, split, group), wanted)
            lengths, cuts = [shape[join] + r % 2 for r in range(size)], [0, 5, *[2] * (size - 2)]
            inputs = [
                data(r, [lengths[r] if d == join else sum(cuts) if d == split else n for d, n in enumerate(shape)])
                for r in range(size)
            ]
            wanted = torch.cat([y.split(cuts, split)[rank] for y in inputs], join)
            same(pc.shard_dim_alltoall(inputs[rank], join, split, group, "", lengths, cuts), wanted)
    pair = torch.complex(*[data(rank, (3, 8), seed=s) for s in (1, 2)])
    pairs = [torch.complex(*[data(r, (3, 8), seed=s) for s in (1, 2)]) for r in range(size)]
    same(pc.all_gather_tensor(pair, 1, group), torch.cat(pairs, 1))
    same(
        pc.reduce_scatter_v(pair, "sum", [6, 2, *[0] * (size - 2)], 1, group),
        sum(pairs).split([6, 2, *[0] * (size - 2)], 1)[rank],
    )
    mixed = [data(r, (4, 3 * size)) for r in range(size)]  # even parts are one call, whatever the function
    for dim in (0, 1):
        rows = mixed[rank].size(dim)
        by_list = pc.all_gather_v(mixed[rank], [rows] * size, dim, group) if rank else None
        same(pc.all_gather_tensor(mixed[rank], dim, group) if by_list is None else by_list, torch.cat(mixed, dim))
    parts = [3] * size
    by_list = pc.reduce_scatter_v(mixed[rank], "max", parts, 1, group) if rank else None
    found = pc.reduce_scatter_tensor(mixed[rank], "max", 1, group) if by_list is None else by_list
    same(found, reduced(mixed, "max").split(parts, 1)[rank])
    late = pc.all_gather_v(data(rank, (64, 32)), [32] * size, 1, group)  # several in flight
    later = pc.reduce_scatter_v(data(rank, (4, 32 * size)), "sum", [32] * size, 1, group)
    same(later, sum(data(r, (4, 32 * size)) for r in range(size)).split(32, 1)[rank])
    same(late, torch.cat([data(r, (64, 32)) for r in range(size)], 1))


@pytest.mark.parametrize("size", [2, 3])
def test_parts_along_any_dim_are_read_and_written_where_they_lie(size):  # F9, F27, F29
    run_ranks(along_dims, size, start_torch=True, timeout=120)


def odd_shapes(rank, size):
    group = dist.group.WORLD
    for shape in ((), (0,), (0, 3), (size, 0), (size,), (1,), (size * 50_000,)):  # the last one does not fit a slot
        inputs = [data(r, shape, seed=len(shape)) for r in range(size)]
        same(pc.all_reduce(inputs[rank], "sum", group), reduced(inputs, "sum"))
        same(pc.broadcast(inputs[rank], 1, group), inputs[1])
        same(
            pc.all_gather_tensor(inputs[rank], 0, group), torch.cat([x.reshape(x.shape or (1,)) for x in inputs])
        )  # F25
        if shape and shape[0] % size == 0:
            total = reduced(inputs, "sum")
            same(
                pc.reduce_scatter_tensor(inputs[rank], "sum", 0, group),
                total.chunk(size)[rank] if total.numel() else total[: shape[0] // size],
            )
            parts = [x[rank * (shape[0] // size) : (rank + 1) * (shape[0] // size)] for x in inputs]
            same(pc.all_to_all_single(inputs[rank], None, None, group), torch.cat(parts))
    assert pc.all_gather_tensor(torch.tensor(3.0), -1, group).tolist() == [3.0] * size


def test_scalars_empty_and_large_tensors_work():  # F25
    run_ranks(odd_shapes, 2, start_torch=True)


def strided(rank, size):
    group = dist.group.WORLD
    wholes = [data(r, (4, 2 * size, 3)) for r in range(size)]
    for view in (
        lambda x: x.transpose(0, 1),
        lambda x: x[:, ::2],
        lambda x: x[1].expand(size, 2 * size, 3),
        lambda x: x.permute(1, 2, 0),
    ):
        inputs = [view(x) for x in wholes]
        assert not inputs[rank].is_contiguous()
        result = pc.all_reduce(inputs[rank], "sum", group)
        assert result.is_contiguous()  # F7
        same(result, reduced(inputs, "sum"))
        same(pc.all_gather_tensor(inputs[rank], 1, group), torch.cat(inputs, 1))
        for dim, length in enumerate(inputs[0].shape):
            if length % size == 0:
                same(
                    pc.reduce_scatter_tensor(inputs[rank], "sum", dim, group),
                    reduced(inputs, "sum").chunk(size, dim)[rank],
                )
        same(pc.broadcast(inputs[rank], 0, group), inputs[0])
        target = inputs[rank].clone(memory_format=torch.preserve_format)
        same(pc.all_reduce_(target, "max", group), reduced(inputs, "max"))


def test_any_strides_are_right():  # F7
    run_ranks(strided, 2, start_torch=True)


def beside_torch(rank, size):
    group = dist.group.WORLD
    x = data(rank, (2 * size, 3), torch.float64)
    for op in ("sum", "product", "min", "max", "SUM"):
        same(pc.all_reduce(x, op, group), reference.all_reduce(x, op.lower(), group).wait())
        same(pc.reduce_scatter_tensor(x, op, 0, group), reference.reduce_scatter_single(x, op, 0, group).wait())
    same(pc.all_gather_tensor(x, 0, group), reference.all_gather_single(x, 0, group).wait())
    same(pc.broadcast(x, 1, group), reference.broadcast(x, 1, group).wait())
    same(pc.all_to_all_single(x, None, None, group), reference.all_to_all_single(x, None, None, group).wait())
    whole = torch.complex(x, x + 1)
    same(pc.all_reduce(whole, "sum", group), reference.all_reduce(whole, "sum", group).wait())
    lazy = whole.conj()  # a bit, not a copy: the fast path must not take it
    assert lazy.is_conj()
    same(pc.all_reduce(lazy, "sum", group), pc.wait_tensor(pc.all_reduce(whole, "sum", group)).conj().resolve_conj())
    same(
        pc.all_gather_tensor(lazy.imag, 0, group), reference.all_gather_single(lazy.imag.contiguous(), 0, group).wait()
    )
    with torch.inference_mode():
        assert torch.equal(pc.all_reduce(x, "max", group) + 0, reference.all_reduce(x, "max", group) + 0)


def test_results_equal_those_of_torch():
    run_ranks(beside_torch, 2, start_torch=True)


def input_changes(rank, size):
    group = dist.group.WORLD
    core = pc.core_group(group)
    for count in (2, 1000, 200_000):
        inputs = [data(r, (count,)) for r in range(size)]
        for call, expected in (
            (lambda x: pc.all_reduce(x, "sum", group), reduced(inputs, "sum")),
            (lambda x: pc.all_gather_tensor(x, 0, group), torch.cat(inputs)),
            (lambda x: pc.broadcast(x, 0, group), inputs[0]),
        ):
            x = inputs[rank].clone()
            result = call(x)
            x.fill_(float("nan"))
            core.barrier()  # nobody waits before all have changed their input
            same(result, expected)


def test_the_input_may_change_when_the_call_has_returned():
    run_ranks(input_changes, 2, start_torch=True)


def chained(rank, size):
    group = dist.group.WORLD
    x = torch.full((10,), float(rank))
    total = float(sum(range(size)))
    for _ in range(4):
        x = pc.all_reduce(x, "sum", group)  # a pending tensor as input
    same(x, torch.full((10,), total * size**3))
    results = [pc.all_reduce(torch.full((3,), float(rank + i)), "sum", group) for i in range(20)]  # F5: all pending
    for i, result in reversed(list(enumerate(results))):
        same(result, torch.full((3,), total + size * i))
        same(result, torch.full((3,), total + size * i))  # F4: again


def test_results_may_be_waited_for_in_any_order_and_used_as_inputs():  # F4, F5
    run_ranks(chained, 3, start_torch=True)
