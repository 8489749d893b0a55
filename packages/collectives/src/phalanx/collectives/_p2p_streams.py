"""Messages between memory of GPUs, put on streams of their own: what is computed meanwhile does not wait for a peer."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed import Work

from phalanx.collectives import reductions
from phalanx.collectives._cuda import options_on
from phalanx.collectives._group_state import GroupState
from phalanx.collectives._work import StreamWork
from phalanx.core import check, ffi, lib


class Message(NamedTuple):
    """A message whose arguments were checked.

    Attributes:
        sends: Whether it is sent, or received.
        tensor: An ordinary tensor, contiguous where it is written.
        peer: The other rank within the group, or ANY_RANK.
        tag: Tells messages apart.
        state: The group.
    """

    sends: bool
    tensor: torch.Tensor
    peer: int
    tag: int
    state: GroupState


def put(messages: Sequence[Message], which: Hashable) -> list[Work]:
    """Send and receive messages as one batch, after the work on the current stream, and return at once.

    Args:
        messages: Of one group whose GPUs the core serves, with contiguous tensors on one GPU; there may be none.
        which: Chooses the stream: the same stream for the same value.

    Returns:
        A work for each message.

    Raises:
        ValueError: The tensors are on several GPUs.
        PhalanxError: The messages could not be put on the stream.
    """
    if not messages:
        return []
    state, device = messages[0].state, messages[0].tensor.device
    assert state.core is not None
    for message in messages:
        if message.tensor.device != device:
            raise ValueError(
                f"batch_isend_irecv on group '{state.name}': the batch has tensors on {device} and "
                f"{message.tensor.device}; all must be on the same GPU"
            )
    listed = ffi.new("phx_message[]", [_fields(message) for message in messages])
    with state.side_streams.stream(device, which) as stream:
        options, _gpu = options_on(device)
        check(lib.phx_messages(state.core.pointer, listed, len(messages), options))
        for message in messages:
            message.tensor.record_stream(stream)  # so that it is not freed before, whatever drops it
            if not message.sends and not message.tensor.is_inference():
                increment_version(message.tensor)
        return [StreamWork(device) for _ in messages]


def _fields(message: Message) -> tuple[object, ...]:
    sends, tensor, peer, tag, _ = message
    code, lanes, _ = reductions.element_type(tensor.dtype)
    kind = lib.PHX_MESSAGE_SEND if sends else lib.PHX_MESSAGE_RECV
    address = ffi.cast("void *", tensor.data_ptr())
    return ffi.sizeof("phx_message"), kind, address, tensor.numel() * lanes, code, peer, tag, 0
