"""Matrix products fused with the collective before or after them, on CUDA: copies run during the products.

A large product is cut into one for each rank, and a second stream, with the copy engines, moves the data of one of them
while another is computed:

all_gather, then matmul. After a barrier of the streams every rank fetches the shards of the others, that of the next
rank first, and multiplies its own meanwhile; each further product begins when its shard has arrived.

matmul, then reduce_scatter. Each rank computes the parts of the others first, and sends each part while the next is
computed. After a barrier every rank sums the parts that it received, in the order of ranks.

Other products are computed whole, with a collective of the core. The choice depends on the shapes only, which are the
same on all ranks. Every call ends with a barrier of the streams, so that it may be captured, and replayed with others.
"""

from collections.abc import Callable, Sequence

import torch

from phalanx.symm_mem._allocation import is_symm_mem_tensor
from phalanx.symm_mem._group_buffers import copy_stream, get_symm_mem_workspace
from phalanx.symm_mem._handle import SymmetricMemory
from phalanx.symm_mem._ops._common import handle_of, peer_views, reduce_views
from phalanx.symm_mem._ops.unfused import gathered, scattered
from phalanx.symm_mem._process_group import RankGroup

Product = Callable[..., torch.Tensor]  # (a, b, out=None): a @ b

_ROWS = 256  # least rows of a part of a product that is cut. Not measured on a GPU yet.


def _worth_cutting(size: int, rows: int) -> bool:
    return size > 1 and rows >= _ROWS


# ---- all_gather, then matmul -----------------------------------------------------------------------------------------


def all_gather_matmul(
    operation: str,
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    dim: int,
    members: RankGroup,
    keep: bool,
    product: Product,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The tensors of all ranks along a dim if `keep`, and their products. Collective."""
    if dim == 0 and _worth_cutting(members.info.world_size, a.shape[:-1].numel()):
        whole, products = _by_shards(operation, a, bs, members, product)
    else:
        whole = gathered(operation, a, dim, members, keep)
        products = [product(whole, b) for b in bs]
    return whole if keep else None, products


def _by_shards(
    operation: str, a: torch.Tensor, bs: Sequence[torch.Tensor], members: RankGroup, product: Product
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    size, me, length = members.info.world_size, members.info.rank, a.shape[0]
    handle, shards = _shared(operation, a, members)
    whole = a.new_empty([size * length, *a.shape[1:]])
    outs = [a.new_empty([size * length, *a.shape[1:-1], b.shape[1]]) for b in bs]
    parts = [whole.narrow(0, rank * length, length) for rank in range(size)]
    current, copies = torch.cuda.current_stream(a.device), copy_stream(members, a.device)
    handle.barrier()  # the shards of all ranks are there
    copies.wait_stream(current)
    arrived = {}
    with torch.cuda.stream(copies):
        for step in range(1, size):
            rank = (me + step) % size
            parts[rank].copy_(shards[rank])
            arrived[rank] = copies.record_event()
    parts[me].copy_(a)
    for step in range(size):
        rank = (me + step) % size
        if rank != me:
            current.wait_event(arrived[rank])
        for out, b in zip(outs, bs, strict=True):
            product(parts[rank], b, out.narrow(0, rank * length, length))
    handle.barrier()  # all ranks have read this rank's
    return whole, outs


def _shared(operation: str, a: torch.Tensor, members: RankGroup) -> tuple[SymmetricMemory, list[torch.Tensor]]:
    """The shards of all ranks: in symmetric memory of the caller, else in the workspace of the group."""
    if a.is_contiguous() and is_symm_mem_tensor(a):
        handle = handle_of(operation, a, members.name)
        return handle, peer_views(handle, a)
    handle = get_symm_mem_workspace(members.name, a.numel() * a.element_size(), a.device)
    shards = [handle.get_buffer(rank, a.shape, a.dtype) for rank in range(members.info.world_size)]
    shards[members.info.rank].copy_(a)
    return handle, shards


# ---- matmul, then reduce_scatter -------------------------------------------------------------------------------------


def matmul_reduce_scatter(
    operation: str, a: torch.Tensor, b: torch.Tensor, dim: int, reduce_op: str, members: RankGroup, product: Product
) -> torch.Tensor:
    """This rank's part, along a dim, of the sum of the products of all ranks. Collective."""
    size, shape = members.info.world_size, [*a.shape[:-1], b.shape[1]]
    if dim == 0 and _worth_cutting(size, a.shape[:-1].numel() // size):
        return _by_parts(a, b, [shape[0] // size, *shape[1:]], reduce_op, members, product)
    return scattered(operation, lambda out: product(a, b, out), shape, a.dtype, dim, reduce_op, members, a.device)


def _by_parts(
    a: torch.Tensor, b: torch.Tensor, part: Sequence[int], reduce_op: str, members: RankGroup, product: Product
) -> torch.Tensor:
    size, me, length, out = members.info.world_size, members.info.rank, part[0], a.new_empty(part)
    count = out.numel()
    handle = get_symm_mem_workspace(members.name, size * count * out.element_size(), a.device)
    current, copies = torch.cuda.current_stream(a.device), copy_stream(members, a.device)
    sent = []  # kept until the second stream is done with them
    for step in range(1, size + 1):  # this rank's own part last, as no other rank waits for it
        rank = (me + step) % size
        rows = a.narrow(0, rank * length, length)
        place = handle.get_buffer(rank, part, out.dtype, me * count)
        if rank == me:
            product(rows, b, place)
            continue
        sent.append((product(rows, b), place))
        copies.wait_stream(current)
        with torch.cuda.stream(copies):
            place.copy_(sent[-1][0])
    current.wait_stream(copies)
    handle.barrier()  # the parts of all ranks are there
    parts = [handle.get_buffer(me, part, out.dtype, rank * count) for rank in range(size)]
    if reduce_op.lower() == "sum" and size == 2:  # rounded once in both ways
        torch.add(parts[0], parts[1], out=out)
    else:
        out.copy_(reduce_views(parts, reduce_op))
    handle.barrier()  # the workspace may be used again
    return out
