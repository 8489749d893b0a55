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


class Row(NamedTuple):
    """A message.

    Attributes:
        sends: Or receives.
        memory: Contiguous, on a GPU.
        peer: The other rank within the group.
        tag: That of the other side.
    """

    sends: bool
    memory: torch.Tensor
    peer: int
    tag: int


def put(state: GroupState, rows: Sequence[Row], which: Hashable) -> list[Work]:
    """Send and receive messages as one batch, after the work on the current stream, and return at once.

    Args:
        state: A group whose GPUs the core serves.
        rows: The messages, all on one GPU; there may be none.
        which: Chooses the stream: the same stream for the same value.

    Returns:
        A work for each message.

    Raises:
        ValueError: The tensors are on several GPUs.
        PhalanxError: The messages could not be put on the stream.
    """
    if not rows:
        return []
    assert state.core is not None
    device = rows[0].memory.device
    for row in rows:
        if row.memory.device != device:
            raise ValueError(
                f"batch_isend_irecv on group '{state.name}': the batch has tensors on {device} and "
                f"{row.memory.device}; all must be on the same GPU"
            )
    listed = ffi.new("phx_message[]", [_fields(row) for row in rows])
    with state.side_streams.stream(device, which) as stream:
        options, _gpu = options_on(device)
        check(lib.phx_messages(state.core.pointer, listed, len(rows), options))
        for row in rows:
            row.memory.record_stream(stream)  # so that it is not freed before, whatever drops it
            if not row.sends and not row.memory.is_inference():
                increment_version(row.memory)
        return [StreamWork(device) for _ in rows]


def _fields(row: Row) -> tuple[object, ...]:
    code, lanes, _ = reductions.element_type(row.memory.dtype)
    kind = lib.PHX_MESSAGE_SEND if row.sends else lib.PHX_MESSAGE_RECV
    address = ffi.cast("void *", row.memory.data_ptr())
    return (ffi.sizeof("phx_message"), kind, address, row.memory.numel() * lanes, code, row.peer, row.tag, 0)
