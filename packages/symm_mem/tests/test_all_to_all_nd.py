"""Blocks of rows and columns of a symmetric matrix, by a rank that reads the others, and sums of what ranks gave."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from phalanx import symm_mem
from phalanx.core import FileStore, InvalidArgumentError, MemoryStore
from ranks import run_ranks, scratch


def matrix(rank, shape, dtype):
    return torch.arange(shape[0] * shape[1]).view(shape).add(1000 * rank).remainder(251).to(dtype)


def exchanges(rank, size):
    symm_mem.set_group_info("tp", rank, size, FileStore(scratch() / "store"))
    rows, columns = 4, 5
    for dtype in (torch.float32, torch.int8, torch.complex64):
        # Columns to the ranks, rows along the first dim; then back.
        shape = (rows, size * columns)
        mine = [matrix(each, shape, dtype).view(rows, size, columns)[:, rank] for each in range(size)]
        tensor = symm_mem.empty(*shape, dtype=dtype).copy_(matrix(rank, shape, dtype))
        flat = torch.empty(size * rows, columns, dtype=dtype)
        symm_mem.all_to_all_nd(tensor, flat, 1, 0, group="tp")
        assert torch.equal(flat, torch.cat(mine))
        parted = torch.empty(size, rows, columns, dtype=dtype)
        symm_mem.all_to_all_nd(tensor.view(rows, size, columns), parted, 1, 0, group="tp")
        assert torch.equal(parted, torch.stack(mine))
        there = symm_mem.empty(size * rows, columns, dtype=dtype).copy_(flat)
        back = torch.empty(shape, dtype=dtype)
        symm_mem.all_to_all_nd(there, back, 0, 1, group="tp")
        assert torch.equal(back, tensor)
        back = torch.empty(rows, size, columns, dtype=dtype)
        symm_mem.all_to_all_nd(there.view(size, rows, columns), back, 0, 1, group="tp")
        assert torch.equal(back.view(shape), tensor)
    # A matrix with other strides, in the memory of another tensor, and no elements at all.
    wide = symm_mem.empty(size * columns, 2 * rows)
    turned = wide[:, ::2].t()
    turned.copy_(matrix(rank, (rows, size * columns), torch.float32))
    flat = torch.empty(size * rows, columns)
    symm_mem.all_to_all_nd(turned, flat, 1, 0, group="tp")
    every = [matrix(each, (rows, size * columns), torch.float32) for each in range(size)]
    assert torch.equal(flat, torch.cat([each[:, rank * columns : (rank + 1) * columns] for each in every]))
    symm_mem.all_to_all_nd(wide[:0, :size], torch.empty(0, 1), 1, 0, group="tp")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_blocks_come_from_all_ranks_in_order(size):  # M40
    run_ranks(exchanges, size)


def test_what_does_not_fit_is_refused():  # M40
    with symm_mem.rank_context():
        symm_mem.set_group_info("tp", 0, 2, MemoryStore())
        tensor = symm_mem.empty(4, 6)
        for out, dims, text in (
            (torch.empty(8, 3), (1, 1), "give 1 and 0, or 0 and 1"),
            (torch.empty(8, 3), (-1, 0), "give 1 and 0, or 0 and 1"),
            (torch.empty(4, 6), (1, 0), r"it must have \[8, 3\]"),
            (torch.empty(4, 2, 3), (1, 0), r"it must have \[2, 4, 3\]"),
            (torch.empty(8, 3, dtype=torch.int32), (1, 0), "of torch.float32"),
            (torch.empty(3, 8).t(), (1, 0), "out must be contiguous"),
            (tensor.view(8, 3), (1, 0), "in the memory of the input"),
        ):
            with pytest.raises(InvalidArgumentError, match=text):
                symm_mem.all_to_all_nd(tensor, out, *dims, group="tp")
        for given in (tensor[:, :5], tensor.view(-1), tensor.view(2, 3, 4)):
            with pytest.raises(InvalidArgumentError, match="the input is"):
                symm_mem.all_to_all_nd(given, torch.empty(8, 3), 1, 0, group="tp")
        with pytest.raises(InvalidArgumentError, match="ordinary memory"):
            symm_mem.all_to_all_nd(torch.empty(4, 6), torch.empty(8, 3), 1, 0, group="tp")
        with FakeTensorMode():
            op = torch.ops.phalanx.all_to_all_nd
            assert op(torch.empty(4, 6), torch.empty(8, 3), 1, 0, "tp") is None
            with pytest.raises(InvalidArgumentError, match="it must have"):
                op(torch.empty(4, 6), torch.empty(8, 4), 1, 0, "tp")


def test_partials_are_added_as_the_core_adds_them():  # M40
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        partials = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        for dim, count in ((0, 3), (1, 5), (-1, 7)):
            for op in ("sum", "avg"):
                got = symm_mem.reduce_partials(partials, dim=dim, reduce_op=op, output_dtype=dtype, group_size=count)
                parts = partials.unbind(dim)
                wanted = parts[0].to(wide)
                for each in parts[1:]:  # in order, and rounded once
                    wanted = wanted + each.to(wide)
                if op == "avg":
                    wanted = wanted / count
                assert got.dtype is dtype and torch.equal(got, wanted.to(dtype))
    whole = symm_mem.reduce_partials(
        torch.tensor([[1, 5], [3, 2]]), dim=0, reduce_op="max", output_dtype=torch.float32, group_size=2
    )
    assert whole.tolist() == [3, 5] and whole.dtype is torch.float32
    with pytest.raises(InvalidArgumentError, match="must be the group size, 3"):
        symm_mem.reduce_partials(torch.ones(2, 2), dim=0, reduce_op="sum", output_dtype=torch.float32, group_size=3)
    with pytest.raises(InvalidArgumentError, match="unknown reduce op"):
        symm_mem.reduce_partials(torch.ones(2, 2), dim=0, reduce_op="mean", output_dtype=torch.float32, group_size=2)
