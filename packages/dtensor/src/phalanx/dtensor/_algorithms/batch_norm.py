"""Batch normalization in training with the batch, or space, sharded: statistics are those of all ranks together.

Forward moves three numbers for each channel and rank, backward two: the sums of the gradient, and of it times the
normalized input.
"""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor._algorithms.common import check_strict, is_cut_plainly, redistribute_local, reduced, wrapped
from phalanx.dtensor._algorithms.registry import algorithm
from phalanx.dtensor._algorithms.var_mean import moments
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._op_plan import bound
from phalanx.dtensor.placement_types import Replicate


def _is_cut_beside_channels(spec: DTensorSpec) -> bool:
    dims = [dim for dim in range(spec.ndim) if dim != 1]
    return spec.ndim >= 2 and spec.shape.numel() > 0 and is_cut_plainly(spec, dims) and not spec.mesh_dims_of(1)


def _is_whole(value: Any) -> bool:
    return value is None or value._spec.is_replicated


def _takes(values: Sequence[Any], choice: Any, moves: Sequence[Any]) -> bool:
    return bool(values[5]) and _is_cut_beside_channels(values[0]._spec) and all(map(_is_whole, values[1:5]))


def _line(spec: DTensorSpec) -> list[int]:
    return [-1 if dim == 1 else 1 for dim in range(spec.ndim)]


@algorithm("aten.native_batch_norm.default", takes=_takes)
def batch_norm(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(input, weight, bias, running_mean, running_var, training, momentum, eps) -> (output, save_mean, save_invstd)."""
    check_strict(op)
    tensor, weight, bias, running_mean, running_var, _, momentum, eps = bound(op, args, kwargs)
    spec: DTensorSpec = tensor._spec
    local = tensor._local_tensor
    exact = local.float() if local.dtype.itemsize < 4 else local
    mean, squares, count = moments(exact, spec, [dim for dim in range(spec.ndim) if dim != 1])
    inverse = (squares / count + eps).rsqrt()
    out = (exact - mean) * inverse
    if weight is not None:
        out = out * weight._local_tensor.reshape(_line(spec))
    if bias is not None:
        out = out + bias._local_tensor.reshape(_line(spec))
    mean, squares, inverse = mean.flatten(), squares.flatten(), inverse.flatten()
    for running, new in ((running_mean, mean), (running_var, squares / max(1, count - 1))):
        if running is not None:
            running._local_tensor.lerp_(new.to(running.dtype), momentum)
    whole = (Replicate(),) * spec.mesh.ndim
    return (
        wrapped(out.to(spec.dtype), spec.mesh, spec.placements, spec.shape, spec),
        wrapped(mean, spec.mesh, whole, mean.shape),
        wrapped(inverse, spec.mesh, whole, inverse.shape),
    )


def _takes_backward(values: Sequence[Any], choice: Any, moves: Sequence[Any]) -> bool:
    # (grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask)
    return bool(values[7]) and _is_cut_beside_channels(values[1]._spec) and all(map(_is_whole, values[2:7]))


@algorithm("aten.native_batch_norm_backward.default", takes=_takes_backward)
def batch_norm_backward(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """-> (grad_input, grad_weight, grad_bias), those that output_mask asks for."""
    check_strict(op)
    grad, tensor, weight, _, _, save_mean, save_inverse, _, _, mask = bound(op, args, kwargs)
    spec: DTensorSpec = tensor._spec
    line = _line(spec)
    others = [dim for dim in range(spec.ndim) if dim != 1]
    local = tensor._local_tensor
    exact = torch.float32 if local.dtype.itemsize < 4 else local.dtype
    gradient = redistribute_local(grad, spec.placements).to(exact)
    inverse = save_inverse._local_tensor.to(exact).reshape(line)
    normal = (local.to(exact) - save_mean._local_tensor.to(exact).reshape(line)) * inverse
    sums = torch.stack([gradient.sum(others), (gradient * normal).sum(others)])
    cut = [mesh_dim for mesh_dim, one in enumerate(spec.placements) if not one.is_replicate()]
    grad_bias, grad_weight = reduced(sums, "sum", spec.mesh, cut).unbind()
    results: list[Any] = [None, None, None]
    if mask[0]:
        count = spec.shape.numel() // int(spec.shape[1])
        part = gradient - grad_bias.reshape(line) / count - normal * grad_weight.reshape(line) / count
        factor = inverse if weight is None else inverse * weight._local_tensor.to(exact).reshape(line)
        results[0] = wrapped((part * factor).to(spec.dtype), spec.mesh, spec.placements, spec.shape, spec)
    whole = (Replicate(),) * spec.mesh.ndim
    kind = spec.dtype if weight is None else weight.dtype
    for index, one in ((1, grad_weight), (2, grad_bias)):
        if mask[index]:
            results[index] = wrapped(one.to(kind), spec.mesh, whole, one.shape)
    return results[0], results[1], results[2]
