"""Reductions: their names, the dtypes for which they are defined, and reducing tensors that are here already, as the
core reduces those of ranks: in their order, with the same bits.

For this package and those above it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from phalanx.core import DType, ReduceOp, UnsupportedError

# ---- names -----------------------------------------------------------------------------------------------------------

_NUMBERS_OF = {op.name.lower(): op for op in ReduceOp}
# By name, the numbers that the core has for those without a factor, which a call of torch has no place for.
REDUCTIONS = {name: number for name, number in _NUMBERS_OF.items() if number != ReduceOp.PREMUL_SUM}
_DIFFERENTIABLE = ("sum", "avg")


def check_reduction(name: str) -> str:
    """A reduction's name in lower case.

    Raises:
        ValueError: There is no such reduction.
    """
    lower = name.lower() if isinstance(name, str) else name
    if lower not in _NUMBERS_OF:
        raise ValueError(f"Invalid reduce operation {name}")
    return lower


def check_differentiable(operation: str, name: str) -> str:
    """A reduction's name in lower case.

    Raises:
        ValueError: There is no such reduction.
        RuntimeError: It has no gradient here.
    """
    lower = check_reduction(name)
    if lower not in _DIFFERENTIABLE:
        raise RuntimeError(
            f"{operation}: the input needs a gradient, but the reduction '{name}' has none; use sum or avg, or call it "
            "with torch.no_grad() or on tensor.detach()"
        )
    return lower


# ---- element types ---------------------------------------------------------------------------------------------------


class ElementType(NamedTuple):
    """How the core sees elements of a torch dtype.

    Attributes:
        code: PHX_*.
        lanes: How many of the core's elements make one of torch's.
        reduces: "all" reductions, "sums" only, or "none": then they are moved as bytes.
    """

    code: int
    lanes: int
    reduces: str


_NUMBERS = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
_TYPES: dict[torch.dtype, ElementType] = {
    getattr(torch, name): ElementType(int(DType[name.upper()]), 1, "all") for name in (*_NUMBERS, "uint64", "bool")
}
for _complex, _half in (
    (torch.complex32, DType.FLOAT16),
    (torch.complex64, DType.FLOAT32),
    (torch.complex128, DType.FLOAT64),
):
    _TYPES[_complex] = ElementType(int(_half), 2, "sums")


def element_type(dtype: torch.dtype) -> ElementType:
    """How the core sees elements of a dtype."""
    found = _TYPES.get(dtype)
    if found is None:  # such as 8-bit floats
        found = _TYPES[dtype] = ElementType(int(DType.UINT8), dtype.itemsize, "none")
    return found


# The dtypes for which every reduction is defined.
REDUCIBLE = frozenset(dtype for dtype, each in _TYPES.items() if each.reduces == "all")
PLAIN_CODES = {dtype: each.code for dtype, each in _TYPES.items() if each.lanes == 1}  # whatever can be done with them


def reduction_of(operation: str, name: str, dtype: torch.dtype) -> int:
    """The number of a reduction.

    Raises:
        ValueError: There is no such reduction, or it needs a factor.
        UnsupportedError: Not for this dtype.
    """
    number = _NUMBERS_OF.get(name) or _NUMBERS_OF.get(str(name).lower())
    if number is None:
        raise ValueError(f"Invalid reduce operation {name}")
    if number == ReduceOp.PREMUL_SUM:
        raise ValueError(
            f"{operation}: premul_sum needs a factor, which there is no argument for: multiply the input by it and use "
            "sum"
        )
    reduces = element_type(dtype).reduces
    if reduces == "all" or (reduces == "sums" and number in (ReduceOp.SUM, ReduceOp.AVG)):
        return number
    if reduces == "sums":
        raise UnsupportedError(
            f"{operation}: only sum and avg are defined for {dtype}; reduce torch.view_as_real(input) instead"
        )
    raise UnsupportedError(
        f"{operation}: a tensor of {dtype} can be moved but not reduced; convert it to float32 or bfloat16 first"
    )


# ---- tensors that are here -------------------------------------------------------------------------------------------

_NARROW = {torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
_WIDENED = {"sum", "avg", "product"}


def accumulation_dtype(dtype: torch.dtype, reduction: str) -> torch.dtype:
    """The dtype in which tensors are added: float32 for floats of 16 and 8 bits, int64 for averages of integers and for
    unsigned integers that torch cannot add.

    Args:
        dtype: The dtype of the tensors.
        reduction: As in `combine`.
    """
    if dtype in (torch.uint16, torch.uint32):
        return torch.int64
    if dtype in _NARROW and reduction in _WIDENED:
        return torch.float32
    if reduction == "avg" and not dtype.is_floating_point and not dtype.is_complex:
        return torch.int64
    return dtype


def combine(parts: Sequence[torch.Tensor], reduction: str, ranks: int) -> torch.Tensor:
    """Reduce tensors in their order.

    Args:
        parts: Tensors of one shape and dtype; the first one may be overwritten.
        reduction: sum, avg, product, min, max, band, bor or bxor.
        ranks: The divisor of an average; integers are rounded towards zero.

    Returns:
        The result, perhaps in the memory of the first part.
    """
    done = parts[0]
    narrow = done.dtype
    if narrow in _NARROW:  # min and max: exact in float32
        parts = [part.float() for part in parts]
        done = parts[0]
    for part in parts[1:]:
        if reduction in ("sum", "avg"):
            done += part
        elif reduction == "product":
            done *= part
        elif reduction in ("min", "max"):
            torch.minimum(done, part, out=done) if reduction == "min" else torch.maximum(done, part, out=done)
        elif reduction == "band":
            done &= part
        elif reduction == "bor":
            done |= part
        else:
            done ^= part
    if reduction == "avg":
        rounding = None if done.dtype.is_floating_point or done.dtype.is_complex else "trunc"
        done = torch.div(done, ranks, rounding_mode=rounding)
    return done.to(narrow)
