"""A barrier as an op of torch.ops.phalanx, and its functional form.

It takes a tensor and gives a copy of it, as the other ops do: the tensor says by its device which backend is meant, and
in a compiled graph what comes before the barrier and what after it.
"""

from typing import Any

import torch

from phalanx.collectives import _recording, _torch_compat
from phalanx.collectives._errors import fail
from phalanx.collectives._layout import contiguous_like
from phalanx.collectives._process_group import GroupLike, ensure_initialized, find, traced_name
from phalanx.collectives._registry import state_named
from phalanx.collectives._torch_compat import is_dynamo_compiling
from phalanx.collectives._transport import transport_for

_SCHEMA = "barrier(Tensor tensor, str group_name) -> Tensor"


def barrier(group: GroupLike = None, tensor: torch.Tensor | None = None, tag: str = "") -> torch.Tensor:
    """Wait until every rank of the group has called this barrier. Collective. The host waits, also for GPU tensors.

    As torch.distributed.barrier, in a form that can be traced. A compiler keeps the barrier in the graph, but only the
    data tells it which other ops come before and after the barrier. So in a compiled graph pass a tensor that was
    computed before, and compute from the result what comes after.

    Args:
        group, tag: As for `all_reduce`.
        tensor: Any tensor; it is complete before this rank enters the barrier. Its device says which backend is used.
            None for the CPU.

    Returns:
        A copy of `tensor`, contiguous, made after the barrier; an empty tensor if none was given. Differentiable.

    Raises:
        ValueError: The group is not one of this rank's, or there is no default group; nothing was sent.
        TypeError: `tensor` is not a tensor; nothing was sent.
        RuntimeError: A coalescing manager of the group is open; nothing was sent.
        PhalanxError: As for `all_reduce`.

    Example:
        >>> barrier(group, torch.ones(2))
        tensor([1., 1.])
    """
    token = torch.empty(0, device="cpu") if tensor is None else tensor
    if is_dynamo_compiling():
        traced: torch.Tensor = torch.ops.phalanx.barrier(token, traced_name(group, tag, "barrier"))
        return traced
    if not isinstance(token, torch.Tensor):
        raise TypeError(f"barrier: tensor must be a torch.Tensor or None, not {type(token).__name__}")
    try:
        name = find(group, tag, "barrier").op_name
        done: torch.Tensor = torch.ops.phalanx.barrier(token, name)
        return done
    except (RuntimeError, ValueError) as error:
        fail(error)


# ---- the op ----------------------------------------------------------------------------------------------------------


def _barrier(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    state = state_named(group_name)
    if _recording.recorder_on(state) is not None:
        raise RuntimeError(
            f"barrier on group '{state.name}': a coalescing_manager is open, and the collectives called in its body "
            "are sent only at its end; call the barrier after the with block"
        )
    done = torch.ops.phalanx.wait_tensor(tensor)
    ensure_initialized(state, tensor)
    transport_for(state, tensor).barrier(tensor)
    copied: torch.Tensor = done.clone(memory_format=torch.contiguous_format)
    return copied


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad, None


def register() -> None:
    """Register the op."""
    _torch_compat.add_op(_SCHEMA, _barrier, contiguous_like)
    torch.library.register_autograd("phalanx::barrier", _backward, lib=_torch_compat.library("phalanx"))
