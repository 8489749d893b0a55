"""The matrix products that are fused with a collective, and the workspace that they use."""

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck

from phalanx import symm_mem
from phalanx.core import InvalidArgumentError
from ranks import run_ranks

ops = torch.ops.phalanx


def parts_of(size, shape, dtype, seed=0):
    drawn = [torch.Generator().manual_seed(seed + rank) for rank in range(size)]
    return [torch.randint(-4, 5, shape, generator=each).to(dtype) for each in drawn]


def gathers(rank, size, name):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for shape in ((4, 6), (2, 3, 6), (1, 0, 6)):
            for dim in range(-len(shape), len(shape)):
                parts = parts_of(size, shape, dtype)
                whole = torch.cat(parts, dim)
                bs = [parts_of(1, (whole.shape[-1], n), dtype, n)[0] for n in (5, 1)]
                symmetric = symm_mem.empty(*shape, dtype=dtype).copy_(parts[rank])
                for a in (parts[rank], symmetric, parts[rank].transpose(0, 1).contiguous().transpose(0, 1)):
                    gathered, products = ops.fused_all_gather_matmul(a, bs, dim, name)
                    assert torch.equal(gathered, whole)
                    for product, b in zip(products, bs, strict=True):
                        torch.testing.assert_close(product, whole @ b)
    nothing, (product,) = ops.fused_all_gather_matmul(torch.ones(2, 3), [torch.ones(3, 4)], 0, name, return_A=False)
    assert nothing is None and torch.equal(product, torch.full((2 * size, 4), 3.0))


def scatters(rank, size, name):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for shape in ((size * 2, 6), (size, size, 6), (0, size, 6)):
            for dim in range(-len(shape), len(shape)):
                parts = parts_of(size, shape, dtype)
                b = parts_of(1, (6, size * 3), dtype, 9)[0]
                total = torch.stack([part.double() @ b.double() for part in parts]).sum(0)
                wanted = total.tensor_split(size, dim)[rank].to(dtype)
                for a in (parts[rank], parts[rank].transpose(0, 1).contiguous().transpose(0, 1)):
                    torch.testing.assert_close(ops.fused_matmul_reduce_scatter(a, b, "sum", dim, name), wanted)
                got = ops.fused_matmul_reduce_scatter(parts[rank], b, "avg", dim, name)
                torch.testing.assert_close(got, (total / size).tensor_split(size, dim)[rank].to(dtype))


def refusals(rank, size, name):
    a, b = torch.ones(size, 4), torch.ones(4, 3)
    for call, text in (
        (lambda: ops.fused_all_gather_matmul(a, [torch.ones(5, 2)], 0, name), "with 4 rows"),
        (lambda: ops.fused_all_gather_matmul(a, [b.double()], 0, name), "of the same dtype"),
        (lambda: ops.fused_all_gather_matmul(a, [b], 2, name), "along dim 2"),
        (lambda: ops.fused_matmul_reduce_scatter(a, b, "max", 0, name), "Invalid reduce operation max"),
        (
            lambda: ops.fused_matmul_reduce_scatter(torch.ones(size + 1, 4), b, "sum", 0, name),
            "multiple of the group size",
        ),
        (lambda: symm_mem.get_symm_mem_workspace(name, -1), "min_size is -1"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()


def workspaces(rank, size, name):  # M34
    first = symm_mem.get_symm_mem_workspace(name, 1)
    assert symm_mem.get_symm_mem_workspace(name, first.buffer_size) is first
    larger = symm_mem.get_symm_mem_workspace(name, first.buffer_size + 1)
    assert larger.buffer_size > first.buffer_size and symm_mem.get_symm_mem_workspace(name, 1) is larger
    first.get_buffer((rank + 1) % size, (4,), torch.int32).fill_(rank)  # it is still there
    first.barrier()
    assert first.get_buffer(rank, (4,), torch.int32).eq((rank - 1) % size).all()
    del first, larger


def traced(rank, size, name):
    a, b, c = torch.randn(2 * size, 6), torch.randn(6, 8), torch.randn(8, 6)

    def program(a, b, c):
        whole, (y,) = ops.fused_all_gather_matmul(a, [b], 0, name)
        return ops.fused_matmul_reduce_scatter(y.relu(), c, "sum", 0, name) + whole[: len(a)]

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(a, b, c), program(a, b, c))
    opcheck(ops.fused_all_gather_matmul.default, (a, [b], 0, name))
    opcheck(ops.fused_matmul_reduce_scatter.default, (a, b, "sum", 0, name))


def everything(rank, size):
    name = dist.group.WORLD.group_name
    for part in (gathers, scatters, refusals, workspaces, traced):
        part(rank, size, name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_they_give_what_the_pair_would_give(ranks):
    run_ranks(everything, ranks, start_torch=True)
