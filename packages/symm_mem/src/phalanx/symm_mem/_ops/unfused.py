"""all_gather along any dim, and reduce_scatter of a product, as one collective of the core without avoidable copies."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod

import torch

from phalanx.core import PhalanxError
from phalanx.symm_mem._allocation import is_symm_mem_tensor
from phalanx.symm_mem._cuda import stream_kwargs
from phalanx.symm_mem._group_buffers import gathered_memory, get_symm_mem_workspace, staging_of
from phalanx.symm_mem._ops._common import core_dtype, handle_of, reduction_of
from phalanx.symm_mem._process_group import RankGroup
from phalanx.symm_mem._state import current

# Measured. Small memory that an allocator has just got back is warm, but large memory goes back to the system, and the
# first access to each of its pages costs more than to fill it.
_FRESH_BYTES = 16 << 20
_KEPT_BYTES = 64 << 20  # limit for memory that is kept from one call to the next
_SMALL_BYTES = 512 << 10  # up to here a copy into the slots of the core is cheaper than the use of symmetric memory


def gather_into(
    operation: str, source: torch.Tensor, out: torch.Tensor, members: RankGroup, find_symmetric: bool = True
) -> None:
    """all_gather of contiguous tensors, from symmetric memory without a copy if `find_symmetric`. Collective."""
    try:
        if find_symmetric and is_symm_mem_tensor(source):
            handle = handle_of(operation, source, members.name)
            count, stream = source.numel(), handle.stream()
            handle.symm.all_gather(handle.offset, out.data_ptr(), count, core_dtype(source), stream=stream)
        else:
            group = members.initialize(current(), 0)
            options = stream_kwargs(source)
            group.all_gather(source.data_ptr(), out.data_ptr(), source.numel(), core_dtype(source), **options)
    except PhalanxError as error:
        members.with_global_ranks(error)
        raise


def gathered(operation: str, tensor: torch.Tensor, dim: int, members: RankGroup, keep: bool) -> torch.Tensor:
    """The tensors of all ranks along a dim, contiguous; valid until the next call unless `keep`. Collective."""
    size, source = members.info.world_size, tensor.contiguous()
    if size == 1:
        return tensor.clone(memory_format=torch.contiguous_format) if keep else source
    nbytes, stacked_shape = size * source.numel() * source.element_size(), [size, *source.shape]
    if source.is_cpu and _FRESH_BYTES < nbytes <= _KEPT_BYTES and not (keep and dim == 0):
        stacked = gathered_memory(members, stacked_shape, source.dtype)
    else:
        stacked = source.new_empty(stacked_shape)
    gather_into(operation, source, stacked, members, source.is_cuda or nbytes > size * _SMALL_BYTES)
    if dim == 0:
        return stacked.view(size * source.shape[0], *source.shape[1:])
    shape = list(source.shape)
    shape[dim] *= size
    whole = source.new_empty(shape)
    whole.view(*source.shape[:dim], size, *source.shape[dim:]).copy_(stacked.movedim(0, dim))
    return whole


def scattered(
    call: str,
    product: Callable[[torch.Tensor | None], torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    dim: int,
    reduce_op: str,
    members: RankGroup,
    device: torch.device,
) -> torch.Tensor:
    """Reduce a product that every rank computes, by sum or avg, and return this rank's part along a dim. Collective.

    `product` computes into the contiguous tensor that it is given, or into a new one, and returns it. `call` has, for
    error texts, all arguments that must be the same on all ranks.
    """
    size, part = members.info.world_size, list(shape)
    part[dim] //= size
    out, op = torch.empty(part, dtype=dtype, device=device), reduction_of(call, reduce_op)
    nbytes, count = prod(shape) * dtype.itemsize, prod(part)
    if size == 1:
        product(out)
        return out
    try:
        if device.type == "cpu" and nbytes <= _SMALL_BYTES:
            parts = _by_rank(product(None), dim, size).contiguous()
            group = members.initialize(current(), 0)
            group.reduce_scatter(parts.data_ptr(), out.data_ptr(), count, core_dtype(out), op)
            return out
        on_gpu = device.type == "cuda"
        memory = get_symm_mem_workspace(members.name, nbytes, device) if on_gpu else None
        with nullcontext(memory) if memory is not None else staging_of(members, nbytes, call) as handle:
            own = handle.get_buffer(handle.rank, shape if dim == 0 else [size, *part], dtype)
            if dim == 0:
                product(own)
            else:
                own.copy_(_by_rank(product(None), dim, size))
            handle.symm.reduce_scatter(0, out.data_ptr(), count, core_dtype(out), op, stream=handle.stream())
    except PhalanxError as error:
        members.with_global_ranks(error)
        raise
    return out


def _by_rank(product: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A contiguous product as the parts of the ranks, stacked along a new first dim."""
    shape = product.shape
    return product.view(*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :]).movedim(dim, 0)
