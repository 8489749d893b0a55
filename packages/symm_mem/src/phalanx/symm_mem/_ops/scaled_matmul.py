"""Products of scaled float8 matrices, with the collective before or after them.

The scale of A is one element for the whole tensor (the same on all ranks), or one for each row: the shape of A with a
last dim of 1. The scales of rows for all_gather may be those of this rank, which are gathered as well, or those of all
ranks. B is scaled as A is: by one element, or by one for each column, [1, N].
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from phalanx.core import InvalidArgumentError
from phalanx.symm_mem._ops._common import check_sum, gather_dim_of, op, part_of
from phalanx.symm_mem._ops.unfused import gathered, scattered
from phalanx.symm_mem._process_group import RankGroup, resolve
from phalanx.symm_mem._torch_compat import dtypes_of, scaled_mm

_GATHER, _SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _check_operands(operation: str, a: torch.Tensor, b: torch.Tensor, inner: int) -> None:
    if a.dtype not in _FLOAT8 or b.dtype not in _FLOAT8:
        raise InvalidArgumentError(
            f"{operation}: A is of {a.dtype} and B of {b.dtype}; both must be of float8_e4m3fn or float8_e5m2"
        )
    if a.dim() < 2 or b.dim() != 2 or b.shape[0] != inner:
        raise InvalidArgumentError(
            f"{operation}: A has shape {list(a.shape)} and B {list(b.shape)}; A needs two dims or more, and B must be "
            f"a matrix with {inner} rows"
        )


def _check_scales(
    operation: str,
    by_row: bool,
    b: torch.Tensor,
    scale: torch.Tensor,
    of_result: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Check the scale of B, that of the result, and the bias, for a scale of A by row or for all of it."""
    if list(scale.shape) != [1, b.shape[1]] if by_row else scale.numel() != 1:
        wanted = f"[1, {b.shape[1]}], as A has a scale for each row" if by_row else "one element, as A has one scale"
        raise InvalidArgumentError(f"{operation}: the scale of B has shape {list(scale.shape)}; it must have {wanted}")
    if scale.dtype != torch.float32:
        raise InvalidArgumentError(f"{operation}: the scale of B is of {scale.dtype}; scales are of torch.float32")
    if of_result is not None and (of_result.numel() != 1 or of_result.dtype != torch.float32):
        raise InvalidArgumentError(
            f"{operation}: the result scale is {list(of_result.shape)} of {of_result.dtype}; it must have one element "
            "of torch.float32"
        )
    if bias is not None and list(bias.shape) != [b.shape[1]]:
        raise InvalidArgumentError(f"{operation}: the bias is {list(bias.shape)}; it must have [{b.shape[1]}]")


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a contiguous matrix."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


# ---- all_gather, then matmul -----------------------------------------------------------------------------------------


def _check_gather(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    a_scale: torch.Tensor,
    b_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[torch.dtype | int | None],
    use_fast_accum: Sequence[bool],
) -> tuple[RankGroup, int, str, list[tuple[Any, ...]]]:
    """Check the arguments of the op.

    Returns the group, the dim, whether the scale of A is for the whole, sharded, or replicated, and for each B a tuple
    of it, its scale, bias, result scale, dtype and use_fast_accum.
    """
    members = resolve(group_name, _GATHER)
    per_matrix: dict[str, Sequence[Any]] = {
        "B_scales": b_scales,
        "biases": biases,
        "result_scales": result_scales,
        "out_dtypes": dtypes_of(out_dtypes),
        "use_fast_accum": use_fast_accum,
    }
    for name, values in per_matrix.items():
        if len(values) != len(bs):
            raise InvalidArgumentError(
                f"{_GATHER}: there are {len(bs)} matrices B and {len(values)} {name}; give one for each B"
            )
    dim = gather_dim_of(_GATHER, a, gather_dim)
    shape = list(a.shape)
    shape[dim] *= members.info.world_size
    if a_scale.dtype != torch.float32:
        raise InvalidArgumentError(f"{_GATHER}: the scale of A is of {a_scale.dtype}; scales are of torch.float32")
    # As in torch, one row's scale counts as sharded: it could be one for the whole tensor, too.
    if list(a_scale.shape) == [*a.shape[:-1], 1] and dim != a.dim() - 1:
        mode = "sharded"
    elif a_scale.numel() == 1:
        mode = "whole"
    elif list(a_scale.shape) == [*shape[:-1], 1]:
        mode = "replicated"
    else:
        raise InvalidArgumentError(
            f"{_GATHER}: the scale of A has shape {list(a_scale.shape)}; it must have one element, {[*a.shape[:-1], 1]}"
            f" (of this rank's rows), or {[*shape[:-1], 1]} (of all)"
        )
    matrices = list(zip(bs, *per_matrix.values(), strict=True))
    for b, b_scale, bias, result_scale, *_ in matrices:
        _check_operands(_GATHER, a, b, shape[-1])
        _check_scales(_GATHER, mode != "whole", b, b_scale, result_scale, bias)
    return members, dim, mode, matrices


def _gathered_products(a: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    members, dim, _, matrices = _check_gather(a, *rest)
    shape = list(a.shape)
    shape[dim] *= members.info.world_size
    rows = shape[:-1]
    return a.new_empty(shape), [
        a.new_empty([*rows, b.shape[1]], dtype=dtype or a.dtype) for b, *_, dtype, _ in matrices
    ]


@op(
    "fused_all_gather_scaled_matmul(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int gather_dim, "
    "str group_name, Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum) "
    "-> (Tensor, Tensor[])",
    _gathered_products,
)
@torch.no_grad()  # there is no backward, and torch would warn
def fused_all_gather_scaled_matmul(
    a: torch.Tensor, bs: Sequence[torch.Tensor], a_scale: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    members, dim, mode, matrices = _check_gather(a, bs, a_scale, *rest)
    whole = gathered(_GATHER, a, dim, members, keep=True)
    if mode == "sharded":
        a_scale = gathered(_GATHER, a_scale, dim, members, keep=False)
    scale = a_scale.reshape(()) if mode == "whole" else _rows(a_scale)
    rows = _rows(whole)
    return whole, [
        scaled_mm(
            rows, b, scale, b_scale.reshape(()) if mode == "whole" else b_scale.contiguous(), *further
        ).view(*whole.shape[:-1], b.shape[1])
        for b, b_scale, *further in matrices
    ]  # fmt: skip


# ---- matmul, then reduce_scatter -------------------------------------------------------------------------------------


def _check_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> tuple[RankGroup, list[int], list[int], torch.dtype]:
    """Check the arguments of the op. Returns the group, the shapes of the product and of a rank's part, the dtype."""
    members = resolve(group_name, _SCATTER)
    check_sum(_SCATTER, reduce_op)
    _check_operands(_SCATTER, a, b, a.shape[-1] if a.dim() else 0)
    if a_scale.dtype != torch.float32 or (a_scale.numel() != 1 and list(a_scale.shape) != [*a.shape[:-1], 1]):
        raise InvalidArgumentError(
            f"{_SCATTER}: the scale of A is {list(a_scale.shape)} of {a_scale.dtype}; it must have one element or "
            f"{[*a.shape[:-1], 1]}, of torch.float32"
        )
    _check_scales(_SCATTER, a_scale.numel() != 1, b, b_scale, result_scale, bias)
    shape = list(output_shape) if output_shape is not None else [*a.shape[:-1], b.shape[1]]
    rows = prod(a.shape[:-1])
    if not shape or shape[-1] != b.shape[1] or rows != prod(shape[:-1]):
        raise InvalidArgumentError(
            f"{_SCATTER}: output_shape is {shape}; the product has {rows} rows and {b.shape[1]} columns"
        )
    if not 0 <= orig_scatter_dim < len(shape) or not 0 <= scatter_dim_after_maybe_reshape < a.dim():
        raise InvalidArgumentError(
            f"{_SCATTER}: orig_scatter_dim is {orig_scatter_dim} and must be one of the {len(shape)} dims of the "
            f"product; scatter_dim_after_maybe_reshape is {scatter_dim_after_maybe_reshape} and must be one of the "
            f"{a.dim()} dims of A"
        )
    part = part_of(_SCATTER, shape, orig_scatter_dim, members.info.world_size, "the product, {},")
    return members, shape, part, out_dtype or a.dtype


def _scattered_product(a: torch.Tensor, *rest: Any) -> torch.Tensor:
    _, _, part, dtype = _check_scatter(a, *rest)
    return a.new_empty(part, dtype=dtype)


@op(
    "fused_scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, "
    "int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, "
    "Tensor? bias=None, Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
    _scattered_product,
)
@torch.no_grad()
def fused_scaled_matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    reduce_op: str,
    dim: int,
    dim_of_a: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    members, shape, _, dtype = _check_scatter(
        a, b, a_scale, b_scale, reduce_op, dim, dim_of_a, group_name, output_shape, bias, result_scale, out_dtype
    )
    by_row = a_scale.numel() != 1
    scale_a = _rows(a_scale) if by_row else a_scale.reshape(())
    scale_b = b_scale.contiguous() if by_row else b_scale.reshape(())
    rows = _rows(a)

    def product(out: torch.Tensor | None) -> torch.Tensor:
        flat = None if out is None else out.view(-1, b.shape[1])
        done = scaled_mm(rows, b, scale_a, scale_b, bias, result_scale, dtype, use_fast_accum, flat)
        return done.view(shape) if out is None else out

    call = f"{_SCATTER}({shape} of {dtype}, {reduce_op.lower()}, dim {dim})"
    return scattered(call, product, shape, dtype, dim, reduce_op, members, a.device)
