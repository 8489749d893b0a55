"""all_to_all of blocks of rows or columns, and sums of what the ranks gave, without a permuted copy."""

from typing import Any

import torch

from phalanx.collectives import GroupLike
from phalanx.core import InvalidArgumentError
from phalanx.symm_mem._ops._common import check_like, handle_of, op, peer_views, reduce_views, reduction_of, size_of
from phalanx.symm_mem._process_group import resolve

_OPERATION = "all_to_all_nd"


def all_to_all_nd(
    input: torch.Tensor,  # noqa: A002 - torch's name
    out: torch.Tensor,
    scatter_dim: int,
    gather_dim: int,
    *,
    group: GroupLike,
) -> None:
    """Give each rank its block of rows or columns of a matrix, and lay those that come out along the other dim.

    As `torch.distributed._symmetric_memory.all_to_all_nd`, which is for NCCL. Each rank reads the memory of the others,
    so that nothing is permuted before or after. Collective. The op `torch.ops.phalanx.all_to_all_nd` does the same for
    the name of a group.

    Args:
        input: A symmetric tensor, with the same shape and strides on all ranks. For scatter_dim 1 and G ranks it is
            `[rows, G * columns]` or `[rows, G, columns]`, for scatter_dim 0 it is `[G * rows, columns]` or
            `[G, rows, columns]`.
        out: A contiguous tensor, not in the memory of `input`. For gather_dim 0 it is `[G, rows, columns]` or
            `[G * rows, columns]`, and `out[j]` comes from rank j; for gather_dim 1 it is `[rows, G, columns]` or
            `[rows, G * columns]`, and `out[:, j]` comes from rank j.
        scatter_dim, gather_dim: 1 and 0, or 0 and 1.
        group: As in `rendezvous`.

    Raises:
        InvalidArgumentError: An argument is wrong on this rank. Nothing was sent.
        PhalanxError: As `rendezvous`.

    Example:
        >>> matrix = empty(1, 2).copy_(torch.tensor([[10.0 * rank, 10.0 * rank + 1]]))
        >>> columns = torch.empty(2, 1)
        >>> all_to_all_nd(matrix, columns, 1, 0, group=group)
        >>> columns  # on rank 1
        tensor([[ 1.],
                [11.]])
    """
    torch.ops.phalanx.all_to_all_nd(input, out, scatter_dim, gather_dim, resolve(group, "all_to_all_nd").name)


def reduce_partials(
    partials: torch.Tensor, *, dim: int, reduce_op: str, output_dtype: torch.dtype, group_size: int
) -> torch.Tensor:
    """Reduce what the ranks gave, which lies along a dim of a tensor of this rank. Not collective.

    As `torch.distributed._symmetric_memory.reduce_partials`. The bits are those of `reduce_scatter`: partials are added
    in their order, those of 16 and 8 bits in float32, and rounded once.

    Args:
        partials: Any shape and strides, with one part for each rank along `dim`.
        dim: The dim of the ranks, which the result does not have.
        reduce_op: sum, avg, product, min, max, band, bor or bxor; torch has the first two.
        output_dtype: The dtype of the result.
        group_size: The number of ranks.

    Raises:
        InvalidArgumentError: There is no such reduction, or not as many parts as ranks.

    Example:
        >>> reduce_partials(torch.ones(2, 3), dim=0, reduce_op="sum", output_dtype=torch.float32, group_size=2)
        tensor([2., 2., 2.])
    """
    reduction_of("reduce_partials", reduce_op)
    parts = partials.unbind(dim)
    if len(parts) != group_size:
        raise InvalidArgumentError(
            f"reduce_partials: dim {dim} of {list(partials.shape)} must be the group size, {group_size}"
        )
    return reduce_views(parts, reduce_op).to(output_dtype)


def _blocks(
    tensor: torch.Tensor, out: torch.Tensor, scatter_dim: int, gather_dim: int, group_name: str
) -> tuple[int, list[int]]:
    """Check the arguments. Returns the length of a block along scatter_dim, and the shape of `out` with 3 dims."""
    if (scatter_dim, gather_dim) not in ((1, 0), (0, 1)):
        raise InvalidArgumentError(
            f"{_OPERATION}: scatter_dim is {scatter_dim} and gather_dim {gather_dim}; give 1 and 0, or 0 and 1"
        )
    size, shape = size_of(group_name), list(tensor.shape)
    if len(shape) == 3 and shape[scatter_dim] == size:
        length, block = 1, [each for dim, each in enumerate(shape) if dim != scatter_dim]
    elif len(shape) == 2 and shape[scatter_dim] % size == 0:
        length = shape[scatter_dim] // size
        block = [length if dim == scatter_dim else each for dim, each in enumerate(shape)]
    else:
        raise InvalidArgumentError(
            f"{_OPERATION}: the input is {shape}; for {size} ranks and scatter_dim {scatter_dim} it needs two dims, "
            f"with dim {scatter_dim} a multiple of {size}, or three with dim {scatter_dim} of {size}"
        )
    parted = [*block[:gather_dim], size, *block[gather_dim:]]
    flat = [size * each if dim == gather_dim else each for dim, each in enumerate(block)]
    check_like(_OPERATION, out, parted if out.dim() == 3 else flat, tensor)
    if not out.is_contiguous():
        raise InvalidArgumentError(f"{_OPERATION}: out must be contiguous; its strides are {list(out.stride())}")
    return length, parted


def _fake(*arguments: Any) -> None:
    _blocks(*arguments)


@op("all_to_all_nd(Tensor input, Tensor(a!) out, int scatter_dim, int gather_dim, str group_name) -> ()", _fake)
def _kernel(tensor: torch.Tensor, out: torch.Tensor, scatter_dim: int, gather_dim: int, group_name: str) -> None:
    length, parted = _blocks(tensor, out, scatter_dim, gather_dim, group_name)
    if tensor.numel() and tensor.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
        raise InvalidArgumentError(f"{_OPERATION}: out lies in the memory of the input, which other ranks read")
    handle = handle_of(_OPERATION, tensor, group_name, contiguous=False)
    handle.barrier()  # the blocks of all ranks are there
    places = out.detach().view(parted).unbind(gather_dim)
    for place, view in zip(places, peer_views(handle, tensor.detach()), strict=True):
        place.copy_(view.narrow(scatter_dim, handle.rank * length, length).reshape(place.shape))
    handle.barrier()  # all ranks have read this rank's
