"""Gradients of the collectives.

A rank's gradient is that of the sum of all ranks' losses with respect to its own input, as if every rank called
backward at the same time: so every backward pass is a collective of its own.

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

from phalanx.collectives import _native, _torch_compat
from phalanx.collectives._reductions import check_differentiable


def _waited(started: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = torch.ops.phalanx.wait_tensor(started)
    return done


# In each of these `run` starts the collective below autograd: run(tensor, *the op's other arguments).


class AllReduce(Function):
    """all_reduce, differentiable."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], tensor: torch.Tensor, reduce_op: str, group: str) -> Any:
        ctx.reduce_op, ctx.group = check_differentiable("all_reduce", reduce_op), group
        return run(tensor, reduce_op, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, _waited(torch.ops.phalanx.all_reduce(grad, ctx.reduce_op, ctx.group)), None, None


class AllGather(Function):
    """all_gather_into_tensor, differentiable."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], tensor: torch.Tensor, size: int, group: str) -> Any:
        ctx.size, ctx.group, ctx.scalar = size, group, tensor.dim() == 0
        return run(tensor, size, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        part = _waited(torch.ops.phalanx.reduce_scatter_tensor(grad, "sum", ctx.size, ctx.group))
        return None, part.squeeze(0) if ctx.scalar else part, None, None


class ReduceScatter(Function):
    """reduce_scatter_tensor, differentiable."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., torch.Tensor], tensor: torch.Tensor, reduce_op: str, size: int, group: str
    ) -> Any:
        ctx.reduce_op, ctx.size, ctx.group = check_differentiable("reduce_scatter_tensor", reduce_op), size, group
        return run(tensor, reduce_op, size, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        whole = _waited(torch.ops.phalanx.all_gather_into_tensor(grad, ctx.size, ctx.group))
        return None, whole / ctx.size if ctx.reduce_op == "avg" else whole, None, None, None


class AllGatherV(Function):
    """all_gather_v, differentiable."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], tensor: torch.Tensor, sizes: list[int], group: str) -> Any:
        ctx.sizes, ctx.own, ctx.group = sizes, tensor.size(0), group
        return run(tensor, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        part = torch.ops.phalanx.reduce_scatter_v(grad, "sum", ctx.sizes, ctx.own, ctx.group)
        return None, _waited(part), None, None


class ReduceScatterV(Function):
    """reduce_scatter_v, differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., torch.Tensor],
        tensor: torch.Tensor,
        reduce_op: str,
        sizes: list[int],
        own: int,
        group: str,
    ) -> Any:
        ctx.reduce_op, ctx.sizes, ctx.group = check_differentiable("reduce_scatter_v", reduce_op), sizes, group
        return run(tensor, reduce_op, sizes, own, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        whole = _waited(torch.ops.phalanx.all_gather_v(grad, ctx.sizes, ctx.group))
        divided = whole / len(ctx.sizes) if ctx.reduce_op == "avg" else whole
        return None, divided, None, None, None, None


class AllToAll(Function):
    """all_to_all_single, differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., torch.Tensor],
        tensor: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: str,
    ) -> Any:
        ctx.output_split_sizes, ctx.input_split_sizes, ctx.group = output_split_sizes, input_split_sizes, group
        return run(tensor, output_split_sizes, input_split_sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back = torch.ops.phalanx.all_to_all_single(grad, ctx.input_split_sizes, ctx.output_split_sizes, ctx.group)
        return None, _waited(back), None, None, None


class Broadcast(Function):
    """broadcast, differentiable."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], tensor: torch.Tensor, src: int, group: str) -> Any:
        ctx.src, ctx.group = src, group
        return run(tensor, src, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, torch.ops.phalanx.broadcast_backward(grad, ctx.src, ctx.group), None, None


class BroadcastBackward(Function):
    """The sum on the source and zeros elsewhere, differentiable."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], tensor: torch.Tensor, src: int, group: str) -> Any:
        ctx.src, ctx.group = src, group
        return run(tensor, src, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, _waited(torch.ops.phalanx.broadcast(grad, ctx.src, ctx.group)), None, None


def _broadcast_backward(tensor: torch.Tensor, src: int, group: str) -> torch.Tensor:
    """The kernel of phalanx::broadcast_backward.

    It is an op of its own because its result depends on the rank, and a compiled graph must not: torch's caches give
    one rank the graphs of another.
    """
    from phalanx.collectives import _registry  # it needs _ops, which needs this module

    total = _waited(torch.ops.phalanx.all_reduce(tensor, "sum", group))
    return total if _registry.entry_named(group).group_rank == src else total.zero_()


# ---- of several tensors: run(tensors, *the op's other arguments) -> a list; apply(run, arguments, *tensors) -> a tuple


class _Coalesced(Function):
    @classmethod
    def start(cls, run: Callable[..., Any], arguments: tuple[Any, ...], tensors: Any) -> tuple[torch.Tensor, ...]:
        return tuple(run(list(tensors), *arguments))


class AllReduceCoalesced(_Coalesced):
    """all_reduce_coalesced, differentiable."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], arguments: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.reduce_op, ctx.group = check_differentiable("all_reduce_coalesced", arguments[0]), arguments[1]
        return _Coalesced.start(run, arguments, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *map(_waited, torch.ops.phalanx.all_reduce_coalesced(grads, ctx.reduce_op, ctx.group))


class AllGatherCoalesced(_Coalesced):
    """all_gather_into_tensor_coalesced, differentiable."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], arguments: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.size, ctx.group = arguments
        ctx.scalars = [tensor.dim() == 0 for tensor in tensors]
        return _Coalesced.start(run, arguments, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = torch.ops.phalanx.reduce_scatter_tensor_coalesced(grads, "sum", ctx.size, ctx.group)
        whole = zip(map(_waited, parts), ctx.scalars, strict=True)
        return None, None, *(part.squeeze(0) if scalar else part for part, scalar in whole)


class ReduceScatterCoalesced(_Coalesced):
    """reduce_scatter_tensor_coalesced, differentiable."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], arguments: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.reduce_op, ctx.size, ctx.group = arguments
        ctx.reduce_op = check_differentiable("reduce_scatter_tensor_coalesced", ctx.reduce_op)
        return _Coalesced.start(run, arguments, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        whole = map(_waited, torch.ops.phalanx.all_gather_into_tensor_coalesced(grads, ctx.size, ctx.group))
        return None, None, *(each / ctx.size if ctx.reduce_op == "avg" else each for each in whole)


class Wait(Function):
    """The waited tensor of a pending one; `run` gives it."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], tensor: torch.Tensor) -> Any:
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad


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


def _in_place(op: Any, name: str, instead: str) -> Callable[..., Any]:
    """The autograd kernel of an op that writes into its first argument, or into `out`."""
    call = _torch_compat.kernel_call(op)

    def kernel(keys: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        written = kwargs.get("out", tensor)
        given = [*tensor] if isinstance(tensor, (list, tuple)) else [tensor, written]
        if torch.is_grad_enabled() and any(each.requires_grad for each in given):
            raise RuntimeError(
                f"{name} writes into its argument, which has no gradient; use {instead}, or call it with "
                "torch.no_grad() or on a detached tensor"
            )
        torch.autograd.graph.increment_version(written)
        call(_torch_compat.below_autograd(keys), tensor, *args, **kwargs)

    return kernel


_FUNCTIONS = {
    "all_reduce": AllReduce,
    "all_gather_into_tensor": AllGather,
    "reduce_scatter_tensor": ReduceScatter,
    "all_gather_v": AllGatherV,
    "reduce_scatter_v": ReduceScatterV,
    "all_to_all_single": AllToAll,
    "broadcast": Broadcast,
    "broadcast_backward": BroadcastBackward,
    "wait_tensor": Wait,
}
COALESCED: dict[str, Any] = {
    "all_reduce_coalesced": AllReduceCoalesced,
    "all_gather_into_tensor_coalesced": AllGatherCoalesced,
    "reduce_scatter_tensor_coalesced": ReduceScatterCoalesced,
}
_IN_PLACE = {
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced_": "all_reduce_coalesced",
    "broadcast_": "broadcast",
    "all_gather_into_tensor_out": "all_gather_tensor",
    "reduce_scatter_tensor_out": "reduce_scatter_tensor",
}

# Of the namespace phalanx: those that are also complete on return, and all with an autograd kernel.
COLLECTIVES = tuple(
    name for name in (*_FUNCTIONS, *COALESCED, *_IN_PLACE) if name not in ("broadcast_backward", "wait_tensor")
)
BLOCKING = {f"blocking_{name}": name for name in COLLECTIVES}
OPS = (*_FUNCTIONS, *COALESCED, *_IN_PLACE, *BLOCKING)


def register(library: Any) -> list[Any]:
    """Register the autograd kernels of the ops, and the op that only they use.

    Args:
        library: A fragment of the library phalanx.

    Returns:
        What must be kept for them.
    """
    library.define("broadcast_backward(Tensor tensor, int src, str group_name) -> Tensor")
    _torch_compat.implement(library, "broadcast_backward", _broadcast_backward, "CompositeExplicitAutograd")
    compiled = _native.load(OPS)
    # Where the compiled kernels are, calls that need a gradient go from them to ops of the same names elsewhere.
    kernels = library if compiled is None else _torch_compat.fragment("phalanx_autograd")
    for name in OPS:
        op = getattr(torch.ops.phalanx, name).default
        if kernels is not library:
            kernels.define(str(op._schema).removeprefix("phalanx::"))
        collective = BLOCKING.get(name, name)
        if collective in _FUNCTIONS:
            kernel = _differentiable(op, _FUNCTIONS[collective])
        elif collective in COALESCED:
            kernel = _differentiable_list(op, COALESCED[collective])
        else:
            kernel = _in_place(op, name, _IN_PLACE[collective])
        _torch_compat.implement(kernels, name, kernel, "Autograd", with_keys=True)
    return [library, kernels]
