"""The matrix products that are fused with a collective, and the workspace that they use."""

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck

from phalanx import symm_mem
from phalanx.core import InvalidArgumentError, MismatchError, RevokedError
from phalanx.symm_mem._ops import unfused
from ranks import run_ranks

ops = torch.ops.phalanx


def parts_of(size, shape, dtype, seed=0):
    drawn = [torch.Generator().manual_seed(seed + rank) for rank in range(size)]
    return [torch.randint(-4, 5, shape, generator=each).to(dtype) for each in drawn]


WAYS = {  # from how many bytes on the core sums from symmetric memory, and memory is kept for the next call
    "whole": (1 << 10, 1 << 60),
    "whole, in memory used before": (0, 0),
}


def choose(way):
    """Make products of a few rows go the way of large ones."""
    unfused._FRESH_BYTES, unfused._SMALL_BYTES = WAYS[way]


def gathers(rank, size, name):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for shape in ((4, 6), (2, 3, 6), (1, 0, 6), (64, 128), (8, 8, 128)):  # the last two are whole pages
            for dim in range(-len(shape), len(shape)):
                parts = parts_of(size, shape, dtype)
                whole = torch.cat(parts, dim)
                bs = [parts_of(1, (whole.shape[-1], n), dtype, n)[0] for n in (5, 1)]
                symmetric = symm_mem.empty(*shape, dtype=dtype).copy_(parts[rank])
                for a in (parts[rank], symmetric, parts[rank].transpose(0, 1).contiguous().transpose(0, 1)):
                    gathered, products = ops.fused_all_gather_matmul(a, bs, dim, name)
                    assert torch.equal(gathered, whole)
                    nothing, again = ops.fused_all_gather_matmul(a, bs, dim, name, return_A=False)
                    assert nothing is None
                    for product, b in zip([*products, *again], [*bs, *bs], strict=True):
                        torch.testing.assert_close(product, whole @ b)


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


def turns(rank, size, name):
    """Nobody waits at the end of a call, and what is read late is still there: new values in each of many calls."""
    b = parts_of(1, (6, 3 * size), torch.float32, 5)[0]
    symmetric = symm_mem.empty(2 * size, 6)
    for turn in range(60):
        rows = 2 * size * (1 + turn % 3)
        parts = parts_of(size, (rows, 6), torch.float32, turn * size)
        a = parts[rank]
        if turn % 3 == 0:
            a = symmetric.copy_(a)  # which is the caller's again as soon as the call is done
        _, (product,) = ops.fused_all_gather_matmul(a, [b], 0, name, return_A=False)
        symmetric.fill_(-1)
        assert torch.equal(product, torch.cat(parts) @ b)
        if turn % 5 == 0:
            rows *= 4000  # more than there was, so it grows
            parts = [part.repeat(4000, 1) for part in parts]
        got = ops.fused_matmul_reduce_scatter(parts[rank], b, "sum", 0, name)
        assert torch.equal(got, (torch.stack(parts).sum(0) @ b).tensor_split(size)[rank])
        for _ in range(rank * (turn % 4)):
            torch.mm(product, product.t())  # ranks come at different times


def rounding(rank, size, name):
    """Ranks are added in their order, in float32, with one rounding, whichever way it goes."""  # M39
    b = torch.eye(6, dtype=torch.bfloat16)
    parts = [torch.full((2 * size, 6), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)[:size]]
    wide = torch.stack(parts).float().sum(0)
    for op, wanted in (("sum", wide), ("avg", wide / size)):
        got = ops.fused_matmul_reduce_scatter(parts[rank], b, op, 0, name)
        assert torch.equal(got, wanted.bfloat16()[:2])


def refusals(rank, size, name):
    a, b = torch.ones(size, 4), torch.ones(4, 3)
    for call, text in (
        (lambda: ops.fused_all_gather_matmul(a, [torch.ones(5, 2)], 0, name), "with 4 rows"),
        (lambda: ops.fused_all_gather_matmul(a, [b.double()], 0, name), "of the same dtype"),
        (lambda: ops.fused_all_gather_matmul(a, [b], 2, name), "gather_dim is 2"),
        (lambda: ops.fused_matmul_reduce_scatter(a, b, "max", 0, name), "unknown reduce op 'max'; expected sum or avg"),
        (
            lambda: ops.fused_matmul_reduce_scatter(torch.ones(size + 1, 4), b, "sum", 0, name),
            "not divisible by the group size",
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


def parameters(rank, size, name):
    """Tensors that require a gradient are multiplied like others, whichever way it goes."""
    a, b = torch.ones(2 * size, 6, requires_grad=True), torch.ones(6, 2, requires_grad=True)
    for way in WAYS:
        choose(way)
        _, (product,) = ops.fused_all_gather_matmul(a, [b], 0, name, return_A=False)
        assert torch.equal(product.detach(), torch.full((2 * size * size, 2), 6.0))
        got = ops.fused_matmul_reduce_scatter(a, b, "sum", 0, name)
        assert torch.equal(got.detach(), torch.full((2, 2), 6.0 * size))


SHAPES = (  # of A on even and on odd ranks, and whether the group is of use after it
    ((4, 6), (5, 6), False),
    ((64, 128), (32, 128), False),
    ((64, 128), (5, 6), False),
    ((64, 128), (4096, 512), True),  # all hear of it before memory is made
)


def products_of(shape, group, a=None):
    a = torch.ones(shape) if a is None else a
    return ops.fused_all_gather_matmul(a, [torch.ones(a.shape[1], 2)], 0, group, return_A=False)


def disagreements(rank, size, name):
    """Which names both calls on every rank; where the ranks are out of step after it, nothing is guessed."""
    for *shapes, usable in SHAPES:
        group = dist.new_group(range(size)).group_name
        with pytest.raises(MismatchError, match=r"while rank . called|different sizes of plan .the staging"):
            products_of(shapes[rank % 2], group)
        if usable:
            assert products_of((64, 128), group)[1][0].eq(128).all()
            continue
        with pytest.raises((MismatchError, RevokedError)):
            products_of((4, 6), group)
        with pytest.raises(RevokedError):
            ops.fused_matmul_reduce_scatter(torch.ones(4 * size, 6), torch.ones(6, 2), "sum", 0, group)


def one_is_symmetric(rank, size, name):
    group = dist.new_group(range(size)).group_name
    symmetric = symm_mem.empty(64, 128).fill_(1)
    symm_mem.rendezvous(symmetric, group)
    assert products_of((64, 128), group)[1][0].eq(128).all()
    with pytest.raises(MismatchError, match="while rank . called"):
        products_of((64, 128), group, symmetric if rank == 0 else None)


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
    for way in WAYS:
        choose(way)
        for part in (gathers, scatters, turns, rounding):
            part(rank, size, name)
    for part in (refusals, workspaces, traced, parameters, disagreements, one_is_symmetric):
        part(rank, size, name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_they_give_what_the_pair_would_give(ranks):  # M35
    run_ranks(everything, ranks, start_torch=True)
