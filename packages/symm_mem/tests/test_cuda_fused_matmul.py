"""Matrix products fused with a collective, on GPUs."""

import pytest
import torch
from cuda_ranks import WAYS, on_cuda, run_cuda_ranks

from phalanx import symm_mem
from phalanx.core import UnsupportedError
from phalanx.symm_mem._ops import fused_matmul_cuda

ops = torch.ops.phalanx
ways = pytest.mark.parametrize("way", WAYS)
cut = pytest.mark.parametrize("rows", [0, 1 << 60], ids=["cut", "whole"])


def parts_of(size, shape, dtype, seed=0):
    drawn = [torch.Generator().manual_seed(seed + rank) for rank in range(size)]
    return [torch.randint(-4, 5, shape, generator=each).to(dtype) for each in drawn]


@on_cuda
def gathers(rank, size, name, rows):
    fused_matmul_cuda._ROWS = rows  # how few are cut
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((4, 6), (2, 3, 6), (1, 0, 6)):
            for dim in range(-len(shape), len(shape)):
                parts = parts_of(size, shape, dtype)
                whole = torch.cat(parts, dim)
                bs = [parts_of(1, (whole.shape[-1], n), dtype, n)[0] for n in (5, 1)]
                mine = parts[rank].to("cuda")
                symmetric = symm_mem.empty(*shape, dtype=dtype, device="cuda").copy_(mine)
                for a in (mine, symmetric, mine.transpose(0, 1).contiguous().transpose(0, 1)):
                    gathered, products = ops.fused_all_gather_matmul(a, [b.to("cuda") for b in bs], dim, name)
                    assert torch.equal(gathered.cpu(), whole)
                    for product, b in zip(products, bs, strict=True):
                        torch.testing.assert_close(product.cpu(), whole @ b)
                nothing, (again,) = ops.fused_all_gather_matmul(
                    symmetric, [bs[0].to("cuda")], dim, name, return_A=False
                )
                assert nothing is None
                symmetric.fill_(9)  # the caller's again
                torch.testing.assert_close(again.cpu(), whole @ bs[0])
    symm_mem.get_symm_mem_workspace(name, 1, "cuda").symm.barrier()


@ways
@cut
def test_all_gather_then_matmul(way, rows):
    run_cuda_ranks(gathers, 3 if rows == 0 else 2, way, rows, timeout=120)


@on_cuda
def scatters(rank, size, name, rows):
    fused_matmul_cuda._ROWS = rows
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((size * 2, 6), (size, size, 6), (0, size, 6)):
            for dim in range(-len(shape), len(shape)):
                parts = parts_of(size, shape, dtype)
                b = parts_of(1, (6, size * 3), dtype, 9)[0]
                total = torch.stack([part.double() @ b.double() for part in parts]).sum(0)
                wanted = total.tensor_split(size, dim)[rank].to(dtype)
                mine, on_gpu = parts[rank].to("cuda"), b.to("cuda")
                for a in (mine, mine.transpose(0, 1).contiguous().transpose(0, 1)):
                    got = ops.fused_matmul_reduce_scatter(a, on_gpu, "sum", dim, name)
                    torch.testing.assert_close(got.cpu(), wanted)
                got = ops.fused_matmul_reduce_scatter(mine, on_gpu, "avg", dim, name)
                torch.testing.assert_close(got.cpu(), (total / size).tensor_split(size, dim)[rank].to(dtype))
    parts = [torch.full((2 * size, 6), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)[:size]]
    eye = torch.eye(6, dtype=torch.bfloat16, device="cuda")
    wanted = torch.stack(parts).float().sum(0).bfloat16()[:2]  # M39: added up in float32, rounded once
    assert torch.equal(ops.fused_matmul_reduce_scatter(parts[rank].to("cuda"), eye, "sum", 0, name).cpu(), wanted)
    symm_mem.get_symm_mem_workspace(name, 1, "cuda").symm.barrier()


@ways
@cut
def test_matmul_then_reduce_scatter(way, rows):  # M34 M39
    run_cuda_ranks(scatters, 3 if rows == 0 else 2, way, rows, timeout=120)


@on_cuda
def replays(rank, size, name, rows):
    fused_matmul_cuda._ROWS = rows
    a, b = torch.zeros(2 * size, 4, device="cuda"), torch.eye(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        if rows == 0:
            with pytest.raises(UnsupportedError, match="a stream is being captured"), torch.cuda.graph(graph):
                ops.fused_matmul_reduce_scatter(a, b, "sum", 0, name)  # whose workspace is to be made
        ops.fused_matmul_reduce_scatter(a, b, "sum", 0, name)
        ops.fused_all_gather_matmul(a, [b], 0, name)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            a.add_(rank + 1)
            _, (gathered,) = ops.fused_all_gather_matmul(a, [b], 0, name)
            summed = ops.fused_matmul_reduce_scatter(a, b, "sum", 0, name)
        for turn in range(1, 6):
            graph.replay()
            torch.cuda.synchronize()
            each = [turn * (one + 1.0) for one in range(size)]
            assert summed.unique().tolist() == [sum(each)]
            assert gathered[:: 2 * size, 0].tolist() == each
    symm_mem.get_symm_mem_workspace(name, 1, "cuda").symm.barrier()


@cut
def test_they_are_captured_and_replayed(rows):
    run_cuda_ranks(replays, 2, "processes", rows)


@on_cuda
def scaled(rank, size, name):
    a_parts = [torch.ones(16, 32).mul(each + 1).to(torch.float8_e4m3fn) for each in range(size)]
    b = torch.eye(32).to(torch.float8_e4m3fn).t()
    one = torch.tensor(2.0)
    rest = ([None], [None], [torch.bfloat16], [False])
    whole, (product,) = ops.fused_all_gather_scaled_matmul(
        a_parts[rank].to("cuda"), [b.to("cuda")], one.to("cuda"), [one.to("cuda")], 0, name, *rest
    )
    gathered = torch.cat([part.float() for part in a_parts])
    assert torch.equal(whole.float().cpu(), gathered)
    torch.testing.assert_close(product.float().cpu(), gathered * 4)
    got = ops.fused_scaled_matmul_reduce_scatter(
        a_parts[rank].to("cuda"), b.to("cuda"), one.to("cuda"), one.to("cuda"), "sum", 0, 0, name, [16, 32],
        out_dtype=torch.bfloat16,
    )  # fmt: skip
    wanted = sum(part.float() for part in a_parts)[: 16 // size] * 4
    torch.testing.assert_close(got.float().cpu(), wanted)
    symm_mem.get_symm_mem_workspace(name, 1, "cuda").symm.barrier()


@ways
def test_products_of_scaled_matrices(way):
    run_cuda_ranks(scaled, 2, way)
