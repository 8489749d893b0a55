"""Lookups along a sharded dim: each rank looks up what it has and gives zeros for the rest; the results are one sum.

Nothing moves: embedding on a table that is sharded by rows leaves a Partial.
"""

from typing import Any

import torch

from phalanx.dtensor._algorithms.common import algorithm, is_cut_plainly, offset_of, redistribute_local, wrapped
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._index_bounds import Bound, check_bounds
from phalanx.dtensor.placement_types import Partial, Replicate, Shard, split_dim


def _takes_embedding(weight: Any, indices: Any, *_: Any) -> bool:
    table, index = weight._spec, indices._spec
    if not is_cut_plainly(table, [0]) or weight.dtype == torch.bool:
        return False
    # Mesh dims that do not cut the rows have both as they are; one that cuts columns and index is for the rule.
    return all(
        (isinstance(cut, Shard) and cut.dim == 0) or (cut.is_replicate() and isinstance(own, (Shard, Replicate)))
        for cut, own in zip(table.placements, index.placements, strict=True)
    )


def _looked_up(op: Any, source: Any, dim: int, index: torch.Tensor, argument: int) -> torch.Tensor:
    """What this rank has of a dim at an index, which is argument `argument` of the op; 0 where another rank has it."""
    spec: DTensorSpec = source._spec
    check_bounds(op, index, Bound(argument, None, dim, int(spec.shape[dim]), False, IndexError))
    local: torch.Tensor = source._local_tensor
    if not local.shape[dim]:
        return local.new_zeros((*local.shape[:dim], *index.shape, *local.shape[dim + 1 :]))
    place = index - offset_of(spec, dim)
    is_here = (place >= 0) & (place < local.shape[dim])
    place = torch.where(is_here, place, torch.zeros_like(place))
    found = op(local, place) if argument == 1 else op(local, dim, place)
    shown = is_here.reshape((1,) * dim + index.shape + (1,) * (local.ndim - dim - 1))
    return torch.where(shown, found, torch.zeros((), dtype=local.dtype))


@algorithm("aten.embedding.default", takes=_takes_embedding, sends=False)
def embedding(op: Any, table: Any, index: Any, *_: Any) -> Any:
    """The table is sharded by rows: a Partial(sum) on the mesh dims that cut them."""
    spec: DTensorSpec = table._spec
    rows = spec.mesh_dims_of(0)
    # The index is whole on these mesh dims, and as it is on the others.
    placements = [
        Replicate() if mesh_dim in rows or type(one) is Partial else one
        for mesh_dim, one in enumerate(index._spec.placements)
    ]
    found = _looked_up(op, table, 0, redistribute_local(index, placements), 1)
    outputs = [Partial("sum") if mesh_dim in rows else one for mesh_dim, one in enumerate(placements)]
    return wrapped(found, spec.mesh, outputs, (*index.shape, spec.shape[1]))


def _takes_select(tensor: Any, dim: int, index: Any) -> bool:
    if not tensor.ndim or index.ndim != 1 or tensor.dtype == torch.bool:
        return False
    return is_cut_plainly(tensor._spec, [dim % tensor.ndim]) and index._spec.is_replicated


@algorithm("aten.index_select.default", takes=_takes_select, sends=False)
def index_select(op: Any, source: Any, dim: int, index: Any) -> Any:
    """The tensor is sharded along dim: a Partial(sum) on the mesh dims that cut it."""
    spec: DTensorSpec = source._spec
    dim %= spec.ndim
    found = _looked_up(op, source, dim, index._local_tensor, 2)
    outputs = [Partial("sum") if split_dim(one) == dim else one for one in spec.placements]
    return wrapped(found, spec.mesh, outputs, (*spec.shape[:dim], index.shape[0], *spec.shape[dim + 1 :]))
