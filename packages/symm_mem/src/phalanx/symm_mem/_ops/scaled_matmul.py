"""Products of scaled float8 matrices, with the collective before or after them.

The scale of A is one element for the whole tensor (the same on all ranks), or one for each row: the shape of A with a
last dim of 1. The scales of rows for all_gather may be those of this rank, which are gathered as well, or those of all
ranks. B is scaled as A is: by one element, or by one for each column, [1, N].
"""

from collections.abc import Sequence

import torch

from phalanx.core import InvalidArgumentError
from phalanx.symm_mem._ops._common import size_of
from phalanx.symm_mem._ops.unfused import gathered, scattered
from phalanx.symm_mem._process_group import resolve
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
    operation: str, by_row: bool, b: torch.Tensor, scales: Sequence[torch.Tensor | None], bias: torch.Tensor | None
) -> None:
    """Check the scale of B, that of the result, and the bias, for a scale of A by row or for all of it."""
    scale, of_result = scales
    assert scale is not None
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


@torch.no_grad()  # there is no backward, and torch would warn
def fused_all_gather_scaled_matmul(
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
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    members, dtypes = resolve(group_name, _GATHER), dtypes_of(out_dtypes)
    per_matrix = (b_scales, biases, result_scales, dtypes, use_fast_accum)
    dim, mode = _check_gather(a, bs, a_scale, gather_dim, members.info.world_size, per_matrix)
    whole = gathered(_GATHER, a, dim, members, keep=True)
    if mode == "sharded":
        a_scale = gathered(_GATHER, a_scale, dim, members, keep=False)
    scale = a_scale.reshape(()) if mode == "whole" else _rows(a_scale)
    rows = _rows(whole)
    return whole, [
        scaled_mm(
            rows, b, scale, b_scale.reshape(()) if mode == "whole" else b_scale.contiguous(), *rest
        ).view(*whole.shape[:-1], b.shape[1])
        for b, b_scale, *rest in zip(bs, *per_matrix, strict=True)
    ]  # fmt: skip


def _check_gather(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    a_scale: torch.Tensor,
    gather_dim: int,
    size: int,
    per_matrix: tuple[Sequence[torch.Tensor | None] | Sequence[torch.dtype | None] | Sequence[bool], ...],
) -> tuple[int, str]:
    """Check the arguments. Returns the dim, and whether the scale is for the whole, sharded, or replicated."""
    b_scales, biases, result_scales, *_ = per_matrix
    for name, values in zip(
        ("B_scales", "biases", "result_scales", "out_dtypes", "use_fast_accum"), per_matrix, strict=True
    ):
        if len(values) != len(bs):
            raise InvalidArgumentError(
                f"{_GATHER}: there are {len(bs)} matrices B and {len(values)} {name}; give one for each B"
            )
    if a.dim() < 2 or not -a.dim() <= gather_dim < a.dim():
        raise InvalidArgumentError(
            f"{_GATHER}: A has shape {list(a.shape)} and gather_dim is {gather_dim}; A needs two dims or more, and "
            "gather_dim must be one of them"
        )
    dim = gather_dim % a.dim()
    shape = list(a.shape)
    shape[dim] *= size
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
    for at, b in enumerate(bs):
        _check_operands(_GATHER, a, b, shape[-1])
        _check_scales(_GATHER, mode != "whole", b, (b_scales[at], result_scales[at]), biases[at])  # type: ignore[arg-type]
    return dim, mode


def _gathered_products(
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
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    size, shape, dtypes = size_of(group_name), list(a.shape), dtypes_of(out_dtypes)
    per_matrix = (b_scales, biases, result_scales, dtypes, use_fast_accum)
    shape[_check_gather(a, bs, a_scale, gather_dim, size, per_matrix)[0]] *= size
    outs = [a.new_empty([*shape[:-1], b.shape[1]], dtype=dtype or a.dtype) for b, dtype in zip(bs, dtypes, strict=True)]
    return a.new_empty(shape), outs


# ---- matmul, then reduce_scatter -------------------------------------------------------------------------------------


@torch.no_grad()
def fused_scaled_matmul_reduce_scatter(
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
) -> torch.Tensor:
    members, dims = resolve(group_name, _SCATTER), (orig_scatter_dim, scatter_dim_after_maybe_reshape)
    size = members.info.world_size
    scales = (a_scale, b_scale, result_scale)
    shape, _ = _check_scatter(a, b, scales, reduce_op, dims, size, output_shape, bias)
    dtype, by_row = out_dtype or a.dtype, a_scale.numel() != 1
    scale_a = _rows(a_scale) if by_row else a_scale.reshape(())
    scale_b = b_scale.contiguous() if by_row else b_scale.reshape(())
    rows = _rows(a)

    def product(out: torch.Tensor | None) -> torch.Tensor:
        flat = None if out is None else out.view(-1, b.shape[1])
        done = scaled_mm(rows, b, scale_a, scale_b, bias, result_scale, dtype, use_fast_accum, flat)
        return done.view(shape) if out is None else out

    call = f"{_SCATTER}({shape} of {dtype}, {reduce_op.lower()}, dim {orig_scatter_dim})"
    return scattered(call, product, shape, dtype, orig_scatter_dim, reduce_op, members, a.device)


def _check_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    reduce_op: str,
    dims: tuple[int, int],
    size: int,
    output_shape: Sequence[int] | None,
    bias: torch.Tensor | None,
) -> tuple[list[int], list[int]]:
    """Check the arguments. Returns the shape of the product, and that of one rank's part."""
    if reduce_op.lower() not in ("sum", "avg"):
        raise InvalidArgumentError(f"{_SCATTER}: unknown reduce op {reduce_op!r}; expected sum or avg")
    _check_operands(_SCATTER, a, b, a.shape[-1] if a.dim() else 0)
    a_scale, b_scale, result_scale = scales
    if a_scale.dtype != torch.float32 or (a_scale.numel() != 1 and list(a_scale.shape) != [*a.shape[:-1], 1]):
        raise InvalidArgumentError(
            f"{_SCATTER}: the scale of A is {list(a_scale.shape)} of {a_scale.dtype}; it must have one element or "
            f"{[*a.shape[:-1], 1]}, of torch.float32"
        )
    _check_scales(_SCATTER, a_scale.numel() != 1, b, (b_scale, result_scale), bias)
    shape = list(output_shape) if output_shape is not None else [*a.shape[:-1], b.shape[1]]
    rows, out_rows = 1, 1
    for length in a.shape[:-1]:
        rows *= length
    for length in shape[:-1]:
        out_rows *= length
    if not shape or shape[-1] != b.shape[1] or rows != out_rows:
        raise InvalidArgumentError(
            f"{_SCATTER}: output_shape is {shape}; the product has {rows} rows and {b.shape[1]} columns"
        )
    if not 0 <= dims[0] < len(shape) or not 0 <= dims[1] < a.dim():
        raise InvalidArgumentError(
            f"{_SCATTER}: orig_scatter_dim is {dims[0]} and must be one of the {len(shape)} dims of the product; "
            f"scatter_dim_after_maybe_reshape is {dims[1]} and must be one of the {a.dim()} dims of A"
        )
    if shape[dims[0]] % size:
        raise InvalidArgumentError(
            f"{_SCATTER}: dim {dims[0]} of the product, {shape}, must be a multiple of the group size {size}"
        )
    part = list(shape)
    part[dims[0]] //= size
    return shape, part


def _scattered_product(
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
) -> torch.Tensor:
    dims, scales = (orig_scatter_dim, scatter_dim_after_maybe_reshape), (a_scale, b_scale, result_scale)
    _, part = _check_scatter(a, b, scales, reduce_op, dims, size_of(group_name), output_shape, bias)
    return a.new_empty(part, dtype=out_dtype or a.dtype)


OPS = [
    (
        (
            "fused_all_gather_scaled_matmul(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int gather_dim, "
            "str group_name, Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, "
            "bool[] use_fast_accum) -> (Tensor, Tensor[])"
        ),
        fused_all_gather_scaled_matmul,
        _gathered_products,
    ),
    (
        (
            "fused_scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, "
            "int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, "
            "Tensor? bias=None, Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False) "
            "-> Tensor"
        ),
        fused_scaled_matmul_reduce_scatter,
        _scattered_product,
    ),
]
