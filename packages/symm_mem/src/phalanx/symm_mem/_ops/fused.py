"""Matrix products fused with the collective before or after them.

On CPU nothing moves data beside the cores that compute, so what fusing can save is copies, fresh pages, and waits; the
product itself is most of the time, and cutting it into one for each rank costs: every product packs its operands anew.
So large ones are cut, where that costs next to nothing, and the others are not:

all_gather, then matmul. Cut: each rank multiplies the shards of the others where they lie, its own first, while the
others are still on their way. Whole: the core gathers, and one product follows.

matmul, then reduce_scatter. Cut: each rank computes what the others need first, in memory that they read, and tells
each of them as soon as its part is there. Whole: one product, and the core sums; of a large one where it is computed.

The choice is made by the shapes, which are alike on all ranks.
"""

from collections.abc import Sequence

import torch

from phalanx.core import InvalidArgumentError
from phalanx.symm_mem._alloc import is_symm_mem_tensor
from phalanx.symm_mem._groups import RankGroup, resolve
from phalanx.symm_mem._ops import fused_cuda
from phalanx.symm_mem._ops.peers import add_views, handle_of, peer_views, size_of
from phalanx.symm_mem._ops.staging import turn
from phalanx.symm_mem._ops.whole import gathered, scattered

# A product that is cut packs B once more for each further part, which costs as much as to copy about four times as many
# elements of A (measured, float32 and bfloat16, 256 to 4096 rows). And few rows at a time are slow for themselves.
_ROWS_FOR_EACH_COLUMN = 4
_ROWS = 256


def _check_product(operation: str, a: torch.Tensor, b: torch.Tensor, inner: int, dim: int) -> int:
    """Check the operands. Returns the dim, counted from the front."""
    if a.dim() < 2 or b.dim() != 2 or a.dtype != b.dtype or b.shape[0] != inner:
        raise InvalidArgumentError(
            f"{operation}: A has shape {list(a.shape)} of {a.dtype} and B {list(b.shape)} of {b.dtype}; A needs two "
            f"dims or more, and B must be a matrix of the same dtype with {inner} rows"
        )
    if not -a.dim() <= dim < a.dim():
        raise InvalidArgumentError(f"{operation}: dim {dim} of a tensor that has {a.dim()}")
    return dim % a.dim()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without its gradient: there is no backward, of which torch warns where one is asked for."""
    return tensor.detach() if tensor.requires_grad else tensor


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b, for a of any number of dims, into a contiguous tensor."""
    if a.dim() == 2:
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    rows = a.reshape(-1, a.shape[-1])
    if out is None:
        return torch.mm(rows, b).view(*a.shape[:-1], b.shape[1])
    torch.mm(rows, b, out=out.view(-1, out.shape[-1]))
    return out


def _worth_cutting(size: int, rows: int, bs: Sequence[torch.Tensor]) -> bool:
    """Whether to compute products of this many rows, one for each rank, instead of one."""
    if size == 1 or rows < _ROWS:
        return False
    return size * rows >= (size - 1) * _ROWS_FOR_EACH_COLUMN * sum(b.shape[1] for b in bs)


# ---- all_gather, then matmul -----------------------------------------------------------------------------------------


def fused_all_gather_matmul(
    a: torch.Tensor, bs: Sequence[torch.Tensor], gather_dim: int, group_name: str, return_a: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    operation, members = "fused_all_gather_matmul", resolve(group_name)
    size = members.info.world_size
    dim = _check_gather(operation, a, bs, gather_dim, size)
    a, bs = _plain(a), [_plain(b) for b in bs]
    if a.is_cuda:
        return fused_cuda.all_gather_matmul(operation, a, bs, dim, members, return_a, _product)
    if dim == 0 and not return_a and _worth_cutting(size, a.shape[:-1].numel(), bs):
        return None, _by_shards(operation, a, bs, members)
    whole = gathered(operation, a, dim, members, return_a)
    return whole if return_a else None, [_product(whole, b) for b in bs]


def _by_shards(operation: str, a: torch.Tensor, bs: Sequence[torch.Tensor], members: RankGroup) -> list[torch.Tensor]:
    size, me, name = members.info.world_size, members.info.rank, members.name
    length = a.shape[0]
    outs = [a.new_empty([size * length, *a.shape[1:-1], b.shape[1]]) for b in bs]
    handle = handle_of(operation, a, name) if a.is_contiguous() and is_symm_mem_tensor(a) else None
    what = f"{operation}(A {list(a.shape)} of {a.dtype}, {[list(b.shape) for b in bs]}"
    what += ")" if handle is None else f", symmetric at {handle.offset})"
    with turn(members, 0 if handle is not None else a.numel() * a.element_size(), what) as staging:
        if handle is not None:
            shards = peer_views(handle, a)
        else:
            shards = [staging.view(rank, a.shape, a.dtype) for rank in range(size)]
            shards[me].copy_(a)
        for step in range(1, size):
            staging.tell((me - step) % size)  # first to whom it comes first
        for step in range(size):
            rank = (me + step) % size
            if rank != me:
                staging.expect(rank)
            for out, b in zip(outs, bs, strict=True):
                _product(shards[rank], b, out.narrow(0, rank * length, length))
        if handle is not None:
            staging.close()  # they have read A, which is the caller's
    return outs


def _check_gather(operation: str, a: torch.Tensor, bs: Sequence[torch.Tensor], gather_dim: int, size: int) -> int:
    if a.dim() < 2 or not -a.dim() <= gather_dim < a.dim():
        raise InvalidArgumentError(f"{operation}: cannot gather along dim {gather_dim} of a tensor of {list(a.shape)}")
    dim = gather_dim % a.dim()
    inner = a.shape[-1] * size if dim == a.dim() - 1 else a.shape[-1]
    for b in bs:
        _check_product(operation, a, b, inner, gather_dim)
    return dim


def _products(
    a: torch.Tensor, bs: Sequence[torch.Tensor], gather_dim: int, group_name: str, return_a: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    size, shape = size_of(group_name), list(a.shape)
    shape[_check_gather("fused_all_gather_matmul", a, bs, gather_dim, size)] *= size
    return a.new_empty(shape) if return_a else None, [a.new_empty([*shape[:-1], b.shape[1]]) for b in bs]


# ---- matmul, then reduce_scatter -------------------------------------------------------------------------------------


def fused_matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    operation, members = "fused_matmul_reduce_scatter", resolve(group_name)
    size = members.info.world_size
    dim, part = _check_scatter(operation, a, b, reduce_op, scatter_dim, size)
    a, b = _plain(a), _plain(b)
    if a.is_cuda:
        return fused_cuda.matmul_reduce_scatter(operation, a, b, dim, reduce_op, members, _product)
    shape = [*a.shape[:-1], b.shape[1]]
    what = f"{operation}(A {list(a.shape)}, B {list(b.shape)} of {a.dtype}, {reduce_op.lower()}, dim {dim})"
    if dim == 0 and _worth_cutting(size, a.shape[:-1].numel() // size, [b]):
        return _by_parts(what, a, b, part, reduce_op, members)

    def product(out: torch.Tensor | None) -> torch.Tensor:
        return _product(a, b, out)

    return scattered(what, product, shape, a.dtype, dim, reduce_op, members)


def _by_parts(
    what: str, a: torch.Tensor, b: torch.Tensor, part: Sequence[int], reduce_op: str, members: RankGroup
) -> torch.Tensor:
    size, me, length = members.info.world_size, members.info.rank, part[0]
    out = a.new_empty(part)
    count = out.numel()
    with turn(members, size * count * out.element_size(), what) as staging:
        for step in range(1, size + 1):  # this rank's own part last: nobody waits for it
            rank = (me + step) % size
            _product(a.narrow(0, rank * length, length), b, staging.view(me, part, out.dtype, rank * count))
            if rank != me:
                staging.tell(rank)
        for step in range(1, size):
            staging.expect((me - step) % size)  # in the order in which they get to this rank's part
        return add_views([staging.view(rank, part, out.dtype, me * count) for rank in range(size)], reduce_op, out)


def _check_scatter(
    operation: str, a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, size: int
) -> tuple[int, list[int]]:
    """Check the operands. Returns the dim, counted from the front, and the shape of one rank's part."""
    if reduce_op.lower() not in ("sum", "avg"):
        raise InvalidArgumentError(f"{operation}: Invalid reduce operation {reduce_op}; use sum or avg")
    dim = _check_product(operation, a, b, a.shape[-1] if a.dim() else 0, scatter_dim)
    shape = [*a.shape[:-1], b.shape[1]]
    if shape[dim] % size:
        raise InvalidArgumentError(
            f"{operation}: dim {dim} of the product, {shape}, must be a multiple of the group size {size}"
        )
    shape[dim] //= size
    return dim, shape


def _scattered_product(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    operation = "fused_matmul_reduce_scatter"
    return a.new_empty(_check_scatter(operation, a, b, reduce_op, scatter_dim, size_of(group_name))[1])


OPS = [
    (
        (
            "fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True) "
            "-> (Tensor?, Tensor[])"
        ),
        lambda a, bs, dim, name, *, return_A=True: fused_all_gather_matmul(a, bs, dim, name, return_A),  # noqa: N803
        lambda a, bs, dim, name, *, return_A=True: _products(a, bs, dim, name, return_A),  # noqa: N803
    ),
    (
        ("fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor"),
        fused_matmul_reduce_scatter,
        _scattered_product,
    ),
]
