"""DTensors in torch.compile.

A compiled function sees a DTensor as a tensor: its ops and methods go into the graph, and AOTAutograd runs them on fake
local tensors, by the same Plans as outside. So a graph has the local ops and the collectives, with the names of groups
and what this rank does as constants. This file has what is particular:

- `Context` is what a DTensor is but for its local tensor and its sizes: graphs are guarded by it and are cached by it.
- Functions that make DTensors of tensors go into the graph as they are called (`_torch_compat.allow_in_graph`).
- A mesh that comes from the graph is a stand-in for one: `_torch_compat.real_mesh` gives the mesh.
"""

import hashlib
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.types import IntLikeType

from phalanx.dtensor import _torch_compat
from phalanx.dtensor._mesh import Mesh, coordinate_of, mesh_id
from phalanx.dtensor.placement_types import AnyPlacement, Shard, split_dim

_contexts: "weakref.WeakValueDictionary[tuple[Any, ...], Context]" = weakref.WeakValueDictionary()


@final
class Context:
    """The properties of a DTensor without its local tensor and its sizes. Equal ones are one object while one is held.

    Guards and caches keep it, compare it, copy it and pickle it. A mesh whose process groups were destroyed
    differs from every other mesh, so a graph of it serves no other.
    """

    __slots__ = ("__weakref__", "dtype", "mesh", "placements", "requires_grad")
    mesh: Mesh
    placements: tuple[AnyPlacement, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __new__(
        cls, mesh: Mesh, placements: tuple[AnyPlacement, ...], dtype: torch.dtype, requires_grad: bool
    ) -> "Context":
        key = mesh_id(mesh), placements, dtype, requires_grad
        found = _contexts.get(key)
        if found is None:
            found = object.__new__(cls)
            found.mesh, found.placements, found.dtype, found.requires_grad = mesh, placements, dtype, requires_grad
            found = _contexts.setdefault(key, found)
        return found

    def __deepcopy__(self, memo: object) -> "Context":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Context, (self.mesh, self.placements, self.dtype, self.requires_grad)

    def __repr__(self) -> str:
        return f"Context({self.mesh}, {self.placements}, {self.dtype}, requires_grad={self.requires_grad})"


def cache_key(tensor: Any) -> str:
    """The key that decides whether a graph that another process compiled for a DTensor may serve this one.

    A graph has in it what its rank does, and the names of its groups.
    """
    spec, local = tensor._spec, tensor._local_tensor
    mesh = spec.mesh
    parts = (
        _torch_compat.mesh_key(mesh) if isinstance(mesh, DeviceMesh) else mesh,
        coordinate_of(mesh),
        _torch_compat.mesh_groups(mesh) if isinstance(mesh, DeviceMesh) else (),
        spec.placements,
        (spec.shape, spec.stride, spec.dtype),
        (local.shape, local.stride(), local.dtype, str(local.device), local.requires_grad),
        tensor.requires_grad,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def settled(
    mesh: Mesh,
    placements: Sequence[AnyPlacement],
    local: torch.Tensor,
    shape: Sequence[IntLikeType],
    stride: Sequence[IntLikeType],
) -> tuple[torch.Size, tuple[IntLikeType, ...]]:
    """Shape and stride of a DTensor in a graph, with what a graph has to know of its sizes from the start.

    A size that is cut unevenly is an int: a graph is for that size alone. A size that is cut evenly is so many times
    that of the local tensor, whatever it is. Both depend on sizes of the whole alone, so ranks agree; and neither is
    first found in the backward pass, when torch has counted already which sizes are symbols.
    """
    if all(type(size) is int for size in shape) and all(type(step) is int for step in stride):
        return torch.Size(shape), tuple(stride)  # type: ignore[arg-type]
    sizes = [_torch_compat.plain(size) for size in shape]
    cuts = [
        [(one, ranks) for one, ranks in zip(placements, mesh.shape, strict=True) if ranks > 1 and split_dim(one) == dim]
        for dim in range(len(sizes))
    ]
    ways = [prod(ranks for _, ranks in own) for own in cuts]
    if any(type(one) is not Shard for own in cuts for one, _ in own) or not all(
        map(_torch_compat.surely_divides, sizes, ways)
    ):
        sizes = [int(size) for size in sizes]  # moves of what is cut unevenly need all sizes
    elif coordinate_of(mesh) is not None and local.ndim == len(sizes):
        for size, part, number in zip(sizes, local.shape, ways, strict=True):
            if type(size) is not int:
                _torch_compat.surely_equal(part * number, size)
    return torch.Size(sizes), tuple(map(_torch_compat.plain, stride))  # type: ignore[arg-type]


def is_traced() -> bool:
    """Whether the values of tensors are not there, since a graph is being made."""
    return _torch_compat.tracing_fake_mode() is not None
