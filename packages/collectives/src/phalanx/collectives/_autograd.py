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
from phalanx.collectives._library import wait
from phalanx.collectives._op_table import BLOCKING, BROADCAST_BACKWARD, FORMS, Form
from phalanx.collectives.reductions import check_differentiable


def _function(form: Form) -> Any:
    """A collective, differentiable: apply(run, the op's other arguments, *tensors), where run(tensor or list of them,
    *those) starts it below autograd. For a list it gives a tuple."""
    collective, adjoint, takes_list = form.collective, form.collective.adjoint, form.takes_list
    adjoint_name = adjoint.op + ("_coalesced" if takes_list else "")

    def forward(ctx: Any, run: Callable[..., Any], arguments: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.args = arguments
        if collective.reduces:
            ctx.args = check_differentiable(form.name, arguments[0]), *arguments[1:]
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(run(list(tensors), *arguments)) if takes_list else run(*tensors, *arguments)

    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        *args, group = ctx.args
        given = adjoint.arguments(ctx.shapes[0], *args)  # for lists they never depend on the shape
        start = getattr(torch.ops.phalanx, adjoint_name)
        started = start(grads, *given, group) if takes_list else [start(*grads, *given, group)]
        finished = zip(map(wait, started), ctx.shapes, strict=True)
        return None, None, *(adjoint.finish(part, shape, *args) for part, shape in finished)

    camel = "".join(part.capitalize() for part in form.name.split("_"))  # the name that grad_fn shows
    return type(camel, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


class Wait(Function):
    """The waited tensor of a pending one; `run` gives it. It is applied as those of _function are."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], arguments: tuple[()], tensor: torch.Tensor) -> Any:
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, grad


# By the name of the op.
FUNCTIONS: dict[str, Any] = {name: _function(form) for name, form in FORMS.items() if not form.writes}
FUNCTIONS["broadcast_backward"] = _function(Form(BROADCAST_BACKWARD, "broadcast_backward"))
FUNCTIONS["wait_tensor"] = Wait


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _differentiable(op: Any, function: Any, takes_list: bool) -> Callable[..., Any]:
    """The autograd kernel of a functional op."""
    call = _torch_compat.kernel_call(op)

    def kernel(keys: Any, given: Any, *args: Any) -> Any:
        below = _torch_compat.below_autograd(keys)
        needs_gradient = any(tensor.requires_grad for tensor in given) if takes_list else given.requires_grad
        if not (needs_gradient and torch.is_grad_enabled()):
            return call(below, given, *args)

        def run(*inner: Any) -> Any:
            with _torch_compat.BelowAutograd():
                return call(below, *inner)

        return list(function.apply(run, args, *given)) if takes_list else function.apply(run, args, given)

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
    if form is not None and form.writes:
        return _in_place(op, name, form)
    return _differentiable(op, FUNCTIONS[collective], form is not None and form.takes_list)
