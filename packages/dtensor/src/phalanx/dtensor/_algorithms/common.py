"""Common parts of the algorithms: their table, how a dim is split, the contribution of each rank, and the results."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

import phalanx.collectives as pc
from phalanx.core import MismatchError
from phalanx.dtensor import _layout
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import Mesh, coordinate_of
from phalanx.dtensor._mode import StrictError, is_strict
from phalanx.dtensor._op_plan import bound
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor._redistribute.comm import explained
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.placement_types import AnyPlacement, Partial, Replicate, Shard, split_dim

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
Algorithm = Callable[..., Any]

_algorithms: dict[str, list[tuple[Callable[..., bool], Handler]]] = {}


def algorithm(*names: str, takes: Callable[..., bool], sends: bool = True) -> Callable[[Algorithm], Algorithm]:
    """Register an algorithm for the ops `names` (`aten.sort.default`); of several the first that takes a call is it.

    It is called with the op and every argument of its schema, DTensors in and out, below autograd, where `takes` says
    of these arguments that it serves the call. Strict mode refuses one that `sends`: that communicates by itself.
    """

    def register(function: Algorithm) -> Algorithm:
        def run(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            if sends:
                check_strict(op)
            return function(op, *bound(op, args, kwargs))

        for name in names:
            _algorithms.setdefault(name, []).append((takes, run))
        return function

    return register


def find(op: Any, values: Sequence[Any]) -> Handler | None:
    """The algorithm of a call, or None; `values` are all of its arguments, whose tensors must all be DTensors."""
    return next((run for takes, run in _algorithms.get(str(op), ()) if takes(*values)), None)


def is_cut_plainly(spec: DTensorSpec, dims: Sequence[int], may_be_symbolic: bool = False) -> bool:
    """Whether this rank is in the mesh, one of the dims is cut, all cuts are Shard, and nothing is Partial.

    With `may_be_symbolic` sizes of other dims may be symbolic; otherwise none may.
    """
    if coordinate_of(spec.mesh) is None:
        return False
    if type(spec) is not DTensorSpec and not (may_be_symbolic and all(type(spec.shape[dim]) is int for dim in dims)):
        return False
    if not all(isinstance(one, (Shard, Replicate)) for one in spec.placements):
        return False
    return any(spec.mesh_dims_of(dim) for dim in dims)


def is_even(spec: DTensorSpec, dim: int) -> bool:
    """Whether the mesh dims that cut a dim cut it into equal parts."""
    return spec.shape[dim] % prod(spec.mesh.shape[mesh_dim] for mesh_dim in spec.mesh_dims_of(dim)) == 0


def check_strict(op: Any) -> None:
    """Algorithms communicate: in strict mode they may not."""
    if is_strict():
        raise StrictError(
            f"strict mode: {op} along a sharded dim would communicate by itself: redistribute its input first, or "
            "leave strict mode"
        )


def without_partial(tensor: Any) -> tuple[torch.Tensor, DTensorSpec]:
    """The local tensor and the spec, with what is Partial reduced. Collective where something is."""
    spec: DTensorSpec = tensor._spec
    if not spec.is_partial:
        return tensor._local_tensor, spec
    target = spec.replace(placements=tuple(Replicate() if type(p) is Partial else p for p in spec.placements))
    return plan_redistribute(spec, target).run(tensor._local_tensor), target


def redistribute_local(tensor: Any, placements: Sequence[AnyPlacement]) -> torch.Tensor:
    """The local tensor in other placements. Collective where they differ."""
    spec: DTensorSpec = tensor._spec
    return plan_redistribute(spec, spec.replace(placements=tuple(placements))).run(tensor._local_tensor)


def number_of(spec: DTensorSpec, mesh_dims: Sequence[int]) -> int:
    """The number of this rank's piece among those that the mesh dims cut, in the order of the tensor."""
    coordinate = coordinate_of(spec.mesh) or ()
    number = 0
    for mesh_dim in mesh_dims:
        number = number * spec.mesh.shape[mesh_dim] + coordinate[mesh_dim]
    return number


def offset_of(spec: DTensorSpec, dim: int) -> int:
    """The global index of the first element of this rank's piece of a dim."""
    runs = spec.local_runs[dim]
    return int(runs[0][0]) if runs else int(spec.shape[dim])


def gathered(part: torch.Tensor, mesh: Mesh, mesh_dims: Sequence[int]) -> torch.Tensor:
    """The tensors of the ranks of some mesh dims, stacked in the order of the pieces. Collective.

    They have one shape; the mesh dims ascend: the last one is the innermost.
    """
    stack = part.unsqueeze(0).contiguous()
    for mesh_dim in reversed(mesh_dims):
        if mesh.shape[mesh_dim] > 1:
            stack = _sent(pc.all_gather_tensor, stack, 0, (mesh, mesh_dim))
    return stack


def reduced(part: torch.Tensor, op: str, mesh: Mesh, mesh_dims: Sequence[int]) -> torch.Tensor:
    """The reduction of what each rank of some mesh dims has. Collective."""
    for mesh_dim in mesh_dims:
        if mesh.shape[mesh_dim] > 1:
            part = _sent(pc.all_reduce, part.contiguous(), op, (mesh, mesh_dim))
    return part


def _sent(collective: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    try:
        return pc.wait_tensor(collective(*given))
    except MismatchError as error:
        raise explained(error) from None


def without_dims(
    spec: DTensorSpec, dims: Sequence[int], keepdim: bool
) -> tuple[tuple[AnyPlacement, ...], tuple[int, ...]]:
    """Placements and shape of what is left when dims are reduced: whole on the mesh dims that cut them."""
    placements: list[AnyPlacement] = []
    for placement in spec.placements:
        dim = split_dim(placement)
        if dim is None or dim in dims:
            placements.append(Replicate())
        else:
            placements.append(Shard(dim if keepdim else dim - sum(one < dim for one in dims)))
    sizes = enumerate(spec.shape)
    return tuple(placements), tuple(1 if dim in dims else size for dim, size in sizes if keepdim or dim not in dims)


def wrapped(
    local: torch.Tensor,
    mesh: Mesh,
    placements: Sequence[AnyPlacement],
    shape: Sequence[int],
    like: DTensorSpec | None = None,
) -> DTensor:
    """A DTensor of that shape, its dims in memory in the order of those of `like`, or contiguous.

    Not as the local tensor happens to lie: ranks must agree on it, and one with an empty piece sees another order.
    """
    stride = None
    if like is not None and 0 not in like.stride:
        stride = _layout.stride_like(tuple(shape), like.shape, like.stride)
    spec = DTensorSpec(mesh, tuple(placements), torch.Size(shape), stride, local.dtype)
    if local.stride() != spec.local_stride:
        local = torch.empty_strided(local.shape, spec.local_stride, dtype=local.dtype, device=local.device).copy_(local)
    return DTensor._wrap(local, spec)


def as_before(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor that is placed, and lies, as another one; its dtype is that of the local tensor."""
    return wrapped(local, spec.mesh, spec.placements, spec.shape, spec)


def replicated(local: torch.Tensor, mesh: Mesh) -> DTensor:
    """A DTensor of which every rank has the whole."""
    return wrapped(local, mesh, (Replicate(),) * mesh.ndim, local.shape)


def computed(local: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype in which torch computes: 16-bit floats in float32."""
    return local.float() if local.dtype.itemsize < 4 and local.is_floating_point() else local
