"""Reductions: their names, the dtypes for which they are defined, and the reduction of local tensors in the order of
the core, to the same bits.

For this package and those above it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from phalanx.core import DType, ReduceOp, UnsupportedError

# ---- names -----------------------------------------------------------------------------------------------------------

_NUMBERS_OF = {op.name.lower(): op for op in ReduceOp}
# By name, the numbers that the core has for those without a factor, which a call of torch has no place for.
REDUCTIONS = {name: number for name, number in _NUMBERS_OF.items() if number != ReduceOp.PREMUL_SUM}
_DIFFERENTIABLE = ("sum", "avg")


def unknown_reduction(operation: str, name: Any) -> str:
    """The text of the error for a reduction that does not exist.

    Args:
        operation: The name of the function that was called.
        name: The value that the function was given as the reduction.
    """
    *most, last = REDUCTIONS
    expected = f"expected {', '.join(most)} or {last}"
    if isinstance(name, str):
        return f"{operation}: unknown reduce op {name!r}; {expected}"
    known = str(getattr(name, "name", "sum")).lower()  # of torch.distributed.ReduceOp.SUM
    example = known if known in REDUCTIONS else "sum"
    return f"{operation}: the reduce op must be a string such as '{example}', not {name}; {expected}"


def check_reduction(operation: str, name: str) -> str:
    """A reduction's name in lower case.

    Args:
        operation: The name of the function that was called, for the text of the error.
        name: sum, avg, product, min, max, band, bor or bxor, in upper or lower case.

    Raises:
        ValueError: There is no such reduction.
    """
    lower = name.lower() if isinstance(name, str) else None
    if lower not in _NUMBERS_OF:
        raise ValueError(unknown_reduction(operation, name))
    return lower


def check_differentiable(operation: str, name: str) -> str:
    """The name of a reduction that has a gradient, in lower case.

    Args:
        operation, name: As for `check_reduction`.

    Raises:
        ValueError: There is no such reduction.
        RuntimeError: The reduction has no gradient.
    """
    lower = check_reduction(operation, name)
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
        lanes: The number of the core's elements in one element of torch's: 2 for complex dtypes.
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
    """How the core sees elements of a dtype.

    Args:
        dtype: Any dtype. The core moves elements of a dtype that it does not know, such as 8-bit floats, as bytes.
    """
    found = _TYPES.get(dtype)
    if found is None:
        found = _TYPES[dtype] = ElementType(int(DType.UINT8), dtype.itemsize, "none")
    return found


# The dtypes for which every reduction is defined.
REDUCIBLE = frozenset(dtype for dtype, each in _TYPES.items() if each.reduces == "all")
PLAIN_CODES = {dtype: each.code for dtype, each in _TYPES.items() if each.lanes == 1}  # whatever can be done with them


def reduction_of(operation: str, name: str, dtype: torch.dtype) -> int:
    """The core's number of a reduction.

    Args:
        operation, name: As for `check_reduction`.
        dtype: The dtype of the tensors.

    Raises:
        ValueError: There is no such reduction, or it needs a factor.
        UnsupportedError: The reduction is not defined for this dtype.
    """
    number = _NUMBERS_OF[check_reduction(operation, name)]
    if number == ReduceOp.PREMUL_SUM:
        raise ValueError(
            f"{operation}: the reduce op 'premul_sum' needs a factor, for which {operation} has no argument; multiply "
            "the input by the factor and use 'sum'"
        )
    reduces = element_type(dtype).reduces
    if reduces == "all" or (reduces == "sums" and number in (ReduceOp.SUM, ReduceOp.AVG)):
        return number
    if reduces == "sums":
        raise UnsupportedError(
            f"{operation}: the reduce op {name!r} is not defined for {dtype}, only sum and avg are; reduce "
            "torch.view_as_real(input) instead"
        )
    raise UnsupportedError(
        f"{operation}: a tensor of {dtype} can be moved but not reduced; convert it to float32 or bfloat16 first"
    )


# ---- local tensors ---------------------------------------------------------------------------------------------------

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
