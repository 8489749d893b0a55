"""Common parts of random ops: the arguments, the specs of results, and new local tensors with random elements."""

from typing import Any, TypeAlias

import torch

from phalanx.dtensor._compile import is_traced
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import Mesh
from phalanx.dtensor._op_plan import mixed
from phalanx.dtensor._random import traced
from phalanx.dtensor._random.fill import Distribution, fill_local
from phalanx.dtensor._random.state import draw_key
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.placement_types import Partial, Replicate


def distributed(op: Any, value: Any) -> Any:
    if not isinstance(value, DTensor):
        raise mixed(
            op,
            value,
            "every tensor among its arguments must be a DTensor; make one with distribute_tensor, or with "
            "DTensor.from_local if every rank has the same values",
        )
    return value


# ---- specs ----------------------------------------------------------------------------------------------------------


def whole_values(spec: DTensorSpec) -> DTensorSpec:
    """The spec with Replicate for Partial."""
    if not spec.is_partial:
        return spec
    return spec.replace(placements=[Replicate() if one.is_partial() else one for one in spec.placements])


def read(value: Any, spec: DTensorSpec | None = None) -> torch.Tensor:
    """The local values of a DTensor, whole ones, placed as another spec says."""
    target = whole_values(value._spec) if spec is None else spec.replace(dtype=value.dtype)
    if target.shape != value.shape:
        target = DTensorSpec(target.mesh, target.placements, value.shape, None, value.dtype)
    return plan_redistribute(value._spec, target).run(value._local_tensor)


def empty_local(spec: DTensorSpec, device: torch.device) -> torch.Tensor:
    """A local tensor of a spec, in the order of its dims."""
    return torch.empty_strided(spec.local_shape, spec.local_stride, dtype=spec.dtype, device=device)


def spec_like(spec: DTensorSpec, dtype: torch.dtype | None, memory_format: torch.memory_format | None) -> DTensorSpec:
    """The spec of a new tensor like that of `spec`, as torch.empty_like chooses dtype and stride."""
    like = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    made = torch.empty_like(like, dtype=dtype, memory_format=memory_format or torch.preserve_format)
    return whole_values(spec).replace(stride=made.stride(), dtype=made.dtype)


# ---- tensors that are filled ----------------------------------------------------------------------------------------

# The terms of the other ranks of a Partial if the first rank has the value.
_NOTHING = {"sum": 0, "bxor": 0, "product": 1}
# Reductions of equal values that give that value.
_ALIKE = ("min", "max", "band", "bor")


def terms(op: Any, spec: DTensorSpec) -> int | None:
    """The term of this rank of a Partial in place of the value; None if the rank has the value itself."""
    coordinate = spec.mesh.get_coordinate() or (0,) * spec.mesh.ndim
    neutral: list[int] = []
    for placement, index in zip(spec.placements, coordinate, strict=True):
        if type(placement) is not Partial or placement.reduce_op in _ALIKE:
            continue
        if placement.reduce_op not in _NOTHING:
            raise RuntimeError(
                f"{op}: a tensor that is {placement!r} cannot be filled, because the terms of the ranks might not "
                "give the exact value: redistribute it to Replicate first"
            )
        if index:
            neutral.append(_NOTHING[placement.reduce_op])
    return neutral[-1] if neutral else None


Key: TypeAlias = int | torch.Tensor
"""The key of a random op; a tensor in a graph that is being made."""


def key_for(mesh: Mesh, generator: torch.Generator | None) -> Key:
    """The key of one random op. Collective as `draw_key` is."""
    return traced.key(mesh, generator) if is_traced() else draw_key(mesh, generator)


def fill(local: torch.Tensor, spec: DTensorSpec, distribution: Distribution, key: Key) -> None:
    """Fill a local tensor of a spec; nothing on a rank outside its mesh."""
    if not isinstance(key, torch.Tensor):
        fill_local(local, spec, distribution, key)
    elif not is_outside(spec):
        local.copy_(traced.values(spec.replace(dtype=local.dtype), distribution, key, local.device))


def new_local(
    spec: DTensorSpec, distribution: Distribution, generator: torch.Generator | None, device: torch.device
) -> torch.Tensor:
    """A new local tensor of a spec, with random elements."""
    key = key_for(spec.mesh, generator)
    if isinstance(key, torch.Tensor) and not is_outside(spec):
        return traced.values(spec, distribution, key, device)
    local = empty_local(spec, device)
    fill(local, spec, distribution, key)
    return local


def is_outside(spec: DTensorSpec) -> bool:
    """Whether this rank is outside the mesh of a spec."""
    return spec.mesh.get_coordinate() is None
