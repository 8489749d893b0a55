"""What torch has as functions of its module: data with a signal, and reduce_scatter of blocks of any size."""

from collections.abc import Sequence

import torch

from phalanx.collectives import GroupLike
from phalanx.core import InvalidArgumentError
from phalanx.symm_mem import _ops
from phalanx.symm_mem._groups import resolve
from phalanx.symm_mem._handle import SymmetricMemory


def put_signal(src: torch.Tensor, hdl: SymmetricMemory, peer: int) -> None:
    """Copy a tensor into the memory of a rank, then send that rank a signal. Never blocks. Not collective.

    As `torch.distributed._symmetric_memory.put_signal`. The signal is one of channel 0 of the handle, and
    `SymmetricMemory.wait_signal` takes it as well.

    Args:
        src: What to copy, of any strides, on the CPU. It lands where the tensor given to `rendezvous` starts in the
            block of the peer, contiguous, in its own dtype.
        hdl: From `rendezvous`.
        peer: The receiver's position in the group.

    Raises:
        InvalidArgumentError: There is no such rank, `src` does not fit into its block, or an argument is of the wrong
            kind. Nothing was copied.
        RevokedError: The group failed before.
    """
    _check_handle("put_signal", hdl)
    if not isinstance(src, torch.Tensor) or src.device != hdl.device:
        raise InvalidArgumentError(
            f"put_signal: src is {f'on {src.device}' if isinstance(src, torch.Tensor) else repr(src)}; give a tensor "
            f"on {hdl.device}"
        )
    hdl.get_remote_tensor(peer, src.shape, src.dtype).copy_(src.detach())
    hdl.put_signal(peer)


def wait_signal(hdl: SymmetricMemory, peer: int) -> None:
    """Wait for a signal of a rank, after which what it put before is in this rank's memory. Not collective.

    As `torch.distributed._symmetric_memory.wait_signal`; `SymmetricMemory.wait_signal` takes a channel and a timeout.

    Args:
        hdl: From `rendezvous`.
        peer: The sender's position in the group.

    Raises:
        WaitTimeoutError, PeerDeadError, InvalidArgumentError: As `SymmetricMemory.wait_signal`.
    """
    _check_handle("wait_signal", hdl)
    hdl.wait_signal(peer)


def reduce_scatter_offset(
    input: torch.Tensor,  # noqa: A002 - torch's name
    out: Sequence[torch.Tensor],
    group: GroupLike,
    *,
    dim: int,
    offsets: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    red_op: str = "sum",
) -> None:
    """Cut a symmetric matrix into blocks of rows or columns, and reduce each of them to a rank of choice. Collective.

    As `torch.distributed._symmetric_memory.reduce_scatter_offset`, where it is for NCCL and sums only. Unlike there, a
    rank may get any number of blocks, none included, of any sizes; strides are free. The same as the op
    `torch.ops.phalanx.reduce_scatter_offset`, whose group is a name.

    Args:
        input: Symmetric, of two dims; the same shape and strides on all ranks. It stays as it is.
        out: A tensor for each block that comes to this rank, in the order of the blocks: the block's shape, the
            input's dtype. It may lie in symmetric memory, that of the input included.
        group: As in `rendezvous`.
        dim: Along which the blocks lie: 0 for blocks of rows, 1 for blocks of columns.
        offsets: Where each block ends along `dim`; the first begins at 0, each other one where the one before ends.
            None cuts the dim into as many equal blocks as there are ranks.
        dst_ranks: For each block the position in the group of the rank that gets it; None deals them out in turn.
        red_op: sum, avg, product, min, max, band, bor or bxor; floats of 16 and 8 bits are added in float32.

    Raises:
        InvalidArgumentError: An argument is wrong, as seen on this rank. Nothing was sent.
        ImportError: The ops could not be registered with torch.
        PhalanxError: As `rendezvous`.
    """
    name = resolve(group).name
    _ops.op("reduce_scatter_offset")(input, list(out), name, dim, offsets, dst_ranks, red_op)


def _check_handle(operation: str, handle: SymmetricMemory) -> None:
    if not isinstance(handle, SymmetricMemory):
        raise InvalidArgumentError(f"{operation}: hdl is a {type(handle).__name__}; give what rendezvous returned")
