"""Matrix products fused with the collective before or after them, on CUDA: copies go beside the products.

A large product is cut into one for each rank, and a second stream, with the copy engines, moves what belongs to one of
them while another is computed:

all_gather, then matmul. After a barrier of the streams every rank fetches the shards of the others, that of the next
rank first, and multiplies its own meanwhile; each further product begins when its shard is there.

matmul, then reduce_scatter. Each rank computes what the others need first, and sends each part to the rank that needs
it while the next is computed. After a barrier everybody sums what came, in the order of ranks.

Others are computed whole, beside a collective of the core. The choice is made by the shapes, which are alike on all
ranks. Every call ends with a barrier of the streams, so that it may be captured, and replayed among others.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch

from phalanx.core import PhalanxError
from phalanx.symm_mem._alloc import is_symm_mem_tensor
from phalanx.symm_mem._groups import RankGroup
from phalanx.symm_mem._handle import SymmetricMemory
from phalanx.symm_mem._ops.peers import core_dtype, handle_of, peer_views, reduce_views, reduction_of
from phalanx.symm_mem._ops.whole import gather_into
from phalanx.symm_mem._workspace import get_symm_mem_workspace

Product = Callable[..., torch.Tensor]  # (a, b, out=None): a @ b

_ROWS = 256  # of a part, from which on a product is cut. A guess: no GPU has been asked yet.
_PLACE = "copies"  # in the attributes of a RankGroup, with which it goes: the second streams, by GPU


def _worth_cutting(size: int, rows: int) -> bool:
    return size > 1 and rows >= _ROWS


def _second_stream(members: RankGroup, device: torch.device) -> torch.cuda.Stream:
    streams: dict[int, torch.cuda.Stream] = vars(members).setdefault(_PLACE, {})
    found = streams.get(device.index)
    if found is None:
        found = streams[device.index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return found


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
    """The tensors of all ranks along a dim, if they are to be kept, and their products. Collective."""
    if dim == 0 and _worth_cutting(members.info.world_size, a.shape[:-1].numel()):
        whole, products = _by_shards(operation, a, bs, members, product)
    else:
        whole = gathered(operation, a, dim, members)
        products = [product(whole, b) for b in bs]
    return whole if keep else None, products


def gathered(operation: str, tensor: torch.Tensor, dim: int, members: RankGroup) -> torch.Tensor:
    """The tensors of all ranks along a dim, contiguous. Collective."""
    size, source = members.info.world_size, tensor.contiguous()
    if size == 1:
        return source.clone()
    stacked = source.new_empty([size, *source.shape])
    gather_into(operation, source, stacked, members)
    if dim == 0:
        return stacked.view(size * source.shape[0], *source.shape[1:])
    shape = list(source.shape)
    shape[dim] *= size
    return stacked.movedim(0, dim).reshape(shape)


def _by_shards(
    operation: str, a: torch.Tensor, bs: Sequence[torch.Tensor], members: RankGroup, product: Product
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    size, me, length = members.info.world_size, members.info.rank, a.shape[0]
    handle, shards = _shown(operation, a, members)
    whole = a.new_empty([size * length, *a.shape[1:]])
    outs = [a.new_empty([size * length, *a.shape[1:-1], b.shape[1]]) for b in bs]
    parts = [whole.narrow(0, rank * length, length) for rank in range(size)]
    here, beside = torch.cuda.current_stream(a.device), _second_stream(members, a.device)
    handle.barrier()  # everybody's shard is there
    beside.wait_stream(here)
    came = {}
    with torch.cuda.stream(beside):
        for step in range(1, size):
            rank = (me + step) % size
            parts[rank].copy_(shards[rank])
            came[rank] = beside.record_event()
    parts[me].copy_(a)
    for step in range(size):
        rank = (me + step) % size
        if rank != me:
            here.wait_event(came[rank])
        for out, b in zip(outs, bs, strict=True):
            product(parts[rank], b, out.narrow(0, rank * length, length))
    handle.barrier()  # everybody has read this rank's
    return whole, outs


def _shown(operation: str, a: torch.Tensor, members: RankGroup) -> tuple[SymmetricMemory, list[torch.Tensor]]:
    """The shards of all ranks where they lie: in symmetric memory of the caller's, else in the group's workspace."""
    if a.is_contiguous() and is_symm_mem_tensor(a):
        handle = handle_of(operation, a, members.name)
        return handle, peer_views(handle, a)
    handle = get_symm_mem_workspace(members.name, a.numel() * a.element_size(), a.device)
    shards = [handle.get_buffer(rank, a.shape, a.dtype) for rank in range(members.info.world_size)]
    shards[members.info.rank].copy_(a)
    return handle, shards


# ---- matmul, then reduce_scatter -------------------------------------------------------------------------------------


def matmul_reduce_scatter(
    operation: str,
    a: torch.Tensor,
    b: torch.Tensor,
    dim: int,
    reduce_op: str,
    members: RankGroup,
    product: Product,
) -> torch.Tensor:
    """This rank's part, along a dim, of the sum of the products of all ranks. Collective."""
    size, shape = members.info.world_size, [*a.shape[:-1], b.shape[1]]
    if dim == 0 and _worth_cutting(size, a.shape[:-1].numel() // size):
        return _by_parts(a, b, [shape[0] // size, *shape[1:]], reduce_op, members, product)
    return scattered(
        operation, lambda out: product(a, b, out), shape, a.dtype, dim, reduce_op, members, device=a.device
    )


def _by_parts(
    a: torch.Tensor, b: torch.Tensor, part: Sequence[int], reduce_op: str, members: RankGroup, product: Product
) -> torch.Tensor:
    size, me, length, out = members.info.world_size, members.info.rank, part[0], a.new_empty(part)
    count = out.numel()
    handle = get_symm_mem_workspace(members.name, size * count * out.element_size(), a.device)
    here, beside = torch.cuda.current_stream(a.device), _second_stream(members, a.device)
    sent = []  # kept until the second stream is through with them
    for step in range(1, size + 1):  # this rank's own part last: nobody waits for it
        rank = (me + step) % size
        rows = a.narrow(0, rank * length, length)
        place = handle.get_buffer(rank, part, out.dtype, me * count)
        if rank == me:
            product(rows, b, place)
            continue
        sent.append((product(rows, b), place))
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            place.copy_(sent[-1][0])
    here.wait_stream(beside)
    handle.barrier()  # everybody's parts have come
    came = [handle.get_buffer(me, part, out.dtype, rank * count) for rank in range(size)]
    if reduce_op.lower() == "sum" and size == 2:  # rounded once anyway
        torch.add(came[0], came[1], out=out)
    else:
        out.copy_(reduce_views(came, reduce_op))
    handle.barrier()  # and may be followed by others
    return out


def scattered(
    operation: str,
    product: Callable[[torch.Tensor | None], torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    dim: int,
    reduce_op: str,
    members: RankGroup,
    *,
    device: torch.device,
) -> torch.Tensor:
    """As `whole.scattered`, for memory of a GPU."""
    size, part = members.info.world_size, list(shape)
    part[dim] //= size
    out, op = torch.empty(part, dtype=dtype, device=device), reduction_of(operation, reduce_op)
    if size == 1:
        product(out)
        return out
    handle = get_symm_mem_workspace(members.name, prod(shape) * dtype.itemsize, device)
    mine = handle.get_buffer(handle.rank, shape if dim == 0 else [size, *part], dtype)
    if dim == 0:
        product(mine)
    else:
        parts = product(None)
        mine.copy_(parts.view(*shape[:dim], size, part[dim], *shape[dim + 1 :]).movedim(dim, 0))
    try:
        handle.symm.reduce_scatter(0, out.data_ptr(), out.numel(), core_dtype(out), op, stream=handle.stream())
    except PhalanxError as error:
        members.in_global_ranks(error)
        raise
    return out
