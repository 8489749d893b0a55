"""Reductions of tensors that are here already, as the core reduces those of ranks: in their order, with the same bits.

For packages that move data themselves.
"""

from collections.abc import Sequence

import torch

__all__ = ["accumulation_dtype", "combine"]

_NARROW = {torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
_WIDENED = {"sum", "avg", "product"}


def accumulation_dtype(dtype: torch.dtype, reduction: str) -> torch.dtype:
    """In which dtype parts are added: floats of 16 and 8 bits in float32, the average of integers in int64, and so what
    torch cannot add.

    Args:
        dtype: Of the parts.
        reduction: As for `combine`, as all that follows.
    """
    if dtype in (torch.uint16, torch.uint32):
        return torch.int64
    if dtype in _NARROW and reduction in _WIDENED:
        return torch.float32
    if reduction == "avg" and not dtype.is_floating_point and not dtype.is_complex:
        return torch.int64
    return dtype


def combine(parts: Sequence[torch.Tensor], reduction: str, ranks: int) -> torch.Tensor:
    """Reduce parts, in order.

    Args:
        parts: Of one shape and dtype; the first one may be overwritten.
        reduction: sum, avg, product, min, max, band, bor or bxor.
        ranks: By which an average is divided; integers are rounded towards zero.

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
