"""A tensor gathered whole, and a product scattered whole: with no copy that can be spared, and nothing overlapped."""

from collections.abc import Callable, Sequence
from math import prod

import torch

from phalanx.core import PhalanxError
from phalanx.symm_mem._alloc import is_symm_mem_tensor
from phalanx.symm_mem._context import current
from phalanx.symm_mem._groups import RankGroup
from phalanx.symm_mem._ops.peers import core_dtype, handle_of, reduction_of
from phalanx.symm_mem._ops.staging import staging_of
from phalanx.symm_mem._streams import place_of

# Measured. What an allocator has just got back is warm, but large pieces go back to the system, and to touch each of
# their pages for the first time costs more than to fill it.
_FRESH_BYTES = 16 << 20
_KEPT_BYTES = 64 << 20  # at most, of memory that is kept from one call to the next
_SMALL_BYTES = 512 << 10  # up to which a copy into the core's slots is cheaper than to find and use symmetric memory
_PLACE = "gathered"  # in the attributes of a RankGroup, with which it goes


def gather_into(operation: str, source: torch.Tensor, out: torch.Tensor, members: RankGroup, look: bool = True) -> None:
    """all_gather of contiguous tensors, without a copy where they are symmetric, if it looks for that. Collective."""
    try:
        if look and is_symm_mem_tensor(source):
            handle = handle_of(operation, source, members.name)
            count, stream = source.numel(), handle.stream()
            handle.symm.all_gather(handle.offset, out.data_ptr(), count, core_dtype(source), stream=stream)
        else:
            group = members.meet(current(), 0)
            place = place_of(source)
            group.all_gather(source.data_ptr(), out.data_ptr(), source.numel(), core_dtype(source), **place)
    except PhalanxError as error:
        members.in_global_ranks(error)
        raise


def gathered(operation: str, tensor: torch.Tensor, dim: int, members: RankGroup, keep: bool) -> torch.Tensor:
    """The tensors of all ranks along a dim, contiguous. Collective.

    Args:
        operation: For error texts.
        tensor: This rank's.
        dim: 0 to tensor.dim() - 1.
        members: The group.
        keep: Whether the result is the caller's to keep. Otherwise it is good until the next call.
    """
    size = members.info.world_size
    if size == 1:
        return tensor.clone(memory_format=torch.contiguous_format) if keep else tensor.contiguous()
    source, shape = tensor.contiguous(), list(tensor.shape)
    shape[dim] *= size
    look = source.numel() * source.element_size() > _SMALL_BYTES
    if dim == 0:
        whole = source.new_empty(shape) if keep else _used_before(members, shape, source)
        gather_into(operation, source, whole, members, look)
        return whole
    stacked = _used_before(members, [size, *source.shape], source)
    gather_into(operation, source, stacked, members, look)
    whole = source.new_empty(shape)
    whole.view(*source.shape[:dim], size, *source.shape[dim:]).copy_(stacked.movedim(0, dim))
    return whole


def _used_before(members: RankGroup, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor that nobody needs after the call."""
    nbytes = prod(shape) * like.element_size()
    if not _FRESH_BYTES < nbytes <= _KEPT_BYTES:
        return like.new_empty(shape)
    found: torch.Tensor | None = vars(members).get(_PLACE)
    if found is None or found.numel() < nbytes:
        found = vars(members)[_PLACE] = torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)
    return found[:nbytes].view(like.dtype).view(tuple(shape))


def scattered(
    what: str,
    product: Callable[[torch.Tensor | None], torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    dim: int,
    reduce_op: str,
    members: RankGroup,
) -> torch.Tensor:
    """Sum up a product that every rank computes, and keep this rank's part of it. Collective.

    Args:
        what: The call, with all that must be alike on all ranks.
        product: Computes into the contiguous tensor that it is given, or into one of its own, and returns it.
        shape: Of the product; a multiple of the group size along dim.
        dtype: Of the product.
        dim: 0 to len(shape) - 1.
        reduce_op: sum or avg.
        members: The group.
    """
    size, part = members.info.world_size, list(shape)
    part[dim] //= size
    out, op = torch.empty(part, dtype=dtype), reduction_of(what, reduce_op)
    nbytes = prod(shape) * dtype.itemsize
    if size == 1:
        product(out)
        return out
    try:
        if nbytes <= _SMALL_BYTES:
            done = _stacked(product(None), dim, size).contiguous()
            group = members.meet(current(), 0)
            group.reduce_scatter(done.data_ptr(), out.data_ptr(), out.numel(), core_dtype(out), op)
            return out
        with staging_of(members, nbytes, what) as staging:
            mine = staging.own(shape if dim == 0 else [size, *part], dtype)
            if dim == 0:
                product(mine)
            else:
                mine.copy_(_stacked(product(None), dim, size))
            symm = staging.handle.symm
            symm.reduce_scatter(0, out.data_ptr(), out.numel(), core_dtype(out), op)
    except PhalanxError as error:
        members.in_global_ranks(error)
        raise
    return out


def _stacked(product: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A contiguous product as the parts of the ranks, one after another along a new first dim."""
    shape = product.shape
    return product.view(*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :]).movedim(dim, 0)
