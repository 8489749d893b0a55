"""The functions between plain tensors and DTensors, with gradients: from_local, to_local, redistribute, full_tensor.

Ops need nothing of the kind: they are dispatched below autograd, and their gradients are ops again. The backward of
each function here is made of the others, so that gradients have gradients.

Placements of gradients, unless `grad_placements` says otherwise: those of the tensor, with Replicate for Partial. The
terms of a sum all have the gradient of the sum.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch.autograd import Function

from phalanx.dtensor import _compile, _local_spec
from phalanx.dtensor._dtensor_spec import DTensorSpec, normalize_placements
from phalanx.dtensor._mesh import Mesh, coordinate_of, describe, mesh_id
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor._redistribute.comm import wait_if_pending
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import current_mesh, is_torch_dtensor, real_mesh
from phalanx.dtensor.placement_types import Partial, Placement, Replicate, split_dim, without_partial

_native: Any = None  # the compiled module of _fastpath.py, which does the same where nothing is to be decided


def use_native(module: Any) -> None:
    """Have it done there from now on: see csrc/boundary.cpp."""
    global _native
    module.record(_gradient_spec, _from_local_back, _to_local_back, _redistribute_back)
    _native = module


def _gradient_spec(spec: DTensorSpec) -> DTensorSpec:
    return spec.replace(placements=without_partial(spec.placements))


def from_local(
    local: torch.Tensor,
    mesh: Mesh | None,
    placements: Sequence[Placement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
) -> Any:
    """See `DTensor.from_local`."""
    if not isinstance(local, torch.Tensor):
        raise TypeError(f"from_local: the local tensor must be a torch.Tensor, not {type(local).__name__}")
    if isinstance(local, DTensor):
        raise TypeError("from_local: the local tensor is a DTensor: use its redistribute(), or give its to_local()")
    if type(local) is not torch.Tensor and is_torch_dtensor(local):
        raise TypeError("from_local: the local tensor is a torch DTensor: convert it with from_torch(tensor)")
    mesh = current_mesh("from_local") if mesh is None else real_mesh(mesh)
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    if type(placements) is list:
        placements = tuple(placements)
    if run_check and coordinate_of(mesh) is not None:
        if _compile.is_traced():
            raise RuntimeError(
                "from_local: run_check=True compares the values of the ranks, which do not exist while a function is "
                "traced for compilation: write run_check=False, and check outside of the compiled function"
            )
        _local_spec.check_alike(local, mesh, placements, shape, stride, grad_placements)
    spec = _local_spec.spec_of_local(local, mesh, placements, shape, stride)
    if coordinate_of(mesh) is None:
        local = local.new_empty(0, requires_grad=local.requires_grad) if local.is_leaf else local.flatten()[:0]
    elif run_check:
        replicated = [mesh_dim for mesh_dim, one in enumerate(spec.placements) if one.is_replicate()]
        checked = _local_spec.same_values(local.detach(), mesh, replicated)
        # As autograd sees it, the tensor with other values is still this one.
        local = local + (checked - local.detach()) if local.requires_grad else checked
    if local.requires_grad and torch.is_grad_enabled():
        if _native is not None and grad_placements is None and not torch.compiler.is_compiling():
            made = _native.from_local(local, spec)
            if made is not None:
                return made
        wanted = None if grad_placements is None else _wanted("from_local", spec, grad_placements)
        return _FromLocal.apply(local, spec, wanted)  # type: ignore[no-untyped-call]
    return DTensor._wrap(local.detach() if local.requires_grad else local, spec)


def _wanted(who: str, spec: DTensorSpec, placements: Sequence[Placement]) -> Any:
    """Placements for the gradient of a local tensor, which must have its shape."""
    wanted = normalize_placements(spec.mesh, placements, spec.ndim)
    if wanted != spec.placements and not _have_same_parts(spec, spec.replace(placements=wanted)):
        raise ValueError(
            f"{who}: with grad_placements {list(wanted)} the gradient of a rank would have another shape than the "
            f"local tensor, whose placements are {list(spec.placements)}: write the same shards, and Replicate() or "
            "Partial() on the other mesh dims"
        )
    return wanted


def _have_same_parts(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Whether each rank of the mesh, and not only this one, has a local tensor of one shape in both."""
    pairs = zip(one.placements, other.placements, strict=True)
    if all(a == b or (split_dim(a) is None and split_dim(b) is None) for a, b in pairs):
        return True
    return all(
        one.local_shape_at(where) == other.local_shape_at(where) for where in product(*map(range, one.mesh.shape))
    )


class _FromLocal(Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec, wanted: Any) -> Any:
        ctx.spec, ctx.wanted = spec, wanted
        ctx.set_materialize_grads(False)
        # A tensor of its own, since autograd notes in the one that it gets what it is the result of.
        return DTensor._wrap(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return None if grad is None else _from_local_back(ctx.spec, grad, ctx.wanted), None, None


def _from_local_back(spec: DTensorSpec, grad: Any, wanted: Any = None) -> torch.Tensor:
    """The gradient of the local tensor that a DTensor of this spec was made of."""
    placements = wanted or without_partial(spec.placements)
    if grad._spec.placements != placements:
        # Not by `redistribute`, which refuses what a user may ask for here: terms of the gradient.
        where = (grad._spec.mesh, placements, False, grad.dtype)
        if grad.requires_grad and torch.is_grad_enabled():
            grad = _Redistribute.apply(grad, *where, None)  # type: ignore[no-untyped-call]
        else:
            grad = _moved(grad, *where)
    made: torch.Tensor = to_local(grad, None)
    return made


def to_local(tensor: Any, grad_placements: Sequence[Placement] | None) -> Any:
    """See `DTensor.to_local`."""
    if tensor.requires_grad and torch.is_grad_enabled():
        if grad_placements is not None:
            grad_placements = _wanted("to_local", tensor._spec, grad_placements)
        elif _native is not None and not torch.compiler.is_compiling():
            made = _native.to_local(tensor)
            if made is not None:
                return made
        return _ToLocal.apply(tensor, grad_placements)  # type: ignore[no-untyped-call]
    return tensor._local_tensor


class _ToLocal(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, grad_placements: Any) -> Any:
        ctx.spec, ctx.grad_placements = tensor._spec, grad_placements
        ctx.set_materialize_grads(False)
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return None if grad is None else _to_local_back(ctx.spec, grad, ctx.grad_placements), None


def _to_local_back(spec: DTensorSpec, grad: torch.Tensor, wanted: Any = None) -> Any:
    """The gradient of a DTensor of this spec, of whose local tensor it is `grad`."""
    made = spec.replace(placements=wanted or without_partial(spec.placements), dtype=grad.dtype)
    if not grad.requires_grad:
        return DTensor._wrap(grad, made)
    return _FromLocal.apply(grad, made, None)  # type: ignore[no-untyped-call]


def redistribute(
    tensor: Any,
    mesh: Mesh | None,
    placements: Sequence[Placement] | None,
    async_op: bool,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> Any:
    """See `DTensor.redistribute`."""
    spec = tensor._spec
    target = spec.mesh if mesh is None else real_mesh(mesh)
    if placements is None:
        raise RuntimeError(
            "redistribute: placements are needed: write redistribute(placements=[...]), one for each mesh dim"
        )
    wanted = normalize_placements(target, placements, spec.ndim)
    same_mesh = target is spec.mesh or mesh_id(target) == mesh_id(spec.mesh)
    for mesh_dim, placement in enumerate(wanted):
        if type(placement) is Partial and not (same_mesh and spec.placements[mesh_dim] == placement):
            raise RuntimeError(
                f"redistribute: {placement!r} for mesh dim {mesh_dim} {describe(target)}: a tensor cannot be made "
                "Partial; write Replicate() or Shard(dim), or make it with DTensor.from_local"
            )
    dtype = spec.dtype if forward_dtype is None else forward_dtype
    if same_mesh and wanted == spec.placements and dtype == spec.dtype and not backward_dtype:
        return tensor if not (tensor.requires_grad and torch.is_grad_enabled()) else tensor.view_as(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        plain = not async_op and backward_dtype is None and not torch.compiler.is_compiling()
        if plain and _native is not None and _native.is_recorded(tensor):
            return _native.redistributed(tensor, _moved(tensor, target, wanted, False, dtype))
        return _Redistribute.apply(tensor, target, wanted, async_op, dtype, backward_dtype)  # type: ignore[no-untyped-call]
    return _moved(tensor, target, wanted, async_op, dtype)


def _moved(tensor: Any, mesh: Mesh, placements: Any, async_op: bool, dtype: torch.dtype) -> Any:
    spec, local = tensor._spec, tensor._local_tensor
    if dtype != spec.dtype:
        spec, local = spec.replace(dtype=dtype), local.to(dtype)
    target = DTensorSpec(mesh, placements, spec.shape, spec.stride, dtype)
    return DTensor._wrap(plan_redistribute(spec, target).run(local, async_op), target)


class _Redistribute(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Any, mesh: Mesh, placements: Any, async_op: bool, dtype: torch.dtype, backward_dtype: Any
    ) -> Any:
        ctx.spec, ctx.async_op, ctx.backward_dtype = tensor._spec, async_op, backward_dtype
        ctx.set_materialize_grads(False)
        made = _moved(tensor, mesh, placements, async_op, dtype)
        # The input itself must not come out: autograd would take it for a view.
        local = made._local_tensor
        return DTensor._wrap(local.view_as(local), made._spec) if local is tensor._local_tensor else made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        made = None if grad is None else _redistribute_back(ctx.spec, grad, ctx.async_op, ctx.backward_dtype)
        return made, None, None, None, None, None


def _redistribute_back(spec: DTensorSpec, grad: Any, async_op: bool = False, dtype: torch.dtype | None = None) -> Any:
    """The gradient of a DTensor of this spec that was redistributed."""
    placements = without_partial(spec.placements)
    if dtype is not None and grad.dtype != dtype:
        grad = grad.to(dtype)
    if grad._spec.mesh is not spec.mesh or grad._spec.placements != placements:
        grad = redistribute(grad, spec.mesh, placements, async_op, None, None)
    return grad if grad.dtype == spec.dtype else grad.to(spec.dtype)


def full_tensor(tensor: Any, grad_placements: Sequence[Placement] | None) -> Any:
    """See `DTensor.full_tensor`."""
    whole = redistribute(tensor, None, (Replicate(),) * tensor._spec.mesh.ndim, False, None, None)
    local = to_local(whole, grad_placements)
    return wait_if_pending(local)
