"""reduce_scatter_offset: blocks that the caller cuts, to the ranks that the caller names."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from phalanx import symm_mem
from phalanx.core import InvalidArgumentError
from phalanx.symm_mem._ops import reduce_scatter_offset
from ranks import run_ranks

op = torch.ops.phalanx.reduce_scatter_offset


def test_the_schema_is_torchs():
    wanted = str(torch.ops.symm_mem.nccl_reduce_scatter_offset.default._schema)
    assert str(op.default._schema) == wanted.replace("symm_mem::nccl_", "phalanx::")


def parts_of(size, shape, dtype):
    drawn = [torch.Generator().manual_seed(rank) for rank in range(size)]
    return [torch.randint(-4, 5, shape, generator=each).to(dtype) for each in drawn]


def blocks_of(total, dim, ends, dst_ranks, rank):
    """What comes to a rank, by one process that has everything."""
    pieces = [total.narrow(dim, begin, end - begin) for begin, end in itertools.pairwise([0, *ends])]
    return [piece for piece, target in zip(pieces, dst_ranks, strict=True) if target == rank]


def check(rank, size, name, x, total, dim, ends, dst_ranks, **named):
    in_full = ends or [(each + 1) * total.shape[dim] // size for each in range(size)]
    ranks = dst_ranks or [each % size for each in range(len(in_full))]
    wanted = blocks_of(total, dim, in_full, ranks, rank)
    out = [torch.full(piece.shape, 77, dtype=total.dtype) for piece in wanted]
    before = x.clone()
    symm_mem.reduce_scatter_offset(x, out, name, dim=dim, offsets=ends, dst_ranks=dst_ranks, **named)
    assert all(torch.equal(got, piece) for got, piece in zip(out, wanted, strict=True))
    assert torch.equal(x, before)


def values(rank, size, name):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):  # M39
        parts = parts_of(size, (4 * size, 6 * size), dtype)
        x = symm_mem.empty(4 * size, 6 * size, dtype=dtype).copy_(parts[rank])
        total = torch.stack(parts).sum(0).to(dtype)
        last = size - 1
        for dim in (0, 1):
            for ends, dst_ranks in (
                (None, None),
                (None, [last - each for each in range(size)]),
                ([1, 3, 4], None),  # of different sizes, and not to the end
                ([2, 2, 4], [0, 0, last]),  # one is empty
                ([3], [last]),  # the others get none
                ([0], None),
            ):
                check(rank, size, name, x, total, dim, ends, dst_ranks)
        check(rank, size, name, x, torch.stack(parts).amax(0), 1, [2, 5], [last, 0], red_op="max")
        view, part = x[1:4, 1::2], [each[1:4, 1::2] for each in parts]  # M18
        check(rank, size, name, view, torch.stack(part).sum(0).to(dtype), 0, [1, 3], [last, 0])
        check(rank, size, dist.group.WORLD, x.t(), total.t(), 0, None, None)
    parts = parts_of(size, (size, 2), torch.float16)
    x = symm_mem.empty(size, 2, dtype=torch.float16).copy_(parts[rank])
    check(rank, size, name, x, (torch.stack(parts).float().sum(0) / size).half(), 0, None, None, red_op="avg")
    symm_mem.reduce_scatter_offset(x, [x[:1]], name, dim=0)  # into the memory that the others read
    assert torch.equal(x[:1], torch.stack(parts).sum(0)[rank : rank + 1])
    symm_mem.rendezvous(x, name).barrier()


def refusals(rank, size, name):
    x = symm_mem.empty(2 * size, 4)
    rows = [torch.empty(2, 4)]
    for arguments, named, text in (
        ((torch.ones(2 * size, 4), rows), {}, "ordinary memory"),
        ((x.view(-1), rows), {}, "needs two dims"),
        ((x, rows), {"dim": 2}, "dim 0 or 1"),
        ((x[:1], rows), {} if size > 1 else {"dim": -1}, "must be a multiple of the group size|dim 0 or 1"),
        ((x, rows), {"offsets": []}, r"offsets is \[\]"),
        ((x, rows), {"offsets": [2, 1]}, "in order"),
        ((x, rows), {"offsets": [-1]}, "in order"),
        ((x, rows), {"offsets": [2 * size + 1]}, f"at most {2 * size}"),
        ((x, rows), {"offsets": [2], "dst_ranks": [0, 1]}, r"dst_ranks is \[0, 1\] for 1 blocks"),
        ((x, rows), {"offsets": [2], "dst_ranks": [size]}, f"give a rank from 0 to {size - 1}"),
        ((x, rows * 2), {}, f"out has 2 tensors, and rank {rank} of group .* receives 1 blocks"),
        ((x, [torch.empty(2, 3)]), {}, r"must have \[2, 4\]"),
        ((x, [torch.empty(2, 4, dtype=torch.int32)]), {}, "of torch.float32"),
        ((x, rows), {"red_op": "plus"}, "unknown reduce op 'plus'"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            symm_mem.reduce_scatter_offset(*arguments, name, **{"dim": 0, **named})
    check(rank, size, name, x.fill_(1), torch.full((2 * size, 4), float(size)), 0, None, None)  # nothing was sent


def traced(rank, size, name):
    x = symm_mem.empty(4, 2 * size).copy_(torch.arange(8.0 * size).view(4, 2 * size) + rank)
    wanted = sum(torch.arange(8.0 * size).view(4, 2 * size) + each for each in range(size))[:, 2 * rank : 2 * rank + 2]

    def program(x):
        out = [torch.zeros(4, 2)]
        op(x, out, name, 1)
        return out[0] * 2

    assert torch.equal(torch.compile(program, fullgraph=True, backend="aot_eager")(x), wanted * 2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        assert op(fake, [mode.from_tensor(torch.zeros(4, 2))], name, 1) is None
        with pytest.raises(InvalidArgumentError, match="out has 0 tensors"):
            op(fake, [], name, 1)


def everything(rank, size):
    reduce_scatter_offset._SLAB_COUNT = 10  # several slabs
    for part in (values, refusals, traced):
        part(rank, size, dist.group.WORLD.group_name)


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_gives_what_one_process_would_compute(ranks):  # M35
    run_ranks(everything, ranks, start_torch=True)
