"""The distributions of random ops, from their arguments, with the checks that torch makes."""

from typing import Any

import torch

from phalanx.core.random import Kind
from phalanx.dtensor._random.fill import Distribution


def uniform(op: Any, dtype: torch.dtype, low: float, high: float) -> Distribution:
    need(op, dtype.is_floating_point, f"the tensor must have a floating-point dtype, not {dtype}")
    limits = torch.finfo(dtype)
    need(
        op,
        limits.min <= low <= high <= limits.max and high - low <= limits.max,
        f"from={low} and to={high} must be numbers of {dtype}, from <= to, and to - from too",
    )
    return Distribution(Kind.UNIFORM, low, high)


def normal(op: Any, dtype: torch.dtype, mean: float, std: float) -> Distribution:
    need(op, dtype.is_floating_point or dtype.is_complex, f"the dtype must be floating-point or complex, not {dtype}")
    need(op, std >= 0, f"expects std >= 0.0, but found std {std}")
    return Distribution(Kind.NORMAL, mean, std)


def bernoulli(op: Any, dtype: torch.dtype, p: float) -> Distribution:
    need(op, 0 <= p <= 1, f"expects p to be in [0, 1], but got p={p}")
    return Distribution(Kind.BERNOULLI, p, 0.0)


def scaled(kind: Kind, name: str, op: Any, dtype: torch.dtype, *given: float) -> Distribution:
    """A distribution of floats whose last argument, of that name, must be above 0."""
    need(op, given[-1] > 0, f"expects {name} > 0.0, but found {name}={given[-1]}")
    need(op, dtype.is_floating_point, f"only supports floating-point dtypes, not {dtype}")
    return Distribution(kind, *given)


_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def whole_numbers(op: Any, dtype: torch.dtype, low: int | None = None, high: int | None = None) -> Distribution:
    """random_: [low, high), or up to the largest integer of the dtype; from 0 on if there is no low."""
    digits = _DIGITS.get(dtype)
    need(op, digits is not None or not (dtype.is_complex or dtype.is_floating_point), f"not implemented for {dtype}")
    if digits is None:
        least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    else:
        most = int(torch.finfo(dtype).max)
        least = -most
    first = 0 if low is None else low
    last = high - 1 if high is not None else most if digits is None else 1 << digits
    need(op, first <= last, f"expects 'from' to be less than 'to', but got from={first} >= to={last + 1}")
    shown = f"to - 1={last}" if digits is None else f"to={last + 1}"
    need(op, least <= first and last <= most, f"from={first} or {shown} is out of bounds for {dtype}")
    if digits is not None:
        first, last = _inward(first, digits, up=True), _inward(last, digits, up=False)
    return Distribution(None, first, max(last - first, 0) + 1)


def _inward(value: int, digits: int, *, up: bool) -> int:
    """The next integer that a float of so many digits has: rounding then never leaves the range."""
    extra = max(abs(value).bit_length() - digits, 0)
    return -(-value >> extra << extra) if up else value >> extra << extra


def need(op: Any, truth: bool, what: str) -> None:
    if not truth:
        name = op._schema.name.split("::")[1]
        raise RuntimeError(f"{name}: {what}")
