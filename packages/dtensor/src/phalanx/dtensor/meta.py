"""What an op returns for whole tensors: shapes, strides, dtypes, from torch's own kernels for meta tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from phalanx.dtensor._torch_compat import fake_mode, tracing_fake_mode
from phalanx.dtensor.plan import call_bound, is_list
from phalanx.dtensor.rules.local import results_of
from phalanx.dtensor.spec import Spec


class Shown(NamedTuple):
    """What is known of a result."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


Form = tuple[Any, tuple[int | None, ...]] | None
"""(type of the container or None, for each entry the number of the tensor or None); None if nothing comes out."""


def results(op: Any, values: Sequence[Any], specs: Sequence[Spec]) -> tuple[list[Shown], Form] | None:
    """What comes out of a call for whole tensors.

    Args:
        op: An OpOverload.
        values: Every argument of its schema.
        specs: The specs of the tensors among them, in order.

    Returns:
        The tensors, those that its output_mask leaves out left out, and the form in which they come. None if torch
        cannot say (sizes that depend on values).
    """
    if not all(type(spec) is Spec for spec in specs):
        # Sizes are symbols, which only the mode that made them can work with.
        with tracing_fake_mode() or fake_mode():
            return formed(op, values, call_bound(op, on_meta(op, values, specs, "cpu")))
    try:
        result = call_bound(op, on_meta(op, values, specs, "meta"))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        try:
            with fake_mode():
                result = call_bound(op, on_meta(op, values, specs, "cpu"))
        except Exception:  # torch has many kinds for what it cannot say
            return None
    return formed(op, values, result)


def on_meta(op: Any, values: Sequence[Any], specs: Sequence[Spec], device: str) -> list[Any]:
    """The arguments with tensors of no values in the place of their tensors."""
    left = iter(specs)

    def made(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            spec = next(left)
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        return [made(one) for one in value] if is_list(value) else value

    found = [made(value) for value in values]
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == "device" and found[index] is not None:
            found[index] = torch.device(device)
        elif argument.name == "pin_memory":
            found[index] = None
    return found


def formed(op: Any, values: Sequence[Any], result: Any) -> tuple[list[Shown], Form] | None:
    """The tensors of a result and its form."""
    if result is None:
        return [], None
    kind = type(result) if isinstance(result, (list, tuple)) else None
    kept = results_of(op, values, result)
    if not all(isinstance(one, torch.Tensor) for one in kept):
        return None
    numbers = {id(one): number for number, one in enumerate(kept)}
    entries = tuple(
        numbers.get(id(one)) if isinstance(one, torch.Tensor) else None for one in (result if kind else [result])
    )
    return [Shown(one.shape, tuple(one.stride()), one.dtype) for one in kept], (kind and _container(kind), entries)


def _container(kind: type) -> type:
    return list if issubclass(kind, list) else tuple
