"""Mean and variance over sharded dims: each rank has those of its piece, and they are combined by Chan's formula.

Moves a count, a mean and a sum of squares for each piece instead of the tensor. No sum of squares of what is not
centred is taken: it would cancel.

Source: Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance" (1983).
"""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor._algorithms.common import (
    check_strict,
    gathered,
    is_cut_plainly,
    without_dims,
    without_partial,
    wrapped,
)
from phalanx.dtensor._algorithms.registry import algorithm
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._op_plan import bound


def _dims(spec: DTensorSpec, given: Any) -> list[int]:
    if given is None or given == []:
        return list(range(spec.ndim))
    return [int(dim) % spec.ndim for dim in given]


def moments(local: torch.Tensor, spec: DTensorSpec, dims: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(mean, sum of squared distances from it, number of elements) over dims of the whole tensor. Collective.

    Args:
        local: The local tensor, of floats.
        spec: The spec of the tensor; Shard and Replicate only.
        dims: The dims to reduce; they are left with size 1.
    """
    cut = sorted({mesh_dim for dim in dims for mesh_dim in spec.mesh_dims_of(dim)})
    count = 1
    for dim in dims:
        count *= local.shape[dim]
    if count:
        mean = local.mean(list(dims), keepdim=True)
        squares = (local - mean).square().sum(list(dims), keepdim=True)
    else:
        shape = [1 if dim in dims else size for dim, size in enumerate(local.shape)]
        mean = local.new_zeros(shape)
        squares = local.new_zeros(shape)
    part = torch.stack([torch.full_like(mean, count), mean, squares])
    total, mean, squares = part.unbind()
    for index, one in enumerate(gathered(part, spec.mesh, cut)):
        other_count, other_mean, other_squares = one.unbind()
        if index == 0:
            total, mean, squares = other_count, other_mean, other_squares
            continue
        both = total + other_count
        share = torch.where(both > 0, other_count / both.clamp(min=1), torch.zeros_like(both))
        apart = other_mean - mean
        squares = squares + other_squares + apart.square() * total * share
        mean = mean + apart * share
        total = both
    whole = 1
    for dim in dims:
        whole *= int(spec.shape[dim])
    return mean, squares, whole


def _takes(values: Sequence[Any], choice: Any, moves: Sequence[Any]) -> bool:
    spec = values[0]._spec
    if not spec.ndim or not spec.dtype.is_floating_point or spec.shape.numel() == 0:
        return False
    return is_cut_plainly(spec, _dims(spec, values[1]))


@algorithm(
    "aten.var.correction",
    "aten.std.correction",
    "aten.var_mean.correction",
    "aten.std_mean.correction",
    takes=_takes,
)
def variance(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """(self, dim, *, correction, keepdim)."""
    check_strict(op)
    tensor, given, correction, keepdim = bound(op, args, kwargs)
    local, spec = without_partial(tensor)
    dims = _dims(spec, given)
    # torch takes moments of 16-bit floats in float32, too.
    exact = local.float() if local.dtype.itemsize < 4 else local
    mean, squares, count = moments(exact, spec, dims)
    left = count - (1 if correction is None else correction)
    found = squares / max(0, left)
    name = op._schema.name.split("::")[1]
    if name.startswith("std"):
        found = found.sqrt()
    placements, shape = without_dims(spec, dims, keepdim)
    results = [one if keepdim else one.squeeze(dims) for one in (found, mean)]
    done = [wrapped(one.to(spec.dtype), spec.mesh, placements, shape) for one in results]
    return tuple(done) if name.endswith("mean") else done[0]
