"""max, min, argmax, topk and scans along a sharded dim: each rank works on its piece, and the results are put together.

Moves for each piece one value and one index of the maximum, the best k, or the total that those after it take in,
instead of the tensor.
"""

from typing import Any

import torch

from phalanx.dtensor import _layout
from phalanx.dtensor._algorithms import common
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._op_plan import call_bound
from phalanx.dtensor._rules.local_adjustments import neutral
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.placement_types import Shard

# ---- the largest or smallest: the first of the best wins ------------------------------------------------------------


def _takes(tensor: Any, dim: int | None, *_: Any) -> bool:
    spec = tensor._spec
    if not spec.ndim or spec.shape.numel() == 0 or spec.dtype.is_complex:
        return False
    return common.is_cut_plainly(spec, range(spec.ndim) if dim is None else [dim % spec.ndim])


@common.algorithm("aten.max.dim", "aten.min.dim", takes=_takes)
def extreme(op: Any, tensor: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """-> (values, indices)."""
    return _along(tensor, dim, op._schema.name.endswith("max"), keepdim)


@common.algorithm("aten.argmax.default", "aten.argmin.default", takes=_takes)
def arg_extreme(op: Any, tensor: Any, dim: int | None, keepdim: bool) -> Any:
    """Without a dim, the index in the flat tensor."""
    largest = op._schema.name.endswith("argmax")
    return _of_all(tensor, largest, keepdim) if dim is None else _along(tensor, dim, largest, keepdim)[1]


def _along(tensor: Any, dim: int, largest: bool, keepdim: bool) -> tuple[DTensor, DTensor]:
    """(values, global indices) of the best of each line along a dim. Collective."""
    local, spec = common.without_partial(tensor)
    dim %= spec.ndim
    if local.shape[dim]:
        values, indices = local.max(dim) if largest else local.min(dim)
        indices = indices + common.offset_of(spec, dim)
    else:
        shape = tuple(size for index, size in enumerate(local.shape) if index != dim)
        values = torch.full(shape, neutral("max" if largest else "min", local.dtype), dtype=local.dtype)
        indices = torch.full(shape, spec.shape[dim], dtype=torch.int64)
    # The pieces ascend, and of equal ones torch takes the first.
    all_values, all_indices = (common.gathered(one, spec.mesh, spec.mesh_dims_of(dim)) for one in (values, indices))
    values, piece = all_values.max(0) if largest else all_values.min(0)
    indices = all_indices.gather(0, piece.unsqueeze(0)).squeeze(0)
    if keepdim:
        values, indices = values.unsqueeze(dim), indices.unsqueeze(dim)
    where = (spec.mesh, *common.without_dims(spec, [dim], keepdim))
    return common.wrapped(values, *where), common.wrapped(indices, *where)


def _of_all(tensor: Any, largest: bool, keepdim: bool) -> Any:
    local, spec = common.without_partial(tensor)
    if local.numel():
        values, at = local.flatten().max(0) if largest else local.flatten().min(0)
        whole = 0
        for dim, index in enumerate(torch.unravel_index(at, local.shape)):
            whole = whole * int(spec.shape[dim]) + int(index) + common.offset_of(spec, dim)
        indices = torch.tensor(whole)
    else:
        values = torch.tensor(neutral("max" if largest else "min", local.dtype), dtype=local.dtype)
        indices = torch.tensor(spec.shape.numel())
    mesh_dims = [index for index, one in enumerate(spec.placements) if not one.is_replicate()]
    all_values, all_indices = (common.gathered(one, spec.mesh, mesh_dims) for one in (values, indices))
    best = all_values.max() if largest else all_values.min()
    # Pieces do not ascend in the flat tensor: of equal ones the lowest index counts.
    equal = all_values.isnan() if bool(best.isnan()) else all_values == best
    return common.replicated(all_indices[equal].min().reshape((1,) * spec.ndim if keepdim else ()), spec.mesh)


# ---- topk: the best k of each piece are gathered, and the best k of these are the result ----------------------------


def _takes_topk(tensor: Any, k: int, dim: int, *_: Any) -> bool:
    spec = tensor._spec
    if not spec.ndim or spec.dtype.is_complex or not common.is_cut_plainly(spec, [dim % spec.ndim]):
        return False
    dim %= spec.ndim
    mesh_dims = spec.mesh_dims_of(dim)
    if len(mesh_dims) != 1:
        return False
    # Every piece has k to give, so that nothing stands for what is missing.
    sizes = _layout.piece_sizes(spec.shape[dim], Shard(dim), spec.mesh.shape[mesh_dims[0]])
    return min(int(one) for one in sizes) >= max(1, int(k))


@common.algorithm("aten.topk.default", takes=_takes_topk)
def topk(op: Any, tensor: Any, k: int, dim: int, largest: bool, is_sorted: bool) -> tuple[Any, Any]:
    """-> (values, indices)."""
    local, spec = common.without_partial(tensor)
    dim %= spec.ndim
    values, indices = local.topk(k, dim, largest, True)
    indices = indices + common.offset_of(spec, dim)
    candidates, places = (
        torch.cat(list(common.gathered(one, spec.mesh, spec.mesh_dims_of(dim))), dim) for one in (values, indices)
    )
    found, at = candidates.topk(k, dim, largest, is_sorted)
    placements, _ = common.without_dims(spec, [dim], keepdim=True)
    where = spec.mesh, placements, (*spec.shape[:dim], k, *spec.shape[dim + 1 :])
    return common.wrapped(found, *where), common.wrapped(places.gather(dim, at), *where)


# ---- scans: each rank scans its piece and takes in the totals before it ---------------------------------------------


def _takes_scan(tensor: Any, dim: int, *_: Any) -> bool:
    spec: DTensorSpec = tensor._spec
    return spec.ndim > 0 and spec.shape.numel() > 0 and common.is_cut_plainly(spec, [dim % spec.ndim])


@common.algorithm("aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default", takes=_takes_scan)
def scan(op: Any, tensor: Any, dim: int, *dtype: Any) -> DTensor:
    """The last argument, if there is one, is the dtype."""
    local, spec = common.without_partial(tensor)
    out = call_bound(op, [local, dim, *dtype])
    dim %= spec.ndim
    mesh_dims = spec.mesh_dims_of(dim)
    name = op._schema.name.split("::")[1]
    if name == "logcumsumexp":
        total = local.logsumexp(dim, keepdim=True)
    else:
        total = (local.sum if name == "cumsum" else local.prod)(dim, keepdim=True, dtype=out.dtype)
    totals = common.gathered(total, spec.mesh, mesh_dims)[: common.number_of(spec, mesh_dims)]
    if totals.shape[0]:
        if name == "logcumsumexp":
            out = torch.logaddexp(totals.logsumexp(0), out)
        elif name == "cumsum":
            out += totals.sum(0, dtype=out.dtype)
        else:
            out *= totals.prod(0, dtype=out.dtype)
    return common.as_before(out, spec)
