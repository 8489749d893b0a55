"""Tensors that are spread over a mesh of ranks.

A placement says what a mesh dim does with a tensor: `Shard(0)` cuts dim 0 into chunks, `SizedShard(0, (3, 5))` into
pieces of given sizes, `Replicate()` gives every rank the whole, and with `Partial("sum")` each rank has a term. They
are equal to torch's placements of the same names and may be mixed with them.

Names and signatures follow torch.distributed.tensor.
"""

from phalanx.dtensor import _checkpoint, _fastpath, _fsdp, _torch_compat
from phalanx.dtensor import _composites as _composites  # registers kernels
from phalanx.dtensor._api import distribute_module, distribute_tensor
from phalanx.dtensor._factories import empty, full, linspace, logspace, ones, rand, randn, zeros
from phalanx.dtensor._fallback import ReplicatedFallback
from phalanx.dtensor._interop import from_torch, to_torch
from phalanx.dtensor._mesh import AbstractMesh
from phalanx.dtensor._mode import StrictError, implicit_replication, strict
from phalanx.dtensor._rules.parser import RuleError
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.device_mesh import DeviceMesh, init_device_mesh
from phalanx.dtensor.explain import explain
from phalanx.dtensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    SizedShard,
    StridedShard,
    as_placement,
    as_torch_placement,
)

_StridedShard = StridedShard  # as torch calls it
_checkpoint.register()
_torch_compat.when_fsdp_is_imported(_fsdp.replace)  # fully_shard of torch takes DTensors of this package
_fastpath.load()  # if it was compiled

__all__ = [
    "AbstractMesh",
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "ReplicatedFallback",
    "RuleError",
    "Shard",
    "SizedShard",
    "StrictError",
    "StridedShard",
    "as_placement",
    "as_torch_placement",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "from_torch",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "strict",
    "to_torch",
    "zeros",
]

__version__ = "0.1.0"
