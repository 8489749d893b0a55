"""Common parts of the ops: checks of arguments, counterparts of a tensor on other ranks, reductions, fakes."""

from collections.abc import Sequence

import torch

from phalanx.collectives.reductions import REDUCTIONS, accumulation_dtype, combine, unknown_reduction
from phalanx.core import InvalidArgumentError, ReduceOp
from phalanx.symm_mem._handle import SymmetricMemory
from phalanx.symm_mem._process_group import resolve
from phalanx.symm_mem._rendezvous import rendezvous


def handle_of(operation: str, tensor: torch.Tensor, group_name: str, contiguous: bool = True) -> SymmetricMemory:
    """The handle of a symmetric tensor. Collective the first time for its memory and the group.

    Raises:
        InvalidArgumentError: The tensor is ordinary memory, or not contiguous although it must be.
    """
    if contiguous and not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"{operation}: the symmetric tensor must be contiguous; it has shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}"
        )
    return rendezvous(tensor, group_name)


def reduction_of(operation: str, name: str) -> ReduceOp:
    """The reduction of the core with this name.

    Raises:
        InvalidArgumentError: There is no such reduction.
    """
    reduction = REDUCTIONS.get(name.lower()) if isinstance(name, str) else None
    if reduction is None:
        raise InvalidArgumentError(unknown_reduction(operation, name))
    return reduction


def core_dtype(tensor: torch.Tensor) -> str:
    """The name of the dtype in the core."""
    return str(tensor.dtype).removeprefix("torch.")


def check_like(operation: str, out: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> None:
    """Raise an error unless an output has this shape, and the dtype and device of another tensor."""
    if list(out.shape) != list(shape) or out.dtype != like.dtype or out.device != like.device:
        raise InvalidArgumentError(
            f"{operation}: the output has shape {list(out.shape)} of {out.dtype} on {out.device}; it must have "
            f"{list(shape)} of {like.dtype} on {like.device}"
        )


def size_of(group_name: str, operation: str = "an op of symm_mem") -> int:
    """The number of ranks of a group. Not collective."""
    return resolve(group_name, operation).info.world_size


def peer_views(handle: SymmetricMemory, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The counterparts of a symmetric tensor or view on all ranks: the same shape, strides and offset in the block."""
    start = handle.offset // tensor.element_size()
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return [tensor for _ in range(handle.world_size)]
    return [
        handle.get_buffer(rank, (extent,), tensor.dtype, start).as_strided(tensor.shape, tensor.stride())
        for rank in range(handle.world_size)
    ]


def reduce_views(views: Sequence[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """Reduce tensors of any strides in their order; floats of 16 and 8 bits are added in float32."""
    reduction, dtype = reduce_op.lower(), views[0].dtype
    wide = accumulation_dtype(dtype, reduction)
    parts = [views[0].to(wide, copy=True), *(view.to(wide) for view in views[1:])]
    return combine(parts, reduction, len(views)).to(dtype)


def fake_last(*arguments: torch.Tensor) -> torch.Tensor:
    """The fake result of an op that returns its last argument."""
    return arguments[-1]


def fake_none(*arguments: object) -> None:
    """The fake result of an op without a result."""
