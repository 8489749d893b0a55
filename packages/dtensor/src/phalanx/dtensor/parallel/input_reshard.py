"""input_reshard: what a module saves of its inputs for backward is sharded until backward needs it."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from phalanx.dtensor._mesh import Mesh, mesh_id
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.placement_types import Replicate, Shard

__all__ = ["input_reshard"]


class _Saved(NamedTuple):
    shard: DTensor
    is_plain: bool  # whether the tensor was a plain one


def input_reshard(module: nn.Module, tp_device_mesh: Mesh, input_reshard_dim: int | None = None) -> nn.Module:
    """Save a shard in the place of each whole input of a module, and gather it again in backward.

    With tensor parallelism all ranks have the same inputs, so each needs to keep only a part. Sharded are plain tensors
    that share memory with an input of the module, and DTensors that are replicated over the mesh. All else is saved as
    it is. Not collective; backward gathers and is.

    Args:
        module: The module; changed in place.
        tp_device_mesh: A mesh of one dim.
        input_reshard_dim: The dim to shard; None changes nothing.

    Returns:
        The module.

    Source: torch.distributed.tensor.parallel.input_reshard.input_reshard, which shards every plain tensor that is
    saved, also those that differ between ranks.

    Example:
        >>> linear = parallelize_module(torch.nn.Linear(2, 4), mesh, ColwiseParallel())
        >>> linear = input_reshard(linear, mesh, 0)  # over two ranks each saves half of the batch
        >>> linear(torch.ones(2, 2, requires_grad=True)).sum().backward()
    """
    if input_reshard_dim is None:
        return module
    dim, mesh = input_reshard_dim, tp_device_mesh
    running: list[tuple[saved_tensors_hooks, set[int]]] = []  # the innermost call last

    @torch.no_grad()
    def pack(tensor: torch.Tensor) -> Any:
        whole = tensor.detach()
        is_plain = not isinstance(whole, DTensor)
        if is_plain and tensor.untyped_storage().data_ptr() in running[-1][1]:
            whole = DTensor.from_local(whole, mesh)
        if not isinstance(whole, DTensor) or mesh_id(whole._spec.mesh) != mesh_id(mesh):
            return tensor
        if not whole._spec.is_replicated or not -whole.ndim <= dim < whole.ndim:
            return tensor
        shard = whole.redistribute(placements=[Shard(dim)])
        # The shard may be a view, which would keep the memory of the whole.
        return _Saved(DTensor._wrap(shard._local_tensor.clone(), shard._spec), is_plain)

    @torch.no_grad()
    def unpack(saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved  # type: ignore[no-any-return]
        whole = saved.shard.redistribute(placements=[Replicate()])
        return whole.full_tensor() if saved.is_plain else whole

    def begin(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        plain = [value for value in inputs if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)]
        hooks = saved_tensors_hooks(pack, unpack)
        running.append((hooks, {tensor.untyped_storage().data_ptr() for tensor in plain} - {0}))
        hooks.__enter__()

    def end(*_: Any) -> None:
        if running:
            running[-1][0].__exit__()
            running.pop()

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)
    return module
