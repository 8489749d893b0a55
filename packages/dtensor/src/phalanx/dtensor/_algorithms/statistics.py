"""Norms, mean and variance over sharded dims, and batch normalization: each rank has those of its piece.

- The norm of the norms of all pieces is that of the whole. It moves one number for each; gradients are clipped by it.
  Orders whose norms a reduction adds up (0, 1, inf and -inf) have a rule.
- Means and variances are combined by Chan's formula: a count, a mean and a sum of squares for each piece move instead
  of the tensor. No sum of squares of what is not centred is taken: it would cancel.
- In the training of a batch norm with the batch, or space, sharded, statistics are those of all ranks together. Forward
  moves three numbers for each channel and rank, backward two: the sums of the gradient, and of it times the normalized
  input.

Source: Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance" (1983).
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from phalanx.dtensor._algorithms import common
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import coordinate_of
from phalanx.dtensor.placement_types import Replicate, Shard, split_dim


def _dims(spec: DTensorSpec, given: Any) -> list[int]:
    """Dims as an op is given them: a list, one, or none for all."""
    if given is None or given == []:
        return list(range(spec.ndim))
    return [int(dim) % spec.ndim for dim in ([given] if isinstance(given, int) else given)]


# ---- norms ----------------------------------------------------------------------------------------------------------


def _takes_norm(tensor: Any, order: Any, dims: Any = None, keepdim: Any = False, *_: Any) -> bool:
    spec = tensor._spec
    if type(spec) is not DTensorSpec or not spec.ndim or coordinate_of(spec.mesh) is None or spec.is_partial:
        return False
    order = 2 if order is None else order
    if not spec.dtype.is_floating_point or not isinstance(order, (int, float)) or not 0 < order < float("inf"):
        return False
    # How the dims of the norm are cut does not matter, unlike in is_cut_plainly: it is a sum over all parts.
    kept = [one for one in spec.placements if split_dim(one) not in _dims(spec, dims)]
    return len(kept) < spec.mesh.ndim and all(isinstance(one, (Shard, Replicate)) for one in kept)


@common.algorithm(
    "aten.linalg_vector_norm.default",
    "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dim",
    "aten.norm.ScalarOpt_dim_dtype",
    takes=_takes_norm,
)
def vector_norm(op: Any, tensor: Any, order: Any, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Some of the ops have the first two arguments only."""
    spec: DTensorSpec = tensor._spec
    order, dims, dtype = 2 if order is None else order, _dims(spec, dims), dtype or spec.dtype
    # Between the two norms 16-bit floats would be rounded once more than in one process.
    exact = torch.float32 if dtype.itemsize < 4 else dtype
    own = torch.linalg.vector_norm(tensor._local_tensor, order, dims, keepdim, dtype=exact)
    cut = [mesh_dim for mesh_dim, one in enumerate(spec.placements) if split_dim(one) in dims]
    norm = torch.linalg.vector_norm(common.gathered(own, spec.mesh, cut).flatten(0, -1 - own.ndim), order, 0)
    return common.wrapped(norm.to(dtype), spec.mesh, *common.without_dims(spec, dims, keepdim))


# ---- mean and variance ----------------------------------------------------------------------------------------------


def moments(local: torch.Tensor, spec: DTensorSpec, dims: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(mean, sum of squared distances from it, number of elements) over dims of the whole tensor. Collective.

    The local tensor has floats, placements are Shard and Replicate only, and the dims are left with size 1.
    """
    cut = sorted({mesh_dim for dim in dims for mesh_dim in spec.mesh_dims_of(dim)})
    count = prod(local.shape[dim] for dim in dims)
    if count:
        mean = local.mean(list(dims), keepdim=True)
        squares = (local - mean).square().sum(list(dims), keepdim=True)
    else:
        mean = local.new_zeros([1 if dim in dims else size for dim, size in enumerate(local.shape)])
        squares = torch.zeros_like(mean)
    parts = common.gathered(torch.stack([torch.full_like(mean, count), mean, squares]), spec.mesh, cut)
    total, mean, squares = parts[0].unbind()
    for one in parts[1:]:
        other_count, other_mean, other_squares = one.unbind()
        both = total + other_count
        share = torch.where(both > 0, other_count / both.clamp(min=1), torch.zeros_like(both))
        apart = other_mean - mean
        squares = squares + other_squares + apart.square() * total * share
        mean = mean + apart * share
        total = both
    return mean, squares, prod(int(spec.shape[dim]) for dim in dims)


def _takes_variance(tensor: Any, dims: Any, *_: Any) -> bool:
    spec = tensor._spec
    if not spec.ndim or not spec.dtype.is_floating_point or spec.shape.numel() == 0:
        return False
    return common.is_cut_plainly(spec, _dims(spec, dims))


@common.algorithm(
    "aten.var.correction",
    "aten.std.correction",
    "aten.var_mean.correction",
    "aten.std_mean.correction",
    takes=_takes_variance,
)
def variance(op: Any, tensor: Any, dims: Any, correction: Any, keepdim: bool) -> Any:
    """-> the variance or its root, or (it, mean)."""
    local, spec = common.without_partial(tensor)
    dims = _dims(spec, dims)
    mean, squares, count = moments(common.computed(local), spec, dims)
    found = squares / max(0, count - (1 if correction is None else correction))
    name = op._schema.name.split("::")[1]
    if name.startswith("std"):
        found = found.sqrt()
    placements, shape = common.without_dims(spec, dims, keepdim)
    results = [one if keepdim else one.squeeze(dims) for one in (found, mean)]
    done = [common.wrapped(one.to(spec.dtype), spec.mesh, placements, shape) for one in results]
    return tuple(done) if name.endswith("mean") else done[0]


# ---- batch normalization --------------------------------------------------------------------------------------------


def _is_for_us(is_training: bool, spec: DTensorSpec, others: Sequence[Any]) -> bool:
    """Whether the batch or space is cut, the channels are not, and the others are replicated or absent."""
    if not is_training or spec.ndim < 2 or not spec.shape.numel() or spec.mesh_dims_of(1):
        return False
    is_cut = common.is_cut_plainly(spec, [0, *range(2, spec.ndim)])
    return is_cut and all(one is None or one._spec.is_replicated for one in others)


def _takes_batch_norm(tensor: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any) -> bool:
    return _is_for_us(training, tensor._spec, (weight, bias, mean, var))


@common.algorithm("aten.native_batch_norm.default", takes=_takes_batch_norm)
def batch_norm(
    op: Any, tensor: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, _: bool, momentum: Any, eps: Any
) -> tuple[Any, Any, Any]:
    """-> (output, save_mean, save_invstd)."""
    spec: DTensorSpec = tensor._spec
    line = [1, -1, *[1] * (spec.ndim - 2)]
    exact = common.computed(tensor._local_tensor)
    mean, squares, count = moments(exact, spec, [0, *range(2, spec.ndim)])
    inverse = (squares / count + eps).rsqrt()
    out = (exact - mean) * inverse
    if weight is not None:
        out = out * weight._local_tensor.reshape(line)
    if bias is not None:
        out = out + bias._local_tensor.reshape(line)
    mean, squares, inverse = mean.flatten(), squares.flatten(), inverse.flatten()
    for running, new in ((running_mean, mean), (running_var, squares / max(1, count - 1))):
        if running is not None:
            running._local_tensor.lerp_(new.to(running.dtype), momentum)
    return (
        common.as_before(out.to(spec.dtype), spec),
        common.replicated(mean, spec.mesh),
        common.replicated(inverse, spec.mesh),
    )


def _takes_batch_norm_backward(grad: Any, tensor: Any, *rest: Any) -> bool:
    # (weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask)
    return _is_for_us(rest[5], tensor._spec, rest[:5])


@common.algorithm("aten.native_batch_norm_backward.default", takes=_takes_batch_norm_backward)
def batch_norm_backward(
    op: Any,
    grad: Any,
    tensor: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_inverse: Any,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """-> (grad_input, grad_weight, grad_bias), those that output_mask asks for."""
    spec: DTensorSpec = tensor._spec
    line = [1, -1, *[1] * (spec.ndim - 2)]
    others = [0, *range(2, spec.ndim)]
    local = common.computed(tensor._local_tensor)
    exact = local.dtype
    gradient = common.redistribute_local(grad, spec.placements).to(exact)
    inverse = save_inverse._local_tensor.to(exact).reshape(line)
    normal = (local - save_mean._local_tensor.to(exact).reshape(line)) * inverse
    sums = torch.stack([gradient.sum(others), (gradient * normal).sum(others)])
    cut = [mesh_dim for mesh_dim, one in enumerate(spec.placements) if not one.is_replicate()]
    grad_bias, grad_weight = common.reduced(sums, "sum", spec.mesh, cut).unbind()
    grad_input = None
    if mask[0]:
        count = spec.shape.numel() // int(spec.shape[1])
        part = gradient - grad_bias.reshape(line) / count - normal * grad_weight.reshape(line) / count
        factor = inverse if weight is None else inverse * weight._local_tensor.to(exact).reshape(line)
        grad_input = common.as_before((part * factor).to(spec.dtype), spec)
    kind = spec.dtype if weight is None else weight.dtype
    of_weight, of_bias = (
        common.replicated(one.to(kind), spec.mesh) if wanted else None
        for one, wanted in zip((grad_weight, grad_bias), mask[1:], strict=True)
    )
    return grad_input, of_weight, of_bias
