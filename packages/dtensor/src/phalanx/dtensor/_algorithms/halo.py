"""Convolution on an input that is sharded in space: each rank gets the border that it lacks from those that have it.

An output is cut as chunks; for its chunk a rank needs a range of the input, its own part and a halo. Forward sends
halos, backward sends the gradients of halos back, where they are added. Moves the halos and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import phalanx.collectives as pc
from phalanx.dtensor import _layout
from phalanx.dtensor._algorithms.common import check_strict, is_cut_plainly, number_of, redistribute_local, wrapped
from phalanx.dtensor._algorithms.registry import algorithm
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._op_plan import bound
from phalanx.dtensor.placement_types import AnyPlacement, Partial, Replicate, split_dim

Range = tuple[int, int]
"""(begin, end) of global indices."""


@dataclass(frozen=True)
class _Halo:
    """Which rank has which range of the dim that is cut, and which range each needs.

    Attributes:
        mesh_dim: The mesh dim that cuts.
        dim: The dim of the input (and output).
        have: For each rank of the mesh dim, the range of the input that it has.
        need: The range of the input that its chunk of the output needs, what lies in padding left out.
        pads: For each rank, (before, after): how much of its window lies in padding.
        outputs: For each rank its range of the output.
    """

    mesh_dim: int
    dim: int
    have: tuple[Range, ...]
    need: tuple[Range, ...]
    pads: tuple[Range, ...]
    outputs: tuple[Range, ...]


def _chunks(size: int, count: int) -> tuple[Range, ...]:
    found = []
    for index in range(count):
        begin, length = _layout.chunk(size, count, index)
        found.append((int(begin), int(begin) + int(length)))
    return tuple(found)


def _halo(
    spec: DTensorSpec, weight: DTensorSpec, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> _Halo:
    ((mesh_dim, dim),) = _cuts_in_space(spec)
    place = dim - 2
    size = int(spec.shape[dim])
    step = stride[place % len(stride)]
    pad = padding[place % len(padding)]
    spread = dilation[place % len(dilation)]
    window = spread * (int(weight.shape[dim]) - 1) + 1
    count = spec.mesh.shape[mesh_dim]
    outputs = _chunks((size + 2 * pad - window) // step + 1, count)
    need, pads = [], []
    for begin, end in outputs:
        if begin == end:
            need.append((0, 0))
            pads.append((0, 0))
            continue
        low, high = begin * step - pad, (end - 1) * step - pad + window
        need.append((min(max(low, 0), size), max(min(high, size), 0)))
        pads.append((max(0, -low), max(0, high - size)))
    return _Halo(mesh_dim, dim, _chunks(size, count), tuple(need), tuple(pads), outputs)


def _cuts_in_space(spec: DTensorSpec) -> list[tuple[int, int]]:
    """(mesh dim, dim) of each cut of a dim in space."""
    found = []
    for mesh_dim, placement in enumerate(spec.placements):
        dim = split_dim(placement)
        if dim is not None and dim >= 2:
            found.append((mesh_dim, dim))
    return found


def _overlap(a: Range, b: Range) -> Range:
    begin, end = max(a[0], b[0]), min(a[1], b[1])
    return (begin, max(begin, end))


def _exchange(parts: list[torch.Tensor], shapes: list[list[int]], mesh: Any, mesh_dim: int) -> list[torch.Tensor]:
    """Send one part to each rank of a mesh dim, and get one of each. Collective."""
    flat = torch.cat([one.reshape(-1) for one in parts])
    into = [torch.Size(shape).numel() for shape in shapes]
    got = pc.wait_tensor(pc.all_to_all_single(flat, into, [one.numel() for one in parts], (mesh, mesh_dim)))
    return [one.reshape(shape) for one, shape in zip(torch.split(got, into), shapes, strict=True)]


def _with_halo(local: torch.Tensor, spec: DTensorSpec, halo: _Halo) -> torch.Tensor:
    """The part of the input that this rank's chunk of the output needs. Collective."""
    me = number_of(spec, [halo.mesh_dim])
    own = halo.have[me]
    parts, shapes = [], []
    for wanted, theirs in zip(halo.need, halo.have, strict=True):
        begin, end = _overlap(own, wanted)
        parts.append(local.narrow(halo.dim, begin - own[0] if end > begin else 0, end - begin))
        begin, end = _overlap(theirs, halo.need[me])
        shapes.append([end - begin if at == halo.dim else size for at, size in enumerate(local.shape)])
    return torch.cat(_exchange(parts, shapes, spec.mesh, halo.mesh_dim), halo.dim)


def _halo_back(grad: torch.Tensor, local_shape: Sequence[int], spec: DTensorSpec, halo: _Halo) -> torch.Tensor:
    """The gradient of this rank's part of the input, from the gradients of all windows. Collective."""
    me = number_of(spec, [halo.mesh_dim])
    own, window = halo.have[me], halo.need[me]
    parts, shapes, where = [], [], []
    for theirs, wanted in zip(halo.have, halo.need, strict=True):
        begin, end = _overlap(theirs, window)
        parts.append(grad.narrow(halo.dim, begin - window[0] if end > begin else 0, end - begin))
        begin, end = _overlap(own, wanted)
        shapes.append([end - begin if at == halo.dim else size for at, size in enumerate(local_shape)])
        where.append((begin - own[0], end - begin))
    total = grad.new_zeros(tuple(local_shape))
    for (begin, length), part in zip(where, _exchange(parts, shapes, spec.mesh, halo.mesh_dim), strict=True):
        if length:
            total.narrow(halo.dim, begin, length).add_(part)
    return total


def _padded(tensor: torch.Tensor, dim: int, pads: Range) -> torch.Tensor:
    if pads == (0, 0):
        return tensor
    sides = [0, 0] * (tensor.ndim - 1 - dim) + list(pads)
    return F.pad(tensor, sides)


def _without(values: Sequence[int], place: int, count: int) -> list[int]:
    """The padding that is left to the kernel: that of the other dims."""
    full = list(values) if len(values) == count else [values[0]] * count
    return [0 if at == place else one for at, one in enumerate(full)]


def _is_taken(data: DTensorSpec, weight: DTensorSpec, transposed: bool, groups: int) -> bool:
    if transposed or groups != 1 or data.ndim != weight.ndim or data.shape.numel() == 0:
        return False
    cuts = _cuts_in_space(data)
    if len(cuts) != 1 or not is_cut_plainly(data, [cuts[0][1]]) or not weight.is_replicated:
        return False
    return not data.mesh_dims_of(1)


def _takes(values: Sequence[Any], choice: Any, moves: Sequence[Any]) -> bool:
    bias = values[2]
    if bias is not None and not bias._spec.is_replicated:
        return False
    return _is_taken(values[0]._spec, values[1]._spec, values[6], values[8])


@algorithm("aten.convolution.default", takes=_takes)
def convolution(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups), input sharded in space."""
    check_strict(op)
    tensor, weight, bias, stride, padding, dilation, _, extra, groups = bound(op, args, kwargs)
    spec: DTensorSpec = tensor._spec
    halo = _halo(spec, weight._spec, stride, padding, dilation)
    me = number_of(spec, [halo.mesh_dim])
    window = _padded(_with_halo(tensor._local_tensor, spec, halo), halo.dim, halo.pads[me])
    kernel = weight._local_tensor
    local_bias = None if bias is None else bias._local_tensor
    shape = [spec.shape[0], weight.shape[0]]
    for dim in range(2, spec.ndim):
        at = dim - 2
        reach = dilation[at % len(dilation)] * (int(weight.shape[dim]) - 1) + 1
        size = int(spec.shape[dim]) + 2 * padding[at % len(padding)] - reach
        shape.append(size // stride[at % len(stride)] + 1)
    begin, end = halo.outputs[me]
    local_shape = [end - begin if dim == halo.dim else int(size) for dim, size in enumerate(shape)]
    local_shape[0] = tensor._local_tensor.shape[0]
    if 0 in local_shape:
        out = window.new_empty(local_shape)
    else:
        left = _without(padding, halo.dim - 2, spec.ndim - 2)
        out = op(window, kernel, local_bias, stride, left, dilation, False, extra, groups)
    return wrapped(out, spec.mesh, spec.placements, [int(one) for one in shape], spec)


def _takes_backward(values: Sequence[Any], choice: Any, moves: Sequence[Any]) -> bool:
    # (grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
    #  output_mask)
    return _is_taken(values[1]._spec, values[2]._spec, values[7], values[9])


@algorithm("aten.convolution_backward.default", takes=_takes_backward)
def convolution_backward(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """-> (grad_input, grad_weight, grad_bias); those of weight and bias are Partial where the input is cut."""
    check_strict(op)
    grad, tensor, weight, bias_sizes, stride, padding, dilation, _, extra, groups, mask = bound(op, args, kwargs)
    spec: DTensorSpec = tensor._spec
    halo = _halo(spec, weight._spec, stride, padding, dilation)
    me = number_of(spec, [halo.mesh_dim])
    gradient = redistribute_local(grad, spec.placements)
    inner = _with_halo(tensor._local_tensor, spec, halo)
    before, after = halo.pads[me]
    window = _padded(inner, halo.dim, (before, after))
    kernel = weight._local_tensor
    if gradient.numel():
        left = _without(padding, halo.dim - 2, spec.ndim - 2)
        found = op(gradient, window, kernel, bias_sizes, stride, left, dilation, False, extra, groups, mask)
    else:
        bias = kernel.new_zeros(kernel.shape[0])
        found = (torch.zeros_like(window), torch.zeros_like(kernel), bias)
    results: list[Any] = [None, None, None]
    if mask[0]:
        own = found[0].narrow(halo.dim, before, inner.shape[halo.dim])
        local = _halo_back(own, tensor._local_tensor.shape, spec, halo)
        results[0] = wrapped(local, spec.mesh, spec.placements, spec.shape, spec)
    sums: list[AnyPlacement] = [Replicate() if one.is_replicate() else Partial("sum") for one in spec.placements]
    if mask[1]:
        results[1] = wrapped(found[1], spec.mesh, sums, weight.shape, weight._spec)
    if mask[2]:
        results[2] = wrapped(found[2], spec.mesh, sums, (weight.shape[0],))
    return results[0], results[1], results[2]
