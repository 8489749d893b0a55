"""Lookups along a sharded dim: each rank looks up what it has and gives zeros for the rest; the results are one sum.

Nothing moves: embedding on a table that is sharded by rows leaves a Partial.
"""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor._algorithms.common import algorithm, is_cut_plainly, offset_of, redistribute_local, wrapped
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._index_bounds import Bound, check_bounds
from phalanx.dtensor.placement_types import AnyPlacement, Partial, Replicate, Shard, split_dim


def _whole_on(spec: DTensorSpec, mesh_dims: Sequence[int]) -> tuple[AnyPlacement, ...]:
    """The placements of an index: whole on the mesh dims that cut the table, as it is on the others."""
    return tuple(
        Replicate() if mesh_dim in mesh_dims or type(one) is Partial else one
        for mesh_dim, one in enumerate(spec.placements)
    )


def _takes_embedding(weight: Any, indices: Any, *_: Any) -> bool:
    table, index = weight._spec, indices._spec
    if not is_cut_plainly(table, [0]) or weight.dtype == torch.bool:
        return False
    # Mesh dims that do not cut the rows have both as they are; one that cuts columns and index is for the rule.
    return all(
        (isinstance(cut, Shard) and cut.dim == 0) or (cut.is_replicate() and isinstance(own, (Shard, Replicate)))
        for cut, own in zip(table.placements, index.placements, strict=True)
    )


@algorithm("aten.embedding.default", takes=_takes_embedding, sends=False)
def embedding(op: Any, table: Any, index: Any, *_: Any) -> Any:
    """The table is sharded by rows: a Partial(sum) on the mesh dims that cut them."""
    spec: DTensorSpec = table._spec
    rows = spec.mesh_dims_of(0)
    placements = _whole_on(index._spec, rows)
    wanted = redistribute_local(index, placements)
    check_bounds(op, wanted, Bound(1, None, 0, int(spec.shape[0]), False, IndexError))
    here, is_here = _within(wanted, spec, 0)
    weight = table._local_tensor
    if weight.shape[0]:
        found = torch.where(is_here.unsqueeze(-1), op(weight, here), torch.zeros((), dtype=weight.dtype))
    else:
        found = weight.new_zeros((*wanted.shape, weight.shape[1]))
    outputs = [Partial("sum") if mesh_dim in rows else one for mesh_dim, one in enumerate(placements)]
    return wrapped(found, spec.mesh, outputs, (*index.shape, spec.shape[1]))


def _within(index: torch.Tensor, spec: DTensorSpec, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(local indices, which of them this rank has); of what it has not, index 0."""
    local = index - offset_of(spec, dim)
    inside = (local >= 0) & (local < spec.local_shape[dim])
    return torch.where(inside, local, torch.zeros_like(local)), inside


def _takes_select(tensor: Any, dim: int, index: Any) -> bool:
    if not tensor.ndim or index.ndim != 1 or tensor.dtype == torch.bool:
        return False
    return is_cut_plainly(tensor._spec, [dim % tensor.ndim]) and index._spec.is_replicated


@algorithm("aten.index_select.default", takes=_takes_select, sends=False)
def index_select(op: Any, source: Any, dim: int, index: Any) -> Any:
    """The tensor is sharded along dim: a Partial(sum) on the mesh dims that cut it."""
    spec: DTensorSpec = source._spec
    dim %= spec.ndim
    check_bounds(op, index._local_tensor, Bound(2, None, dim, int(spec.shape[dim]), False, IndexError))
    here, is_here = _within(index._local_tensor, spec, dim)
    local = source._local_tensor
    shape = [index.shape[0] if at == dim else size for at, size in enumerate(local.shape)]
    if local.shape[dim]:
        line = [-1 if at == dim else 1 for at in range(spec.ndim)]
        found = torch.where(is_here.reshape(line), op(local, dim, here), torch.zeros((), dtype=local.dtype))
    else:
        found = local.new_zeros(shape)
    outputs = [Partial("sum") if split_dim(one) == dim else one for one in spec.placements]
    whole = [index.shape[0] if at == dim else int(size) for at, size in enumerate(spec.shape)]
    return wrapped(found, spec.mesh, outputs, whole)
