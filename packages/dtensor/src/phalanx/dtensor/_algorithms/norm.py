"""Norms over sharded dims: each rank has that of its part, and the norm of these is that of the whole.

Moves one number for each norm instead of the tensor; gradients are clipped by it. Orders whose norms a reduction adds
up (0, 1, inf and -inf) have a rule.
"""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor._algorithms.common import check_strict, gathered, without_dims, wrapped
from phalanx.dtensor._algorithms.registry import algorithm
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import coordinate_of
from phalanx.dtensor._op_plan import bound
from phalanx.dtensor.placement_types import Replicate, Shard, split_dim


def _arguments(values: Sequence[Any]) -> tuple[Any, list[int], bool]:
    """(order, dims, keepdim) of a call of any of the ops: (self, order, dims, keepdim) or the first two."""
    spec = values[0]._spec
    order = 2 if values[1] is None else values[1]
    given = values[2] if len(values) > 3 else None
    if given is None or given == []:
        given = range(spec.ndim)
    dims = [int(dim) % spec.ndim for dim in ([given] if isinstance(given, int) else given)]
    return order, dims, len(values) > 3 and bool(values[3])


def _takes(values: Sequence[Any], choice: Any, moves: Sequence[Any]) -> bool:
    spec = values[0]._spec
    if type(spec) is not DTensorSpec or not spec.ndim or coordinate_of(spec.mesh) is None or spec.is_partial:
        return False
    order, dims, _ = _arguments(values)
    if not spec.dtype.is_floating_point or not isinstance(order, (int, float)) or not 0 < order < float("inf"):
        return False
    # How the dims of the norm are cut does not matter, unlike in is_cut_plainly: it is a sum over all parts.
    kept = [one for one in spec.placements if split_dim(one) not in dims]
    return len(kept) < spec.mesh.ndim and all(isinstance(one, (Shard, Replicate)) for one in kept)


@algorithm(
    "aten.linalg_vector_norm.default",
    "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dim",
    "aten.norm.ScalarOpt_dim_dtype",
    takes=_takes,
)
def vector_norm(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """See `_arguments`; the last one may be a dtype."""
    check_strict(op)
    values = bound(op, args, kwargs)
    tensor = values[0]
    spec: DTensorSpec = tensor._spec
    order, dims, keepdim = _arguments(values)
    dtype = (values[4] if len(values) > 4 else None) or spec.dtype
    # Between the two norms 16-bit floats would be rounded once more than in one process.
    exact = torch.float32 if dtype.itemsize < 4 else dtype
    own = torch.linalg.vector_norm(tensor._local_tensor, order, dims, keepdim, dtype=exact)
    cut = [mesh_dim for mesh_dim, one in enumerate(spec.placements) if split_dim(one) in dims]
    norm = torch.linalg.vector_norm(gathered(own, spec.mesh, cut).flatten(0, -1 - own.ndim), order, 0)
    placements, shape = without_dims(spec, dims, keepdim)
    return wrapped(norm.to(dtype), spec.mesh, placements, shape)
