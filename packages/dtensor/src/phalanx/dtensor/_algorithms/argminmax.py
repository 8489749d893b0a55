"""argmax, argmin, max and min with indices along a sharded dim: each rank finds its own, the first of the best wins.

Moves one value and one index of each piece instead of the tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor._algorithms.common import (
    check_strict,
    gathered,
    is_cut_plainly,
    offset_of,
    without_dims,
    without_partial,
    wrapped,
)
from phalanx.dtensor._algorithms.registry import algorithm
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._op_plan import bound
from phalanx.dtensor._rules.local_adjustments import neutral
from phalanx.dtensor.placement_types import Replicate


def _takes(values: Sequence[Any], choice: Any, moves: Sequence[Any]) -> bool:
    spec = values[0]._spec
    if not spec.ndim or spec.shape.numel() == 0 or spec.dtype.is_complex:
        return False
    dims = range(spec.ndim) if values[1] is None else [values[1] % spec.ndim]
    return is_cut_plainly(spec, dims)


def _best_of_local(
    local: torch.Tensor, spec: DTensorSpec, dim: int, largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, global indices) of the best of each line of a local tensor along a dim, without it."""
    shape = [size for index, size in enumerate(local.shape) if index != dim]
    if not local.shape[dim]:
        worst = neutral("max" if largest else "min", local.dtype)
        return torch.full(shape, worst, dtype=local.dtype), torch.full(shape, spec.shape[dim], dtype=torch.int64)
    values, indices = local.max(dim) if largest else local.min(dim)
    return values, indices + offset_of(spec, dim)


def _best(
    values: torch.Tensor, indices: torch.Tensor, spec: DTensorSpec, mesh_dims: Sequence[int], largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of all pieces. The pieces ascend, and of equal ones torch takes the first. Collective."""
    all_values = gathered(values, spec.mesh, mesh_dims)
    all_indices = gathered(indices, spec.mesh, mesh_dims)
    found, piece = all_values.max(0) if largest else all_values.min(0)
    return found, all_indices.gather(0, piece.unsqueeze(0)).squeeze(0)


@algorithm("aten.max.dim", "aten.min.dim", takes=_takes)
def extreme(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """(self, dim, keepdim) -> (values, indices)."""
    check_strict(op)
    values = bound(op, args, kwargs)
    found, where, spec, dim = _along(values[0], values[1], op._schema.name.endswith("max"))
    placements, shape = without_dims(spec, [dim], values[2])
    results = [one.unsqueeze(dim) if values[2] else one for one in (found, where)]
    best, indices = (wrapped(one, spec.mesh, placements, shape) for one in results)
    return best, indices


@algorithm("aten.argmax.default", "aten.argmin.default", takes=_takes)
def arg_extreme(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """(self, dim, keepdim); without a dim, the index in the flat tensor."""
    check_strict(op)
    values = bound(op, args, kwargs)
    largest = op._schema.name.endswith("argmax")
    if values[1] is None:
        return _of_all(values[0], largest, values[2])
    _, where, spec, dim = _along(values[0], values[1], largest)
    placements, shape = without_dims(spec, [dim], values[2])
    return wrapped(where.unsqueeze(dim) if values[2] else where, spec.mesh, placements, shape)


def _along(tensor: Any, dim: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor, DTensorSpec, int]:
    local, spec = without_partial(tensor)
    dim %= spec.ndim
    found = _best_of_local(local, spec, dim, largest)
    return (*_best(*found, spec, spec.mesh_dims_of(dim), largest), spec, dim)


def _of_all(tensor: Any, largest: bool, keepdim: bool) -> Any:
    local, spec = without_partial(tensor)
    if local.numel():
        values, at = local.flatten().max(0) if largest else local.flatten().min(0)
        whole = 0
        for dim, index in enumerate(torch.unravel_index(at, local.shape)):
            whole = whole * int(spec.shape[dim]) + int(index) + offset_of(spec, dim)
        indices = torch.tensor(whole)
    else:
        values = torch.tensor(neutral("max" if largest else "min", local.dtype), dtype=local.dtype)
        indices = torch.tensor(spec.shape.numel())
    mesh_dims = [index for index, one in enumerate(spec.placements) if not one.is_replicate()]
    all_values = gathered(values, spec.mesh, mesh_dims)
    all_indices = gathered(indices, spec.mesh, mesh_dims)
    best = all_values.max() if largest else all_values.min()
    # Pieces do not ascend in the flat tensor: of equal ones the lowest index counts.
    equal = all_values.isnan() if bool(best.isnan()) else all_values == best
    where = all_indices[equal].min()
    shape = (1,) * spec.ndim if keepdim else ()
    return wrapped(where.reshape(shape), spec.mesh, (Replicate(),) * spec.mesh.ndim, shape)
