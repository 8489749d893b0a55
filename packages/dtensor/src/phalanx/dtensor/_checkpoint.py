"""Saving and loading: what torch.distributed.checkpoint asks of a tensor, how its state dicts are gathered and loaded,
and which classes torch.load may make.

A local tensor is written as the boxes of the whole tensor that it holds: one for each combination of the runs of its
dims (see `_layout`), so that it can be read back in any other placements, on any other mesh. Ranks that have the same
box give it the same name, and the checkpoint writes it once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from phalanx.dtensor import _api, _layout, _local_spec
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import AbstractMesh, coordinate_of
from phalanx.dtensor._redistribute.comm import wait_if_pending
from phalanx.dtensor._redistribute.local_steps import narrowed
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import either_dtensor, when_state_dicts_are_imported
from phalanx.dtensor.placement_types import AnyPlacement, Partial, Replicate, Shard, SizedShard, StridedShard


def _boxes(tensor: Any) -> list[_layout.Block]:
    """The boxes of the whole tensor that this rank has."""
    spec: DTensorSpec = tensor._spec
    if spec.is_partial:
        raise RuntimeError(
            f"checkpoint: a DTensor with placements {list(spec.placements)} cannot be saved or loaded, because no "
            "rank has its values; redistribute it to Replicate() or Shard(dim) first"
        )
    if coordinate_of(spec.mesh) is None:
        return []
    if not spec.shape.numel():
        # Nothing to write, but its shape is to be known.
        return [_layout.Block((0,) * spec.ndim, (0,) * spec.ndim, tuple(spec.shape))]
    return list(_layout.boxes(spec.local_runs))


# ---- the protocol of torch.distributed.checkpoint -------------------------------------------------------------------


def write_items(fqn: str, tensor: Any) -> list[Any]:
    """The parts of a DTensor that this rank writes, under the name of the tensor in the state dict. Not collective.

    A WriteItem of torch.distributed.checkpoint for each box; none on a rank outside the mesh or without elements.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(wait_if_pending(tensor._local_tensor))
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in chunk_list(tensor)
    ]


def chunk_list(tensor: Any) -> list[Any]:
    """The boxes of a DTensor on this rank, as ChunkStorageMetadata of torch.distributed.checkpoint. Not collective."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets=torch.Size(box.target), sizes=torch.Size(box.shape)) for box in _boxes(tensor)]


def tensor_shard(tensor: Any, index: Any) -> torch.Tensor:
    """The part of the local tensor that is one of its boxes; a view, so that it can be read into. Not collective.

    The index is a MetadataIndex of torch.distributed.checkpoint, whose offset is that of a box.
    """
    local = wait_if_pending(tensor._local_tensor)
    boxes = _boxes(tensor)
    for box in boxes:
        if index.offset is None or tuple(index.offset) == box.target:
            return narrowed(local, box)
    raise ValueError(
        f"checkpoint: this rank has no part of {index.fqn!r} at offset {tuple(index.offset or ())}; its parts are at "
        f"{[box.target for box in boxes]}: save and load with the placements that the plan was made for"
    )


# ---- torch.distributed.checkpoint.state_dict ------------------------------------------------------------------------


def register() -> None:
    """Have checkpoints save and load DTensors of this package, `get_model_state_dict` and its like gather them, and
    torch.load(weights_only=True) make them, as it does torch's own: none of the classes runs code of a file.
    """
    # The protocol by which torch.distributed.checkpoint knows tensors with shards.
    DTensor.__create_write_items__ = lambda tensor, fqn, _: write_items(fqn, tensor)  # type: ignore[attr-defined]
    DTensor.__create_chunk_list__ = chunk_list  # type: ignore[attr-defined]
    DTensor.__get_tensor_shard__ = tensor_shard  # type: ignore[attr-defined]
    when_state_dicts_are_imported(_replace)
    torch.serialization.add_safe_globals(
        [DTensor, DTensorSpec, Shard, SizedShard, StridedShard, Replicate, Partial, DeviceMesh, AbstractMesh]
    )


def _replace(module: Any) -> None:
    distribute_theirs, load_theirs = module.distribute_tensor, module._distribute_tensors
    module.DTensor = either_dtensor(DTensor)

    def distribute_tensor(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any], **options: Any) -> Any:
        if any(isinstance(one, AnyPlacement) for one in placements):
            return _api.distribute_tensor(tensor, mesh, placements, **options)
        return distribute_theirs(tensor, mesh, placements, **options)

    def _distribute_tensors(state: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            entry = state.get(key)
            if type(entry) is tuple and isinstance(entry[0], DTensor):
                state[key] = _loaded(*entry)
        load_theirs(state, keys, *args, **kwargs)

    module.distribute_tensor, module._distribute_tensors = distribute_tensor, _distribute_tensors


@torch.no_grad()
def _loaded(tensor: Any, values: torch.Tensor) -> Any:
    """A DTensor with other values, of which this rank has the whole: the same one, or a new one if it is on meta."""
    part = _local_spec.local_part(values.detach(), tensor._spec.replace(dtype=values.dtype), None)
    if tensor.is_meta:
        part = part.clone() if part is values or part._is_view() else part
        return DTensor._wrap(part, tensor._spec.replace(dtype=values.dtype))
    tensor._local_tensor.copy_(part)
    return tensor
