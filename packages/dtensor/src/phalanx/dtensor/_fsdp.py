"""torch.distributed.fsdp.fully_shard over parameters that are DTensors of this package.

FSDP2 manages each parameter by an `FSDPParam`, which shards the local tensor of a DTensor once more over the mesh of
data parallelism. Collectives, prefetch, mixed precision, offloading and hooks see plain tensors only. What differs
for a DTensor of this package is how local tensors are wrapped, and that is all that the classes here do:

    sharded parameter      DTensor on the joined mesh, [StridedShard(0, 2), Shard(0)] for [Shard(0)] over 2 ranks of tp
    unsharded parameter    DTensor on the mesh that it had, with its placements: what parallel styles work with
    gradient               redistributed as the unsharded parameter, then sharded like the parameter

A parameter that is a plain tensor is a DTensor of this package, too, while it is sharded, if FSDP manages it together
with one that is: on the same joined mesh, replicated over the mesh dims that it does not know. All parameters of a
model with tensor parallelism are then on one mesh, so that their norms can be added.
"""

import threading
from collections.abc import Sequence
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from phalanx.dtensor import _layout
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import describe
from phalanx.dtensor._redistribute.comm import wait_if_pending
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import either_dtensor, joined_mesh, torch_spec
from phalanx.dtensor.placement_types import Replicate, Shard, SizedShard, StridedShard, as_torch_placement, split_dim


def replace(param: Any, group: Any, collectives: Any) -> None:
    """Have fully_shard take DTensors of this package, in the modules of FSDP2 that ask for torch's."""
    wrap_theirs = param._from_local_no_grad

    def wrap(local: torch.Tensor, spec: Any) -> Any:
        if not isinstance(spec, DTensorSpec):
            return wrap_theirs(local, spec)
        if not local.numel():  # where the part of another dim is empty, FSDP makes the dim that it shards empty, too
            local = local.view(spec.local_shape)
        return DTensor._wrap(local, spec, local.requires_grad)

    param._from_local_no_grad = wrap
    param.DTensor = collectives.DTensor = either_dtensor(DTensor)
    group.FSDPParam, group.FSDPParamGroup = _classes(group.FSDPParam, group.FSDPParamGroup)


def _classes(param_class: Any, group_class: Any) -> tuple[type, type]:
    """The classes derived from torch's FSDPParam and FSDPParamGroup."""
    making = threading.local()  # .siblings: the parameters of the group that is being made

    class FSDPParam(param_class):  # type: ignore[misc]
        _sharding_spec: Any

        def _init_sharding_spec(self, param: Any, fsdp_placement: Any, shard_dim: int) -> Any:
            if not isinstance(param, DTensor):
                data = super()._init_sharding_spec(param, fsdp_placement, shard_dim)
                if not self.is_dtensor:
                    self._sharding_spec = _plain_spec(
                        getattr(making, "siblings", ()), self._sharding_spec, self.mesh_info.mesh
                    )
                return data
            spec = param._spec
            placements = [
                as_torch_placement(Shard(one.dim) if isinstance(one, SizedShard) else one) for one in spec.placements
            ]
            stands_for = SimpleNamespace(
                _spec=torch_spec(spec.mesh, placements, (spec.shape, spec.stride, spec.dtype)),  # type: ignore[arg-type]
                _local_tensor=wait_if_pending(param._local_tensor),
            )
            data = super()._init_sharding_spec(stands_for, fsdp_placement, shard_dim)
            self._sharding_spec = _sharded(spec, self._sharding_spec, shard_dim, self.mesh_info)
            self._unsharded_dtensor_spec = spec
            return data

        def _get_unsharded_dtensor_spec(self, unsharded_param: torch.Tensor) -> Any:
            spec = self._unsharded_dtensor_spec
            if not isinstance(spec, DTensorSpec):
                return super()._get_unsharded_dtensor_spec(unsharded_param)
            return spec.replace(dtype=unsharded_param.dtype)

        def _get_grad_inner_tensor(self, grad: torch.Tensor) -> torch.Tensor:
            return wait_if_pending(super()._get_grad_inner_tensor(grad))

    class FSDPParamGroup(group_class):  # type: ignore[misc]
        def __init__(self, params: list[Any], modules: Sequence[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
            making.siblings = [*params, *(param for module in modules for param in module.parameters())]
            try:
                super().__init__(params, modules, *args, **kwargs)
            finally:
                making.siblings = []

    return FSDPParam, FSDPParamGroup


def _sharded(spec: DTensorSpec, theirs: Any, dim: int, mesh_info: Any) -> DTensorSpec:
    """The spec of the shard of a parameter of spec `spec`, where torch would give it `theirs`.

    FSDP shards a dim of the tensor; `mesh_info` is what it knows of its mesh.
    """
    meta = (spec.shape, spec.stride, spec.dtype)
    if mesh_info.is_spmd_mesh:
        made = DTensorSpec(theirs.mesh, theirs.placements, *meta)
        over = made.mesh_dims_of(dim)
        uneven = len(over) > 1 and spec.shape[dim] % prod(made.mesh.shape[at] for at in over)
        if uneven or any(isinstance(one, SizedShard | StridedShard) for one in spec.placements):
            raise ValueError(
                f"fully_shard: a parameter of shape {tuple(spec.shape)} with placements {list(spec.placements)} cannot "
                f"be sharded evenly over the mesh dims {over} of {describe(made.mesh)}: give fully_shard the mesh of "
                "data parallelism alone, without dp_mesh_dims"
            )
        return made
    outer = theirs.placements[: -spec.mesh.ndim]
    sharded = [at for at, one in enumerate(outer) if not one.is_replicate()]
    own = [one for one in spec.placements if split_dim(one) == dim]
    if not any(isinstance(one, SizedShard) for one in own):
        made = DTensorSpec(theirs.mesh, (*outer, *spec.placements), *meta)
        if not own or not sharded or _is_sharded_last(spec, made, dim, sharded[0]):
            return made
    # Placements cut in the order of mesh dims, and of uneven parts a StridedShard before the others is not what FSDP
    # has: say it in the order in which it was sharded.
    mesh = joined_mesh([spec.mesh, mesh_info.mesh])  # type: ignore[list-item]
    return DTensorSpec(mesh, (*spec.placements, *[one if one.is_replicate() else Shard(dim) for one in outer]), *meta)


def _is_sharded_last(spec: DTensorSpec, made: DTensorSpec, dim: int, mesh_dim: int) -> bool:
    """Whether a mesh dim of `made` chunks what each rank has of `dim` in `spec`. The same on all ranks."""
    num_shards = made.mesh.shape[mesh_dim]
    for coordinate in product(*map(range, spec.mesh.shape)):
        whole = spec.local_runs_at(coordinate)[dim]
        for shard in range(num_shards):
            at = [0] * (made.mesh.ndim - spec.mesh.ndim)
            at[mesh_dim] = shard
            part = _layout.chunk(sum(length for _, length in whole), num_shards, shard)
            if made.local_runs_at((*at, *coordinate))[dim] != _layout.select(whole, (part,)):
                return False
    return True


def _plain_spec(siblings: Sequence[Any], theirs: Any, data_parallel: Any) -> Any:
    """The spec of the shard of a plain parameter: on the mesh of those of its siblings that are of this package.

    Siblings are the parameters that FSDP manages together with it; `theirs` is the spec that torch makes, on the mesh
    of data parallelism.
    """
    dims = data_parallel.ndim
    for sibling in siblings:
        if not isinstance(sibling, DTensor):
            continue
        mesh: Any = sibling._spec.mesh
        if mesh.mesh_dim_names is None or data_parallel.mesh_dim_names is None:
            continue
        if not set(mesh.mesh_dim_names) & set(data_parallel.mesh_dim_names):
            try:
                mesh = joined_mesh([data_parallel, mesh])
            except RuntimeError:  # they overlap, or are of different roots: FSDP has another mesh for that sibling
                continue
        elif mesh.mesh_dim_names[:dims] != data_parallel.mesh_dim_names or mesh.ndim == dims:
            continue  # a shard whose dims are in another order
        meta = theirs.tensor_meta
        placements = (*theirs.placements, *[Replicate()] * (mesh.ndim - dims))
        return DTensorSpec(mesh, placements, meta.shape, meta.stride, meta.dtype)
    return theirs
