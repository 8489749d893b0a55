"""The private parts of torch that the ops rely on. Nothing else here touches any.

Read in torch 2.13.0. `test_scaled.py` fails when torch moves or changes it.
"""

from collections.abc import Sequence

import torch

from phalanx.core import InvalidArgumentError


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """(a * scale_a) @ (b * scale_b) + bias of matrices in float8, which torch computes on CPU too.

    torch.nn.functional.scaled_mm is public, but takes no result scale.

    Args:
        a: [M, K] of a float8 dtype.
        b: [K, N] of a float8 dtype.
        scale_a: float32, one element, or [M, 1].
        scale_b: float32, one element, or [1, N].
        bias: [N] or None.
        result_scale: float32, one element; it counts where the result is of float8 only.
        out_dtype: Of the result; None is that of `a`.
        use_fast_accum: Nothing on CPU.
        out: Contiguous [M, N] of the dtype of the result, or None.
    """
    arguments = (a, b, scale_a, scale_b, bias, result_scale, out_dtype, use_fast_accum)
    found: torch.Tensor = (
        torch.ops.aten._scaled_mm.default(*arguments)
        if out is None
        else torch.ops.aten._scaled_mm.out(*arguments, out=out)
    )
    return found


# What the dispatcher makes of the dtypes of a list (ScalarType?[]; a single one stays what it is): the numbers of
# c10/core/ScalarType.h of those that a product of float8 matrices can have.
_BY_NUMBER = {
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
}


def dtypes_of(listed: Sequence[torch.dtype | int | None]) -> list[torch.dtype | None]:
    """The dtypes of a list that came through the dispatcher.

    Raises:
        InvalidArgumentError: One is no floating dtype.
    """
    found = [_BY_NUMBER.get(each) if isinstance(each, int) else each for each in listed]
    for given, dtype in zip(listed, found, strict=True):
        if given is not None and dtype is None:
            raise InvalidArgumentError(f"out_dtypes has the scalar type {given}, which is none of {_BY_NUMBER}")
    return found
