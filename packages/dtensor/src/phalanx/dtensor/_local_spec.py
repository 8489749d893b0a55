"""Helpers that derive a spec from a local tensor, and a local tensor from a whole one."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.types import IntLikeType

import phalanx.collectives as pc
from phalanx.dtensor import _layout
from phalanx.dtensor._dtensor_spec import DTensorSpec, normalize_placements
from phalanx.dtensor._mesh import Mesh, coordinate_of, mesh_id
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor.placement_types import Placement, Replicate, SizedShard, split_dim

# Specs by what from_local was given: to look them up costs less than to work them out.
_MOST_KEPT = 4096
_specs: dict[tuple[Any, ...], DTensorSpec] = {}


def spec_of_local(
    local: torch.Tensor,
    mesh: Mesh,
    placements: Sequence[Placement],
    shape: Sequence[IntLikeType] | None = None,
    stride: Sequence[IntLikeType] | None = None,
) -> DTensorSpec:
    """The spec of a tensor of which this rank has `local`; a ValueError if that is not its part. Not collective.

    By default the shape of the whole is as if all ranks had as much, and its stride as the local tensor lies.
    """
    key: tuple[Any, ...]
    try:
        key = (mesh_id(mesh), tuple(placements), local.shape, local.stride(), local.dtype, shape, stride)
        known = _specs.get(key)
    except TypeError:
        mesh_id(mesh)  # raises if it is not a mesh
        key, known = (), None
    if known is not None:
        return known
    placed = normalize_placements(mesh, placements, local.ndim if shape is None else len(shape))
    inside = coordinate_of(mesh) is not None
    whole = tuple(_layout.global_shape(local.shape, mesh.shape, placed)) if shape is None else tuple(shape)
    if inside and shape is not None:
        part = _layout.local_shape(whole, mesh.shape, placed, coordinate_of(mesh) or ())
        if tuple(part) != tuple(local.shape):
            raise ValueError(
                f"from_local: the local tensor has shape {tuple(local.shape)}, and this rank's part of a tensor of "
                f"shape {whole} with placements {list(placed)} has shape {tuple(part)}: Shard splits as torch.chunk; "
                "write SizedShard for other sizes"
            )
    if stride is None and inside:
        stride = _layout.global_stride(whole, local.shape, local.stride())
    spec = DTensorSpec(mesh, placed, torch.Size(whole), None if stride is None else tuple(stride), local.dtype)  # type: ignore[arg-type]
    if inside and shape is None and spec.local_shape != local.shape:
        # A SizedShard says how much this rank has.
        raise ValueError(
            f"from_local: the local tensor has shape {tuple(local.shape)}, and with placements {list(placed)} this "
            f"rank's part has shape {tuple(spec.local_shape)}: give shape=, or other sizes"
        )
    if key and type(spec) is DTensorSpec:
        if len(_specs) >= _MOST_KEPT:
            _specs.clear()
        _specs[key] = spec
    return spec


def local_part(tensor: torch.Tensor, spec: DTensorSpec, source: int | None) -> torch.Tensor:
    """This rank's part of a tensor that ranks have whole, in memory of its own or (if it is all) the tensor's.

    The source is the rank of each mesh dim whose values count, or None. With one it is collective over the mesh.
    """
    mesh = spec.mesh
    coordinate = coordinate_of(mesh)
    if coordinate is None:
        return tensor.new_empty(0)
    if source is not None:
        tensor = same_values(tensor, mesh, range(mesh.ndim), source)
    local = plan_redistribute(spec.replace(placements=(Replicate(),) * mesh.ndim), spec).run(tensor)
    is_piece = local is not tensor and any(split_dim(one) is not None for one in spec.placements)
    # A piece must not keep the memory of the whole, nor an order of dims that an empty one alone can have: ranks agree.
    if is_piece and (local._is_view() or tuple(local.stride()) != _layout.contiguous_stride(local.shape)):
        local = local.clone(memory_format=torch.contiguous_format)
    return local


def same_values(tensor: torch.Tensor, mesh: Mesh, mesh_dims: Iterable[int], source: int = 0) -> torch.Tensor:
    """The tensor as the rank with coordinate `source` in some mesh dims has it. Collective over these mesh dims."""
    if not isinstance(mesh, DeviceMesh) or mesh.size() == 1 or tensor.is_meta:
        return tensor
    for mesh_dim in mesh_dims:
        tensor = pc.wait_tensor(pc.broadcast(tensor.contiguous(), source, mesh.get_group(mesh_dim)))
    return tensor


def check_alike(
    local: torch.Tensor,
    mesh: Mesh,
    placements: Sequence[Placement],
    shape: Sequence[IntLikeType] | None,
    stride: Sequence[IntLikeType] | None,
    grad_placements: Sequence[Placement] | None,
) -> None:
    """Compare what ranks give to `from_local`, all that a spec holds included. Collective over the mesh.

    Every rank learns what all have before any raises a ValueError, so that all raise it.
    """
    if not isinstance(mesh, DeviceMesh):
        return
    mine: dict[str, Any] = {
        "dtype": str(local.dtype),
        "number of dims": local.ndim,
        "placements": str(list(placements)),
        "shape=": None if shape is None else tuple(shape),
        "stride=": None if stride is None else tuple(stride),
        "grad_placements": None if grad_placements is None else str(list(grad_placements)),
        "layout": str(local.layout),
        "device type": local.device.type,
        "requires_grad": local.requires_grad,
    }
    error = ""
    try:
        spec = spec_of_local(local, mesh, placements, shape, stride)
    except (ValueError, TypeError, IndexError, RuntimeError) as refusal:
        error = str(refusal)
    else:
        if shape is None and not any(type(one) is SizedShard for one in spec.placements):
            mine["shape of the local tensor"] = tuple(local.shape)
        mine["placements"] = str(list(spec.placements))
        mine["shape of the whole tensor"] = tuple(spec.shape)
        mine["stride of the whole tensor"] = tuple(spec.stride)
    ranks = [(tuple(mesh.get_coordinate() or ()), mine, error)]
    for mesh_dim in range(mesh.ndim):
        group = mesh.get_group(mesh_dim)
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, ranks, group=group)
        ranks = [one for part in found for one in part]
    ranks.sort()
    for what in mine:
        first = ranks[0][1].get(what)
        for coordinate, theirs, _ in ranks[1:]:
            if theirs.get(what) != first:
                raise ValueError(
                    f"from_local: run_check: ranks differ in the {what}: the rank at {ranks[0][0]} of the mesh has "
                    f"{first}, the one at {coordinate} has {theirs.get(what)}: {_ADVICE.get(what, _SAME)}"
                )
    for coordinate, _, text in ranks:
        if text:
            raise ValueError(f"from_local: run_check: on the rank at {coordinate} of the mesh: {text}")


_SAME = "give the same on every rank"
_ADVICE = {
    "shape of the local tensor": "if shards are uneven, give shape= of the whole tensor, and SizedShard(dim, sizes) if "
    "they are not the chunks of torch.chunk; replicated and Partial tensors must have one shape",
    "shape of the whole tensor": "give shape=",
    "stride of the whole tensor": "give stride= of the whole tensor, or contiguous() local tensors",
    "requires_grad": "the backward pass communicates, so all ranks must record gradients, or none",
}
