"""Gradients of the collectives.

A rank's gradient is that of the sum of all ranks' losses with respect to its own input, as if every rank called
backward at the same time: so every backward pass is a collective of its own, which the records of _op_table.py name.

    all_reduce sum        all_reduce sum            reduce_scatter sum    all_gather
    all_reduce avg        all_reduce avg            reduce_scatter avg    all_gather, divided by the group size
    all_gather            reduce_scatter sum        all_to_all            all_to_all with the splits exchanged
    broadcast             the sum on the source, zeros elsewhere

all_gather_v and reduce_scatter_v are to each other as the two without v.

(torch.distributed._functional_collectives of torch 2.13 has the same, without avg; there broadcast passes the local
gradient on, which is wrong.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from phalanx.collectives import _torch_compat
from phalanx.collectives._op_table import BLOCKING, BROADCAST_BACKWARD, FORMS, Collective, Form
from phalanx.collectives.reductions import check_differentiable


def _waited(started: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = torch.ops.phalanx.wait_tensor(started)
    return done


def _arguments(collective: Collective, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call that gets a gradient, with the reduction in lower case."""
    return (check_differentiable(name, args[0]), *args[1:]) if collective.reduces else args


def _function(collective: Collective) -> Any:
    """A collective, differentiable: apply(run, tensor, *the op's other arguments), where run(tensor, *those) starts it
    below autograd."""
    adjoint = collective.adjoint

    def forward(ctx: Any, run: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any) -> Any:
        ctx.args, ctx.shape = _arguments(collective, collective.name, args), tensor.shape
        return run(tensor, *args)

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        *args, group = ctx.args
        started = getattr(torch.ops.phalanx, adjoint.op)(grad, *adjoint.arguments(ctx.shape, *args), group)
        return None, adjoint.finish(_waited(started), ctx.shape, *args), *(None for _ in ctx.args)

    return _made(collective.name, forward, backward)


def _list_function(form: Form) -> Any:
    """A collective of several tensors, differentiable: apply(run, the op's other arguments, *tensors) gives a tuple."""
    adjoint = form.collective.adjoint

    def forward(ctx: Any, run: Callable[..., Any], arguments: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.args = _arguments(form.collective, form.name, arguments)
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(run(list(tensors), *arguments))

    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        *args, group = ctx.args
        given = adjoint.arguments(ctx.shapes[0], *args)  # in none of these do they depend on the shape
        started = getattr(torch.ops.phalanx, f"{adjoint.op}_coalesced")(grads, *given, group)
        finished = zip(map(_waited, started), ctx.shapes, strict=True)
        return None, None, *(adjoint.finish(part, shape, *args) for part, shape in finished)

    return _made(form.name, forward, backward)


def _made(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    camel = "".join(part.capitalize() for part in name.split("_"))  # the name that grad_fn shows
    return type(camel, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


class Wait(Function):
    """The waited tensor of a pending one; `run` gives it."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], tensor: torch.Tensor) -> Any:
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad


# By the name of the op.
FUNCTIONS: dict[str, Any] = {
    name: _list_function(form) if form.takes_list else _function(form.collective)
    for name, form in FORMS.items()
    if not form.writes
}
FUNCTIONS["broadcast_backward"] = _function(BROADCAST_BACKWARD)
FUNCTIONS["wait_tensor"] = Wait


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _differentiable(op: Any, function: Any) -> Callable[..., Any]:
    """The autograd kernel of a functional op."""
    call = _torch_compat.kernel_call(op)

    def kernel(keys: Any, tensor: torch.Tensor, *args: Any) -> Any:
        below = _torch_compat.below_autograd(keys)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return call(below, tensor, *args)

        def run(*inner: Any) -> Any:
            with _torch_compat.BelowAutograd():
                return call(below, *inner)

        return function.apply(run, tensor, *args)

    return kernel


def _differentiable_list(op: Any, function: Any) -> Callable[..., Any]:
    """The autograd kernel of a functional op of several tensors."""
    call = _torch_compat.kernel_call(op)

    def kernel(keys: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        below = _torch_compat.below_autograd(keys)
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return call(below, tensors, *args)

        def run(*inner: Any) -> Any:
            with _torch_compat.BelowAutograd():
                return call(below, *inner)

        return list(function.apply(run, args, *tensors))

    return kernel


def _in_place(op: Any, name: str, form: Form) -> Callable[..., Any]:
    """The autograd kernel of an op that writes into its first argument, or into `out`."""
    call = _torch_compat.kernel_call(op)
    instead = form.collective.function + ("_coalesced" if form.takes_list else "")

    def kernel(keys: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        written = kwargs.get("out", tensor)
        tensors = [*tensor] if isinstance(tensor, (list, tuple)) else [tensor, written]
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            raise RuntimeError(
                f"{name}: an op that writes into its argument has no gradient, and an argument needs one; use "
                f"{instead}, or call it with torch.no_grad() or on a detached tensor"
            )
        torch.autograd.graph.increment_version(written)
        call(_torch_compat.below_autograd(keys), tensor, *args, **kwargs)

    return kernel


def autograd_kernel(name: str) -> Callable[..., Any]:
    """The autograd kernel of the op of that name, one of OPS."""
    op = getattr(torch.ops.phalanx, name).default
    collective = BLOCKING.get(name, name)
    form = FORMS.get(collective)
    if form is None or not (form.takes_list or form.writes):
        return _differentiable(op, FUNCTIONS[collective])
    return _in_place(op, name, form) if form.writes else _differentiable_list(op, FUNCTIONS[collective])
