"""The ops of torch.ops.symm_mem under torch.ops.phalanx."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from phalanx import symm_mem
from phalanx.core import InvalidArgumentError
from ranks import run_ranks

ops = torch.ops.phalanx
OURS = [
    "one_shot_all_reduce",
    "one_shot_all_reduce_out",
    "one_shot_all_reduce_copy",
    "one_shot_all_reduce_copy_out",
    "two_shot_all_reduce_",
    "two_shot_all_reduce_out",
    "multimem_all_reduce_",
    "multimem_one_shot_all_reduce",
    "multimem_one_shot_all_reduce_out",
    "multimem_one_shot_reduce_out",
    "multimem_all_gather_out",
    "reduce_scatter_out",
    "tile_reduce",
    "multi_root_tile_reduce",
    "get_remote_tensors",
    "_low_contention_all_gather",
    "_low_contention_reduce_scatter",
    "all_to_all_vdev",
    "all_to_all_vdev_2d",
    "all_to_all_vdev_2d_offset",
    "stream_write_value32_",
    "memset32_",
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "fused_all_gather_scaled_matmul",
    "fused_scaled_matmul_reduce_scatter",
]


def test_the_schemas_are_torchs():
    import torch.distributed._symmetric_memory  # defines some of them

    for name in OURS:
        theirs = str(getattr(torch.ops.symm_mem, name).default._schema)
        assert str(getattr(ops, name).default._schema) == theirs.replace("symm_mem::", "phalanx::")


def symmetric(values):
    return symm_mem.empty(*values.shape, dtype=values.dtype).copy_(values)


def parts_of(size, shape, dtype):
    drawn = [torch.Generator().manual_seed(rank) for rank in range(size)]
    return [torch.randint(-4, 5, shape, generator=each).to(dtype) for each in drawn]


def all_reduces(rank, size, name):
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64):  # M39
        for shape in ((), (1,), (7, 3), (40_000,), (0, 2)):
            parts = parts_of(size, shape, dtype)
            total = torch.stack(parts).sum(0).to(dtype)
            x = symmetric(parts[rank]) if shape else symmetric(parts[rank].view(1)).view(())
            for op in (ops.one_shot_all_reduce, ops.multimem_one_shot_all_reduce):
                assert torch.equal(op(x, "sum", name), total)
            assert torch.equal(x, parts[rank])  # left as it was
            out = torch.empty_like(total)
            assert ops.one_shot_all_reduce_out(x, "SUM", name, out) is out
            assert torch.equal(out, total)
            assert torch.equal(ops.one_shot_all_reduce(x, "max", name), torch.stack(parts).amax(0))
            assert torch.equal(ops.two_shot_all_reduce_out(x, "sum", name, out.zero_()), total)
            assert torch.equal(ops.multimem_one_shot_reduce_out(x, "sum", 1, name, out.zero_()), total * (rank == 1))
            buffer = symm_mem.empty(max(total.numel(), 1) + 5, dtype=dtype)
            assert torch.equal(ops.one_shot_all_reduce_copy(buffer, parts[rank], "sum", name), total)
            assert torch.equal(ops.one_shot_all_reduce_copy_out(buffer, parts[rank], "sum", name, out.zero_()), total)
            strided = torch.empty(*shape, 2, dtype=dtype)[..., 0]
            assert torch.equal(ops.one_shot_all_reduce_out(x, "sum", name, strided), total)
            for op in (ops.two_shot_all_reduce_, ops.multimem_all_reduce_):
                x.copy_(parts[rank])
                assert op(x, "sum", name) is x
                assert torch.equal(x, total)
    whole = symmetric(torch.arange(20.0) + rank)
    view = whole[4:12]  # M18
    expected = torch.stack([torch.arange(20.0)[4:12] + each for each in range(size)]).sum(0)
    assert torch.equal(ops.one_shot_all_reduce(view, "sum", name), expected)
    ops.two_shot_all_reduce_(view, "sum", name)
    assert torch.equal(whole[4:12], expected) and torch.equal(whole[:4], torch.arange(4.0) + rank)


def scatters(rank, size, name):
    for dtype in (torch.float32, torch.bfloat16):
        parts = parts_of(size, (size * 2, size * 3), dtype)
        total = torch.stack(parts).sum(0)
        x = symmetric(parts[rank])
        out = torch.empty(2, size * 3, dtype=dtype)
        assert ops.reduce_scatter_out(x, name, False, out) is out
        assert torch.equal(out, total[2 * rank : 2 * rank + 2])
        out = torch.empty(size * 2, 3, dtype=dtype)
        ops.reduce_scatter_out(x, name, True, out)
        assert torch.equal(out, total[:, 3 * rank : 3 * rank + 3])
        for source in (x, parts[rank]):  # symmetric or not
            assert torch.equal(ops._low_contention_all_gather(source, name), torch.cat(parts))
            got = ops._low_contention_reduce_scatter(source, "sum", name)
            assert torch.equal(got, total[2 * rank : 2 * rank + 2])
        got = ops._low_contention_reduce_scatter(x, "avg", name)
        torch.testing.assert_close(got, (total / size)[2 * rank : 2 * rank + 2])
        gathered = torch.empty(size * size * 2, size * 3, dtype=dtype)
        assert torch.equal(ops.multimem_all_gather_out(x, name, gathered), torch.cat(parts))


def tiles(rank, size, name):
    parts = parts_of(size, (8, 8), torch.float32)
    x = symmetric(parts[rank])
    total = torch.stack(parts).sum(0)
    out = torch.zeros(4, 4)
    ops.tile_reduce(x[2:6, 4:8], out, 1, name)
    assert torch.equal(out, total[2:6, 4:8] * (rank == 1))
    out.zero_()
    roots = [(each + 1) % size for each in range(size)]
    ops.multi_root_tile_reduce([x[:4, each : each + 4] for each in range(size)], out, roots, name)
    mine = roots.index(rank)
    assert torch.equal(out, total[:4, mine : mine + 4])
    remotes = ops.get_remote_tensors(x[::2, 1:3], name)
    handle = symm_mem.rendezvous(x, name)
    handle.barrier()
    assert all(torch.equal(remote, part[::2, 1:3]) for remote, part in zip(remotes, parts, strict=True))
    handle.barrier()
    remotes[(rank + 1) % size].fill_(rank)  # they are the memory, not copies
    handle.barrier()
    assert x[::2, 1:3].eq((rank - 1) % size).all()
    handle.barrier()


def words(rank, size, name):
    x = symm_mem.empty(8, dtype=torch.uint32)
    assert ops.stream_write_value32_(x, 3, 0xFFFFFFFF) is x
    ops.memset32_(x, 5, 7, 2)
    assert x.tolist() == [0, 0, 0, 0xFFFFFFFF, 0, 7, 7, 0]
    with pytest.raises(InvalidArgumentError, match="offset is 7 and count 2, and the tensor has 8 words"):
        ops.memset32_(x, 7, 1, 2)
    with pytest.raises(InvalidArgumentError, match="must fit into 32 bits"):
        ops.stream_write_value32_(x, 0, 1 << 32)
    with pytest.raises(InvalidArgumentError, match="elements of 32 bits"):
        ops.memset32_(torch.zeros(3, dtype=torch.int64), 0, 1, 1)


def refusals(rank, size, name):
    x = symm_mem.empty(4, size * 2)
    for call, text in (
        (lambda: ops.one_shot_all_reduce(torch.ones(3), "sum", name), "ordinary memory"),
        (lambda: ops.one_shot_all_reduce(x, "plus", name), "unknown reduce op 'plus'"),
        (lambda: ops.one_shot_all_reduce(x.t(), "sum", name), "must be contiguous"),
        (lambda: ops.one_shot_all_reduce_out(x, "sum", name, torch.empty(3)), r"must have \[4, "),
        (lambda: ops.one_shot_all_reduce_copy(x, torch.ones(99), "sum", name), "do not fit into a symmetric buffer"),
        (lambda: ops.reduce_scatter_out(x[:, :1], name, True, x), "must be a multiple of the group size"),
        (lambda: ops.tile_reduce(x, x, size, name), f"root is {size}"),
        (lambda: ops.multi_root_tile_reduce([x, x], x, [0, 0], name), "each rank may be there once"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()
    assert torch.equal(ops.one_shot_all_reduce(x.fill_(1), "sum", name), torch.full((4, size * 2), float(size)))


def traced(rank, size, name):
    x = symmetric(torch.arange(8.0) + rank)

    def program(x):
        y = ops.one_shot_all_reduce(x, "sum", name)
        return ops._low_contention_all_gather(y * 2, name) + 1

    expected = program(x)
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    for op, arguments in (  # which take ordinary memory too: opcheck calls them with copies
        (ops._low_contention_all_gather, (torch.ones(3, 2), name)),
        (ops._low_contention_reduce_scatter, (torch.ones(size * 2), "sum", name)),
    ):
        opcheck(op.default, arguments)
    for op, arguments in (  # torch makes no graph without mutations of ops that return their argument
        (ops.memset32_, (torch.zeros(4, dtype=torch.int32), 0, 1, 2)),
        (ops.stream_write_value32_, (torch.zeros(4, dtype=torch.int32), 0, 1)),
    ):
        opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
    wide, out = x.view(2, 4), torch.empty(2, 4)
    gathered = torch.empty(2 * size, 4)
    columns = symm_mem.empty(2, 2 * size)
    for op, arguments in (
        (ops.one_shot_all_reduce, (wide, "sum", name)),
        (ops.one_shot_all_reduce_out, (wide, "sum", name, out)),
        (ops.one_shot_all_reduce_copy, (x, torch.ones(2, 3), "sum", name)),
        (ops.one_shot_all_reduce_copy_out, (x, torch.ones(2, 4), "sum", name, out)),
        (ops.two_shot_all_reduce_, (wide, "sum", name)),
        (ops.two_shot_all_reduce_out, (wide, "sum", name, out)),
        (ops.multimem_all_reduce_, (wide, "sum", name)),
        (ops.multimem_one_shot_all_reduce, (wide, "sum", name)),
        (ops.multimem_one_shot_all_reduce_out, (wide, "sum", name, out)),
        (ops.multimem_one_shot_reduce_out, (wide, "sum", 0, name, out)),
        (ops.multimem_all_gather_out, (wide, name, gathered)),
        (ops.reduce_scatter_out, (columns, name, True, torch.empty(2, 2))),
        (ops.tile_reduce, (wide, out, 0, name)),
        (ops.multi_root_tile_reduce, ([wide], out, [0], name)),
        (ops.get_remote_tensors, (wide, name)),
        (ops._low_contention_all_gather, (wide, name)),
    ):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = op(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        assert described(op(*arguments)) == described(fake), op


def described(result):
    if isinstance(result, (list, tuple)):
        return list(map(described, result))
    return result if result is None else (result.shape, result.stride(), result.dtype)


def everything(rank, size):
    name = dist.group.WORLD.group_name
    for part in (all_reduces, scatters, tiles, words, refusals, traced):
        part(rank, size, name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_they_give_what_one_process_would_compute(ranks):  # M35
    run_ranks(everything, ranks, start_torch=True)
