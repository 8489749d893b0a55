"""Ops that no rule describes: their result does not depend on values alone, or they take lists.

A handler is called with (op, args, kwargs), does everything, and returns what the op returns.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

import phalanx.collectives as pc
from phalanx.dtensor import _fallback, _foreach, _op_plan
from phalanx.dtensor._algorithms import (  # noqa: F401  (each registers its algorithms)
    attention,
    class_parallel_loss,
    common,
    gather_embedding,
    halo,
    pieces,
    statistics,
)
from phalanx.dtensor._algorithms.common import Handler
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._graph_agreement import recorded, sent_over
from phalanx.dtensor._mesh import coordinate_of
from phalanx.dtensor._op_plan import mixed
from phalanx.dtensor._random.ops import RANDOM_OPS
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import is_recorded, no_dispatch
from phalanx.dtensor.placement_types import Replicate, without_partial

aten = torch.ops.aten

_handlers: dict[Any, Handler] = {}


def handles(*ops: Any) -> Callable[[Handler], Handler]:
    """Register a handler of ops."""

    def register(function: Handler) -> Handler:
        for op in ops:
            _handlers[op] = function
        return function

    return register


@cache
def find(op: Any) -> Handler | None:
    """The handler of an op, or None."""
    found: Handler | None = _handlers.get(op) or RANDOM_OPS.get(op)
    return found or _foreach.find(op)


def algorithm(op: Any, choice: Any, moves: Sequence[Any], values: Sequence[Any]) -> Handler | None:
    """A communication-efficient algorithm for this call, whose rule would gather inputs or which has none; or None."""
    if choice is not None and not moves:
        return None
    given = _all_distributed(values)
    function = common.find(op, values if given is None else given)
    if function is None:
        return None

    def run(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        args = args if given is None else (_all_distributed(args) or args)
        if not is_recorded():
            return function(op, args, kwargs)
        spec = next(one for one in _op_plan.flat((*args, *kwargs.values())) if isinstance(one, DTensor))._spec
        with recorded((sent_over(spec.mesh, f"{op}, by an algorithm of its own,"),), spec.dtype):
            return function(op, args, kwargs)

    return run


def _all_distributed(values: Sequence[Any]) -> list[Any] | None:
    """Arguments with plain tensors, where these count as replicated, as DTensors; None if there are none."""
    leaves = _op_plan.flat(values)
    if not any(isinstance(one, torch.Tensor) and not isinstance(one, DTensor) for one in leaves):
        return None
    mesh = next(one._spec.mesh for one in leaves if isinstance(one, DTensor))
    whole = (Replicate(),) * mesh.ndim

    def made(value: Any) -> Any:
        if _op_plan.is_list(value):
            return [made(one) for one in value]
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            return value
        return DTensor._wrap(value, DTensorSpec(mesh, whole, value.shape, value.stride(), value.dtype))

    return [made(value) for value in values]


# ---- values that leave the mesh -------------------------------------------------------------------------------------


@handles(aten._local_scalar_dense.default)
def _item(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """item(), float(), bool(): of the whole value, also where it is Partial."""
    whole = _fallback.replicate_arg(args[0])
    if whole.numel() != 1:
        raise RuntimeError(
            "item: this rank is outside the mesh of the DTensor, so it has no value; call item() only on the ranks "
            "of the mesh"
        )
    return op(whole)


@handles(aten.equal.default)
def _equal(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    first, second = args
    if not (isinstance(first, DTensor) and isinstance(second, DTensor)):
        raise mixed("equal", second if isinstance(first, DTensor) else first, "make both DTensors")
    if first.shape != second.shape:
        return False
    spec: DTensorSpec = first._spec
    if coordinate_of(spec.mesh) is None:
        return True  # nothing that is here differs
    placements = without_partial(spec.placements)
    mine = [
        plan_redistribute(one._spec, spec.replace(placements=placements, dtype=one.dtype)).run(one._local_tensor)
        for one in (first, second)
    ]
    same = torch.tensor(op(*mine), dtype=torch.int32)
    for mesh_dim in range(spec.mesh.ndim):
        same = pc.wait_tensor(pc.all_reduce(same, "min", (spec.mesh, mesh_dim)))  # type: ignore[arg-type]
    return bool(same.item())


@handles(aten.is_same_size.default)
def _is_same_size(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


@handles(aten.is_pinned.default)
def _is_pinned(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return bool(args[0]._local_tensor.is_pinned())


@handles(aten.new_empty_strided.default, aten.empty_strided.default)
def _new_strided(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """As the tensor, if it has its shape; else the same on every rank."""
    tensor, size, stride = args[:3]
    spec: DTensorSpec = tensor._spec
    same = tuple(size) == tuple(spec.shape) and not spec.is_partial
    placements = spec.placements if same else (Replicate(),) * spec.mesh.ndim
    made = DTensorSpec(spec.mesh, placements, tuple(size), tuple(stride), kwargs.get("dtype") or spec.dtype)
    local = torch.empty_strided(
        made.local_shape, made.local_stride, dtype=made.dtype, device=kwargs.get("device") or tensor.device
    )
    return DTensor._wrap(local, made)


@handles(
    aten.t_.default,
    aten.transpose_.default,
    aten.squeeze_.default,
    aten.squeeze_.dim,
    aten.squeeze_.dims,
    aten.unsqueeze_.default,
    aten.swapdims_.default,
    aten.swapaxes_.default,
)
def _view_in_place(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    base = op._schema.name.split("::")[1][:-1]
    overload = "int" if base in ("transpose", "swapdims", "swapaxes") else op._overloadname
    made = getattr(getattr(aten, "transpose" if overload == "int" else base), overload)(*args, **kwargs)
    if getattr(made, "_is_view_of_copy", False):
        raise RuntimeError(
            f"{op}: this view in place would need communication, which an op in place cannot do: redistribute the "
            "tensor first, or call the op that returns a new tensor"
        )
    with no_dispatch():
        op(tensor, *args[1:], **kwargs)
    tensor._spec, tensor._local_tensor = made._spec, made._local_tensor
    return tensor
