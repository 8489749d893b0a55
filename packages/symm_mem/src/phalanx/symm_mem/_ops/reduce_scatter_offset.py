"""reduce_scatter of blocks of any sizes, each to a chosen rank."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from phalanx.collectives import GroupLike
from phalanx.core import InvalidArgumentError
from phalanx.symm_mem._ops._common import check_like, handle_of, op, peer_views, reduce_views, reduction_of
from phalanx.symm_mem._process_group import resolve

_OPERATION = "reduce_scatter_offset"
_SLAB_COUNT = 1 << 17  # elements of each rank per step: the sums stay in the cache


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
    """Cut a symmetric matrix into blocks of rows or columns, and reduce each block to a chosen rank. Collective.

    As `torch.distributed._symmetric_memory.reduce_scatter_offset`, which is for NCCL and sums only. Here a rank may get
    any number of blocks, also none, of any sizes and strides. The op `torch.ops.phalanx.reduce_scatter_offset` does the
    same for the name of a group.

    Args:
        input: A symmetric tensor of two dims, with the same shape and strides on all ranks. It is not changed.
        out: A tensor for each block of this rank, in the order of the blocks, with the shape of the block and the dtype
            of the input. It may be in symmetric memory, also in that of the input.
        group: As in `rendezvous`.
        dim: 0 for blocks of rows, 1 for blocks of columns.
        offsets: The end of each block along `dim`; the first begins at 0, each other one at the end of the one before.
            None cuts the dim into as many equal blocks as there are ranks.
        dst_ranks: For each block the position in the group of the rank that gets it; None is round-robin.
        red_op: sum, avg, product, min, max, band, bor or bxor; floats of 16 and 8 bits are added in float32.

    Raises:
        InvalidArgumentError: An argument is wrong on this rank. Nothing was sent.
        PhalanxError: As `rendezvous`.

    Example:
        >>> matrix, row = empty(2, 3).fill_(rank + 1), torch.empty(1, 3)
        >>> reduce_scatter_offset(matrix, [row], group, dim=0)
        >>> row
        tensor([[3., 3., 3.]])
    """
    name = resolve(group, _OPERATION).name
    torch.ops.phalanx.reduce_scatter_offset(input, list(out), name, dim, offsets, dst_ranks, red_op)


def _owned(
    tensor: torch.Tensor,
    out: Sequence[torch.Tensor],
    group_name: str,
    dim: int,
    offsets: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    red_op: str = "sum",
) -> list[tuple[int, int]]:
    """Check the arguments. Returns where each block of this rank begins along the dim, and how long it is."""
    reduction_of(_OPERATION, red_op)
    if tensor.dim() != 2 or dim not in (0, 1):
        raise InvalidArgumentError(
            f"{_OPERATION}: the input is {list(tensor.shape)} and dim is {dim}; it needs two dims, and dim 0 or 1"
        )
    info, length = resolve(group_name, _OPERATION).info, tensor.shape[dim]
    if offsets is None:
        if length % info.world_size:
            raise InvalidArgumentError(
                f"{_OPERATION}: dim {dim} of {list(tensor.shape)} must be a multiple of the group size "
                f"{info.world_size} where no offsets are given"
            )
        ends = [(block + 1) * (length // info.world_size) for block in range(info.world_size)]
    else:
        ends = list(offsets)
    bounds = [0, *ends]
    if not ends or any(end < begin for begin, end in pairwise(bounds)) or ends[-1] > length:
        raise InvalidArgumentError(
            f"{_OPERATION}: offsets is {ends}; give the end of each block along dim {dim}, in order, at most {length}"
        )
    targets = [block % info.world_size for block in range(len(ends))] if dst_ranks is None else list(dst_ranks)
    if len(targets) != len(ends) or any(not 0 <= rank < info.world_size for rank in targets):
        raise InvalidArgumentError(
            f"{_OPERATION}: dst_ranks is {targets} for {len(ends)} blocks; give a rank from 0 to "
            f"{info.world_size - 1} for each block"
        )
    blocks = [
        (begin, end - begin) for (begin, end), rank in zip(pairwise(bounds), targets, strict=True) if rank == info.rank
    ]
    if len(out) != len(blocks):
        raise InvalidArgumentError(
            f"{_OPERATION}: out has {len(out)} tensors, and rank {info.rank} of group {group_name!r} receives "
            f"{len(blocks)} blocks; give one tensor for each"
        )
    for target, (_, count) in zip(out, blocks, strict=True):
        check_like(_OPERATION, target, [*tensor.shape[:dim], count, *tensor.shape[dim + 1 :]], tensor)
    return blocks


def _fake(*arguments: object, **named: object) -> None:
    _owned(*arguments, **named)  # type: ignore[arg-type]


@op(
    "reduce_scatter_offset(Tensor input, Tensor(a!)[] out, str group_name, int dim, int[]? offsets=None, "
    'int[]? dst_ranks=None, str red_op="sum") -> ()',
    _fake,
)
def _kernel(
    tensor: torch.Tensor,
    out: Sequence[torch.Tensor],
    group_name: str,
    dim: int,
    offsets: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    red_op: str = "sum",
) -> None:
    blocks = _owned(tensor, out, group_name, dim, offsets, dst_ranks, red_op)
    handle = handle_of(_OPERATION, tensor, group_name, contiguous=False)
    handle.barrier()  # the blocks of all ranks are there
    views = peer_views(handle, tensor)
    results = [_reduced([view.narrow(dim, *block) for view in views], red_op) for block in blocks]
    handle.barrier()  # all ranks have read this rank's
    # Not before the barrier: an output may lie in the memory that the others read.
    for target, result in zip(out, results, strict=True):
        target.copy_(result)


def _reduced(views: Sequence[torch.Tensor], red_op: str) -> torch.Tensor:
    """`reduce_views` in slabs of rows, so that its temporary tensors are small."""
    result = views[0].new_empty(views[0].shape)
    rows = max(1, _SLAB_COUNT // max(1, result.shape[1]))
    for begin in range(0, result.shape[0], rows):
        slab = slice(begin, begin + rows)
        result[slab] = reduce_views([view[slab] for view in views], red_op)
    return result
