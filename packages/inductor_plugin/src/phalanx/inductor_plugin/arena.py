"""Calls for an arena and views of it, on the CPU or on a GPU: there the ops are others, which say the GPU.

An op without tensors has no device, and a compiler knows only from the arguments where a view lies. What stands for an
arena is a tensor of the CPU in any case: the number that views find it by, for which no stream is waited for.
"""

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from phalanx.inductor_plugin import ops
from phalanx.inductor_plugin.emit import Emitter, Size


def make(call: Callable[..., Node], device: torch.device, nbytes: Size, text: str, group: str) -> Node:
    """The arena of a plan.

    Args:
        call: Puts a call into the graph.
        device: Where its memory is; a GPU with its index.
        nbytes: Of it.
        text: The plan.
        group: The name of the group.
    """
    if device.type == "cpu":
        return call(ops.plain("symm_arena"), nbytes, text, group)
    return call(ops.plain("symm_arena_cuda"), nbytes, text, group, device.index)


def view(
    emit: Emitter, arena: Node, device: torch.device, offset: int, sizes: Sequence[Size], dtype: torch.dtype
) -> Node:
    """A tensor in this rank's memory of an arena on that device."""
    if device.type == "cpu":
        return emit.call(ops.plain("arena_view"), arena, offset, sizes, dtype)
    return emit.call(ops.plain("arena_view_cuda"), arena, offset, sizes, dtype, device.index)


def peer_view(
    emit: Emitter, arena: Node, device: torch.device, peer: int, offset: int, sizes: Sequence[Size], dtype: torch.dtype
) -> Node:
    """The same in the memory of another rank of the group; on a GPU mapped into this rank's."""
    if device.type == "cpu":
        return emit.call(ops.plain("peer_view"), arena, peer, offset, sizes, dtype)
    return emit.call(ops.plain("peer_view_cuda"), arena, peer, offset, sizes, dtype, device.index)
