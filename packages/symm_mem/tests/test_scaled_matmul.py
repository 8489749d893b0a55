"""Products of scaled float8 matrices with a collective, beside what a single process computes in float32."""

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck

from phalanx import symm_mem
from phalanx.core import InvalidArgumentError
from phalanx.symm_mem import _torch_compat
from ranks import run_ranks

ops = torch.ops.phalanx
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
CLOSE = {"rtol": 1e-2, "atol": 1e-2}  # bfloat16 results


def drawn(shape, seed):
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def scales(shape, seed):
    """Powers of two, so that sums are exact in float32."""
    return 2.0 ** torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed))


def scattered_scale(scale, dim, rank, size):
    return scale.tensor_split(size, dim)[rank].contiguous()


def gathers(rank, size, name):
    for shape, dims in (((4, 16), (0, -2)), ((2, 3, 16), (0, 1)), ((0, 16), (0,))):
        for dim in dims:
            parts = [drawn(shape, each) for each in range(size)]
            whole = torch.cat(parts, dim)
            b, c = drawn((16, 8), 70), drawn((16, 24), 71)
            bs = [b.to(E4), c.t().contiguous().t().to(E5)]
            b_scale, c_scale = scales((1, 8), 72), scales((1, 24), 73)
            bias = drawn((8,), 74)
            by_row = scales((*whole.shape[:-1], 1), 75)
            mine = scattered_scale(by_row, dim % len(shape), rank, size)
            for a_scale in (mine, by_row):  # of this rank's rows, or of all
                gathered, products = ops.fused_all_gather_scaled_matmul(
                    parts[rank].to(E4), bs, a_scale, [b_scale, c_scale], dim, name,
                    [bias, None], [None, None], [torch.float32, torch.bfloat16], [False, True],
                )  # fmt: skip
                assert gathered.dtype == E4 and torch.equal(gathered.float(), whole)
                assert products[0].dtype == torch.float32 and products[1].dtype == torch.bfloat16
                assert torch.equal(products[0], (whole * by_row) @ (b * b_scale) + bias)
                torch.testing.assert_close(products[1].float(), (whole * by_row) @ (c * c_scale), **CLOSE)
    # One scale for the whole tensor, which may be symmetric, along any dim, and a result in float8.
    parts = [drawn((4, 16), each) for each in range(size)]
    a = symm_mem.empty(4, 16, dtype=E4).copy_(parts[rank])
    two, half = torch.tensor(2.0), torch.tensor([[0.5]])
    for dim in (0, 1):
        whole = torch.cat(parts, dim)
        b = drawn((whole.shape[1], 8), 76)
        gathered, (exact, narrow) = ops.fused_all_gather_scaled_matmul(
            a, [b.to(E4), b.to(E4)], two, [half, half], dim, name,
            [None, None], [None, two], [torch.float32, None], [False, False],
        )  # fmt: skip
        assert torch.equal(gathered.float(), whole) and torch.equal(exact, whole @ b)
        alone = _torch_compat.scaled_mm(whole.to(E4), b.to(E4), two, half.view(()), None, two, None, False)
        assert narrow.dtype == E4 and torch.equal(narrow.float(), alone.float())


def scatters(rank, size, name):
    b, b_scale = drawn((16, 4 * size), 80), scales((1, 4 * size), 81)
    for shape, output_shape, dims in (
        ((size * 2, 16), None, (0, 1)),
        ((size * 2, 16), [2, size, 4 * size], (1,)),  # A was reshaped before
        ((size, 3, 16), None, (0, 2)),
        ((size * 500, 16), None, (0, 1)),  # through symmetric memory
        ((0, 16), None, (0,)),
    ):
        parts = [drawn(shape, each) for each in range(size)]
        by_row = [scales((*shape[:-1], 1), 82 + each) for each in range(size)]
        for dim in dims:
            for rows in (True, False):
                a_scale = by_row[rank] if rows else torch.tensor(0.5)
                scale = b_scale if rows else torch.tensor(4.0)
                products = [
                    (part * (each if rows else 0.5)) @ (b * scale) for part, each in zip(parts, by_row, strict=True)
                ]
                total = torch.stack(products).sum(0).reshape(output_shape or products[0].shape)
                for op, wanted in (("sum", total), ("avg", total / size)):
                    got = ops.fused_scaled_matmul_reduce_scatter(
                        parts[rank].to(E4), b.to(E5), a_scale, scale, op, dim, min(dim, 1), name, output_shape,
                        out_dtype=torch.float32,
                    )  # fmt: skip
                    torch.testing.assert_close(got, wanted.tensor_split(size, dim)[rank])
    a = drawn((size * 2, 16), rank).to(E4)
    one, bias = torch.ones(()), torch.arange(4.0 * size)
    got = ops.fused_scaled_matmul_reduce_scatter(
        a, b.to(E4), one, one, "sum", 0, 0, name, None, bias=bias, out_dtype=torch.bfloat16
    )
    total = torch.stack([drawn((size * 2, 16), each) @ b + bias for each in range(size)]).sum(0)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), total[2 * rank : 2 * rank + 2], rtol=2e-2, atol=2.0)


def refusals(rank, size, name):
    a, b, one = torch.ones(size, 16).to(E4), torch.ones(16, 8).to(E4), torch.ones(())
    nothing = ([None], [None], [None], [False])

    def gather(a=a, b=b, a_scale=one, b_scale=one, dim=0, rest=nothing):
        return ops.fused_all_gather_scaled_matmul(a, [b], a_scale, [b_scale], dim, name, *rest)

    def scatter(a=a, b=b, a_scale=one, b_scale=one, op="sum", dims=(0, 0), shape=None, **rest):
        return ops.fused_scaled_matmul_reduce_scatter(a, b, a_scale, b_scale, op, *dims, name, shape, **rest)

    for call, text in (
        (lambda: gather(a=a.float()), "must be of float8_e4m3fn"),
        (lambda: gather(b=b[:8]), "a matrix with 16 rows"),
        (lambda: gather(a_scale=torch.ones(5, 1)), "the scale of A has shape"),
        (lambda: gather(a_scale=one.double()), "scales are of torch.float32"),
        (lambda: gather(a_scale=torch.ones(size, 1)), r"the scale of B has shape \[\]; it must have \[1, 8\]"),
        (lambda: gather(b_scale=torch.ones(1, 8)), "one element, as A has one scale"),
        (lambda: gather(dim=2), "gather_dim is 2"),
        (lambda: gather(rest=([torch.ones(3)], *nothing[1:])), "the bias is"),
        (lambda: gather(rest=([], *nothing[1:])), "0 biases"),
        (lambda: gather(rest=([None], [torch.ones(2)], [None], [False])), "the result scale is"),
        (lambda: gather(rest=([None], [None], [torch.int32], [False])), "scalar type"),
        (lambda: scatter(op="max"), "unknown reduce op 'max'; expected sum or avg"),
        (lambda: scatter(a=torch.ones(size + 1, 16).to(E4)), "multiple of the group size"),
        (lambda: scatter(a_scale=torch.ones(size)), "the scale of A is"),
        (lambda: scatter(dims=(2, 0)), "orig_scatter_dim is 2"),
        (lambda: scatter(dims=(0, 2)), "scatter_dim_after_maybe_reshape is 2"),
        (lambda: scatter(shape=[size, 9]), "output_shape is"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()


def traced(rank, size, name):
    a, b = drawn((2 * size, 16), rank).to(E4), drawn((16, 8), 9).to(E4)
    c, one = drawn((16, 8), 10).to(E4), torch.ones(())

    def program(a, b, c):
        whole, (y,) = ops.fused_all_gather_scaled_matmul(
            a, [b], one, [one], 0, name, [None], [None], [torch.float32], [False]
        )
        z = ops.fused_scaled_matmul_reduce_scatter(whole, c, one, one, "sum", 0, 0, name, None, out_dtype=torch.float32)
        return y[: 2 * size].relu() + z

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b, c), program(a, b, c))
    # Not test_schema: torch has no allclose for float8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    arguments = (a, [b], one, [one], 0, name, [None], [None], [torch.bfloat16], [False])
    opcheck(ops.fused_all_gather_scaled_matmul.default, arguments, test_utils=checks[:2])
    arguments = (a, b, one, one, "sum", 0, 0, name, None)
    opcheck(ops.fused_scaled_matmul_reduce_scatter.default, arguments, {"out_dtype": torch.float32}, test_utils=checks)


def everything(rank, size):
    name = dist.group.WORLD.group_name
    for part in (gathers, scatters, refusals, traced):
        part(rank, size, name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_they_give_what_one_process_computes(ranks):
    run_ranks(everything, ranks, start_torch=True)


def test_torch_computes_scaled_products_on_cpu():
    """What `_torch_compat.scaled_mm` relies on: torch 2.13's private _scaled_mm."""
    a, b, two = drawn((4, 16), 1).to(E4), drawn((16, 8), 2).to(E4), torch.tensor(2.0)
    got = _torch_compat.scaled_mm(a, b, two, two, None, None, torch.float32, False)
    assert torch.equal(got, (a.float() @ b.float()) * 4), "torch._scaled_mm has moved; see _torch_compat.py"


def test_the_numbers_of_dtypes_are_those_of_the_dispatcher():
    library, seen = torch.library.Library("phalanx_test_scaled", "FRAGMENT"), []
    library.define("keep(Tensor x, ScalarType?[] dtypes) -> ()")
    library.impl("keep", lambda x, dtypes: seen.append(list(dtypes)), "CPU")
    listed = [torch.float16, torch.float32, torch.float64, torch.bfloat16, E4, E5, None]
    torch.ops.phalanx_test_scaled.keep(torch.ones(1), listed)
    assert _torch_compat.dtypes_of(seen[0]) == listed
