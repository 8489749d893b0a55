"""topk along a sharded dim: the best k of each piece are gathered, and the best k of these are the result."""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor import _layout
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
from phalanx.dtensor._op_plan import bound
from phalanx.dtensor.placement_types import Shard


def _takes(values: Sequence[Any], choice: Any, moves: Sequence[Any]) -> bool:
    spec = values[0]._spec
    if not spec.ndim or spec.dtype.is_complex or not is_cut_plainly(spec, [values[2] % spec.ndim]):
        return False
    dim = values[2] % spec.ndim
    mesh_dims = spec.mesh_dims_of(dim)
    if len(mesh_dims) != 1:
        return False
    # Every piece has k to give, so that nothing stands for what is missing.
    sizes = _layout.piece_sizes(spec.shape[dim], Shard(dim), spec.mesh.shape[mesh_dims[0]])
    return min(int(one) for one in sizes) >= max(1, int(values[1]))


@algorithm("aten.topk.default", takes=_takes)
def topk(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """(self, k, dim, largest, sorted) -> (values, indices)."""
    check_strict(op)
    tensor, k, dim, largest, is_sorted = bound(op, args, kwargs)
    local, spec = without_partial(tensor)
    dim %= spec.ndim
    mesh_dims = spec.mesh_dims_of(dim)
    values, indices = local.topk(k, dim, largest, True)
    indices = indices + offset_of(spec, dim)
    candidates = torch.cat(list(gathered(values, spec.mesh, mesh_dims)), dim)
    places = torch.cat(list(gathered(indices, spec.mesh, mesh_dims)), dim)
    found, at = candidates.topk(k, dim, largest, is_sorted)
    placements, shape = without_dims(spec, [dim], keepdim=True)
    size = [k if index == dim else one for index, one in enumerate(shape)]
    return wrapped(found, spec.mesh, placements, size), wrapped(places.gather(dim, at), spec.mesh, placements, size)
