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
from phalanx.dtensor._algorithms.common import (
    algorithm,
    as_before,
    is_cut_plainly,
    number_of,
    redistribute_local,
    wrapped,
)
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor.placement_types import AnyPlacement, Partial, Replicate, split_dim

Range = tuple[int, int]
"""(begin, end) of global indices."""


@dataclass(frozen=True)
class _Halo:
    """Which rank has which range of the dim that is cut, and which range each needs."""

    mesh_dim: int  # the mesh dim that cuts
    dim: int  # the dim of the input (and output)
    have: tuple[Range, ...]  # for each rank of the mesh dim, the range of the input that it has
    need: tuple[Range, ...]  # the range that its chunk of the output needs, what lies in padding left out
    pads: tuple[Range, ...]  # (before, after): how much of its window lies in padding
    outputs: tuple[Range, ...]  # its range of the output


def _chunks(size: int, count: int) -> tuple[Range, ...]:
    chunks = (_layout.chunk(size, count, index) for index in range(count))
    return tuple((int(begin), int(begin) + int(length)) for begin, length in chunks)


def _steps(
    weight: Any, dim: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int, int]:
    """(stride, padding, extent of the kernel) along a dim of the input; lists have a value for each or one for all."""
    step, pad, spread = (one[(dim - 2) % len(one)] for one in (stride, padding, dilation))
    return step, pad, spread * (int(weight.shape[dim]) - 1) + 1


def _halo(
    spec: DTensorSpec, weight: DTensorSpec, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> _Halo:
    ((mesh_dim, dim),) = _cuts_in_space(spec)
    size, count = int(spec.shape[dim]), spec.mesh.shape[mesh_dim]
    step, pad, window = _steps(weight, dim, stride, padding, dilation)
    outputs = _chunks((size + 2 * pad - window) // step + 1, count)
    need, pads = [], []
    for begin, end in outputs:
        low, high = (begin * step - pad, (end - 1) * step - pad + window) if begin < end else (0, 0)
        need.append((min(max(low, 0), size), max(min(high, size), 0)))
        pads.append((max(0, -low), max(0, high - size)))
    return _Halo(mesh_dim, dim, _chunks(size, count), tuple(need), tuple(pads), outputs)


def _cuts_in_space(spec: DTensorSpec) -> list[tuple[int, int]]:
    """(mesh dim, dim) of each cut of a dim in space."""
    dims = enumerate(map(split_dim, spec.placements))
    return [(mesh_dim, dim) for mesh_dim, dim in dims if dim is not None and dim >= 2]


def _overlap(a: Range, b: Range) -> Range:
    begin, end = max(a[0], b[0]), min(a[1], b[1])
    return (begin, max(begin, end))


def _exchange(
    tensor: torch.Tensor, begin: int, sent: Sequence[Range], received: Sequence[Range], spec: DTensorSpec, halo: _Halo
) -> list[torch.Tensor]:
    """Send a range to each rank of a mesh dim, of a tensor that begins at an index, and get one of each. Collective."""
    parts = [tensor.narrow(halo.dim, low - begin if high > low else 0, high - low) for low, high in sent]
    shapes = [
        torch.Size(high - low if at == halo.dim else size for at, size in enumerate(tensor.shape))
        for low, high in received
    ]
    into, out = [one.numel() for one in shapes], [one.numel() for one in parts]
    flat = torch.cat([one.reshape(-1) for one in parts])
    got = pc.wait_tensor(pc.all_to_all_single(flat, into, out, (spec.mesh, halo.mesh_dim)))  # type: ignore[arg-type]
    return [one.reshape(shape) for one, shape in zip(torch.split(got, into), shapes, strict=True)]


def _with_halo(local: torch.Tensor, spec: DTensorSpec, halo: _Halo) -> torch.Tensor:
    """The part of the input that this rank's chunk of the output needs. Collective."""
    me = number_of(spec, [halo.mesh_dim])
    own, window = halo.have[me], halo.need[me]
    sent = [_overlap(own, wanted) for wanted in halo.need]
    received = [_overlap(theirs, window) for theirs in halo.have]
    return torch.cat(_exchange(local, own[0], sent, received, spec, halo), halo.dim)


def _halo_back(grad: torch.Tensor, local_shape: Sequence[int], spec: DTensorSpec, halo: _Halo) -> torch.Tensor:
    """The gradient of this rank's part of the input, from the gradients of all windows. Collective."""
    me = number_of(spec, [halo.mesh_dim])
    own, window = halo.have[me], halo.need[me]
    sent = [_overlap(theirs, window) for theirs in halo.have]
    received = [_overlap(own, wanted) for wanted in halo.need]
    total = grad.new_zeros(tuple(local_shape))
    for (begin, end), part in zip(received, _exchange(grad, window[0], sent, received, spec, halo), strict=True):
        if end > begin:
            total.narrow(halo.dim, begin - own[0], end - begin).add_(part)
    return total


def _padded(tensor: torch.Tensor, dim: int, pads: Range) -> torch.Tensor:
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + list(pads)) if any(pads) else tensor


def _without(values: Sequence[int], place: int, count: int) -> list[int]:
    """The padding that is left to the kernel: that of the other dims."""
    full = list(values) if len(values) == count else [values[0]] * count
    return [0 if at == place else one for at, one in enumerate(full)]


def _is_taken(tensor: Any, weight: Any, transposed: bool, groups: int) -> bool:
    data: DTensorSpec = tensor._spec
    if transposed or groups != 1 or data.ndim != weight.ndim or data.shape.numel() == 0:
        return False
    cuts = _cuts_in_space(data)
    if len(cuts) != 1 or not is_cut_plainly(data, [cuts[0][1]]) or not weight._spec.is_replicated:
        return False
    return not data.mesh_dims_of(1)


def _takes(tensor: Any, weight: Any, bias: Any, *rest: Any) -> bool:
    # (stride, padding, dilation, transposed, output_padding, groups)
    return (bias is None or bias._spec.is_replicated) and _is_taken(tensor, weight, rest[3], rest[5])


@algorithm("aten.convolution.default", takes=_takes)
def convolution(op: Any, tensor: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """(stride, padding, dilation, transposed, output_padding, groups) follow; the input is sharded in space."""
    stride, padding, dilation, _, extra, groups = rest
    spec: DTensorSpec = tensor._spec
    halo = _halo(spec, weight._spec, stride, padding, dilation)
    me = number_of(spec, [halo.mesh_dim])
    window = _padded(_with_halo(tensor._local_tensor, spec, halo), halo.dim, halo.pads[me])
    local_bias = None if bias is None else bias._local_tensor
    shape = [spec.shape[0], weight.shape[0]]
    for dim in range(2, spec.ndim):
        step, pad, reach = _steps(weight, dim, stride, padding, dilation)
        shape.append((int(spec.shape[dim]) + 2 * pad - reach) // step + 1)
    begin, end = halo.outputs[me]
    local_shape = [end - begin if dim == halo.dim else int(size) for dim, size in enumerate(shape)]
    local_shape[0] = tensor._local_tensor.shape[0]
    if 0 in local_shape:
        out = window.new_empty(local_shape)
    else:
        left = _without(padding, halo.dim - 2, spec.ndim - 2)
        out = op(window, weight._local_tensor, local_bias, stride, left, dilation, False, extra, groups)
    return wrapped(out, spec.mesh, spec.placements, [int(one) for one in shape], spec)


def _takes_backward(grad: Any, tensor: Any, weight: Any, sizes: Any, *rest: Any) -> bool:
    # (stride, padding, dilation, transposed, output_padding, groups, output_mask)
    return _is_taken(tensor, weight, rest[3], rest[5])


@algorithm("aten.convolution_backward.default", takes=_takes_backward)
def convolution_backward(
    op: Any, grad: Any, tensor: Any, weight: Any, bias_sizes: Any, *rest: Any
) -> tuple[Any, Any, Any]:
    """-> (grad_input, grad_weight, grad_bias); those of weight and bias are Partial where the input is cut."""
    stride, padding, dilation, _, extra, groups, mask = rest
    spec: DTensorSpec = tensor._spec
    halo = _halo(spec, weight._spec, stride, padding, dilation)
    pads = halo.pads[number_of(spec, [halo.mesh_dim])]
    gradient = redistribute_local(grad, spec.placements)
    inner = _with_halo(tensor._local_tensor, spec, halo)
    window, kernel = _padded(inner, halo.dim, pads), weight._local_tensor
    if gradient.numel():
        left = _without(padding, halo.dim - 2, spec.ndim - 2)
        found = op(gradient, window, kernel, bias_sizes, stride, left, dilation, False, extra, groups, mask)
    else:
        found = (torch.zeros_like(window), torch.zeros_like(kernel), kernel.new_zeros(kernel.shape[0]))
    results: list[Any] = [None, None, None]
    if mask[0]:
        own = found[0].narrow(halo.dim, pads[0], inner.shape[halo.dim])
        results[0] = as_before(_halo_back(own, tensor._local_tensor.shape, spec, halo), spec)
    sums: list[AnyPlacement] = [Replicate() if one.is_replicate() else Partial("sum") for one in spec.placements]
    if mask[1]:
        results[1] = wrapped(found[1], spec.mesh, sums, weight.shape, weight._spec)
    if mask[2]:
        results[2] = wrapped(found[2], spec.mesh, sums, (weight.shape[0],))
    return results[0], results[1], results[2]
