"""The private or recent parts of torch that this package uses. No other module of the package uses any.

Read in torch 2.13.0. `test_torch_compat.py` and `test_scaled_matmul.py` fail when torch moves or changes them.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

# Public, but torch.distributed does not list it for type checkers.
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]

# Private, read in 2.13. The first returns the store that a ProcessGroup was made with, as torch's own symmetric memory
# takes it (ProcessGroup.get_group_store() has none for groups of threads). The second returns the ProcessGroup of a
# name, and raises RuntimeError when there is none. The third has what torch.distributed knows of its groups.
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _get_process_group_store,
    _resolve_process_group,
    _world,
)

from phalanx.core import InvalidArgumentError
from phalanx.core.timeouts import milliseconds


def process_group_named(name: str) -> dist.ProcessGroup | None:
    """The torch process group of this name, or None."""
    try:
        group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return None
    return group


def store_of(group: dist.ProcessGroup) -> Any:
    """The torch Store of a process group, with the group's own prefix."""
    try:
        return _get_process_group_store(group)
    except (KeyError, RuntimeError, ValueError):  # it was made without torch.distributed
        return cast(Any, group).get_group_store()


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks of a group, in order; its own numbers if the global ones are not known. Read in 2.13."""
    known = _world.pg_group_ranks.get(group) or {}
    if len(known) != group.size():
        return tuple(range(group.size()))
    return tuple(sorted(known, key=lambda rank: known[rank]))


def timeout_ms_of(group: dist.ProcessGroup) -> int:
    """The timeout of a group in milliseconds, or 0 if it is not known. Read in 2.13."""
    for device in (torch.device("cpu"), *cast(Any, group)._device_types):
        try:
            timeout: timedelta = cast(Any, group)._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):  # it has no backend for the device, or one with unknown options
            continue
        return milliseconds(timeout)
    return 0


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether the other ranks of a group are fake. Read in 2.13."""
    config = _world.pg_backend_config.get(group)
    return config is not None and dist.get_backend(group) == "fake"


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
    """(a * scale_a) @ (b * scale_b) + bias of matrices in float8, which torch also computes on CPU. Read in 2.13.

    torch.nn.functional.scaled_mm is public, but takes no result scale. That is used only for results of float8. `out`
    must be contiguous. Scales are of float32: one element, or [M, 1] and [1, N].
    """
    arguments = (a, b, scale_a, scale_b, bias, result_scale, out_dtype, use_fast_accum)
    op = torch.ops.aten._scaled_mm
    product: torch.Tensor = op.default(*arguments) if out is None else op.out(*arguments, out=out)
    return product


# The dispatcher turns dtypes in a list (ScalarType?[]; not a single one) into the numbers of c10/core/ScalarType.h.
# These are the ones that a product of float8 matrices can have. Read in 2.13.
_BY_NUMBER = {
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
}


def dtypes_of(listed: Sequence[torch.dtype | int | None]) -> list[torch.dtype | None]:
    """The dtypes of a list that has passed the dispatcher.

    Raises:
        InvalidArgumentError: One is not a floating dtype.
    """
    dtypes = [_BY_NUMBER.get(item) if isinstance(item, int) else item for item in listed]
    for item, dtype in zip(listed, dtypes, strict=True):
        if item is not None and dtype is None:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _BY_NUMBER.values())
            raise InvalidArgumentError(
                f"fused_all_gather_scaled_matmul: out_dtypes has the scalar type {item}; expected one of {known}"
            )
    return dtypes
