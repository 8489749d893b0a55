"""Matrix products fused with the collective before or after them.

all_gather, then matmul: each rank multiplies the shards of the others where they lie, its own first, while the others
are still on their way to the barrier. matmul, then reduce_scatter: each rank computes what the others need first, in
memory that they read, and tells each of them as soon as its part is there.
"""

import torch

from phalanx.core import InvalidArgumentError
from phalanx.symm_mem._alloc import is_symm_mem_tensor
from phalanx.symm_mem._handle import SymmetricMemory
from phalanx.symm_mem._ops.peers import handle_of, peer_views, reduce_views, size_of
from phalanx.symm_mem._workspace import get_symm_mem_workspace

_PARTS_CHANNEL = 1  # of the workspace


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


# ---- all_gather, then matmul -----------------------------------------------------------------------------------------


def _shards(operation: str, a: torch.Tensor, group_name: str) -> tuple[SymmetricMemory, list[torch.Tensor]]:
    """The tensor of every rank, where all can read it after a barrier."""
    if is_symm_mem_tensor(a):
        handle = handle_of(operation, a, group_name, contiguous=False)
        return handle, peer_views(handle, a)
    handle = get_symm_mem_workspace(group_name, a.numel() * a.element_size())
    views = [handle.get_buffer(rank, a.shape, a.dtype) for rank in range(handle.world_size)]
    views[handle.rank].copy_(a)
    return handle, views


def fused_all_gather_matmul(
    a: torch.Tensor, bs: list[torch.Tensor], gather_dim: int, group_name: str, return_a: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    operation = "fused_all_gather_matmul"
    whole, outs = _products(a, bs, gather_dim, group_name, return_a)
    dim = gather_dim % a.dim()
    handle, shards = _shards(operation, a, group_name)
    for step in range(handle.world_size):
        rank = (handle.rank + step) % handle.world_size
        if step == 1:
            handle.barrier()  # the others' shards are there
        shard = a if step == 0 else shards[rank]
        begin = rank * a.shape[dim]
        if whole is not None:
            whole.narrow(dim, begin, a.shape[dim]).copy_(shard)
        for out, b in zip(outs, bs, strict=True):
            if dim == a.dim() - 1:  # a part of the sum
                part = torch.matmul(shard, b.narrow(0, begin, a.shape[dim]))
                out.copy_(part) if step == 0 else out.add_(part)
                continue
            place = out.narrow(dim, begin, a.shape[dim])
            if dim == 0 and shard.is_contiguous():
                torch.mm(shard.view(-1, shard.shape[-1]), b, out=place.view(-1, place.shape[-1]))
            else:
                place.copy_(torch.matmul(shard, b))
    handle.barrier()  # they have read this rank's
    return whole, outs


def _products(
    a: torch.Tensor, bs: list[torch.Tensor], gather_dim: int, group_name: str, return_a: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    operation, size = "fused_all_gather_matmul", size_of(group_name)
    shape = list(a.shape)
    if a.dim() < 2 or not -a.dim() <= gather_dim < a.dim():
        raise InvalidArgumentError(f"{operation}: cannot gather along dim {gather_dim} of a tensor of {list(a.shape)}")
    shape[gather_dim] *= size
    for b in bs:
        _check_product(operation, a, b, shape[-1], gather_dim)
    whole = a.new_empty(shape) if return_a else None
    return whole, [a.new_empty([*shape[:-1], b.shape[1]]) for b in bs]


# ---- matmul, then reduce_scatter -------------------------------------------------------------------------------------


def fused_matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    out = _scattered_product(a, b, reduce_op, scatter_dim, group_name)
    dim, size = scatter_dim % a.dim(), size_of(group_name)
    handle = get_symm_mem_workspace(group_name, size * out.numel() * out.element_size())
    me, count = handle.rank, out.shape[dim]

    def place(of: int, part: int) -> torch.Tensor:
        """What a rank has computed for another one."""
        return handle.get_buffer(of, out.shape, out.dtype, part * out.numel())

    for step in range(1, size + 1):  # this rank's own part last: nobody waits for it
        rank = (me + step) % size
        target = place(me, rank)
        if dim == a.dim() - 1:
            rows, columns = a, b.narrow(1, rank * count, count)
        else:
            rows, columns = a.narrow(dim, rank * count, count), b
        if rows.is_contiguous():
            torch.mm(rows.reshape(-1, rows.shape[-1]), columns, out=target.view(-1, target.shape[-1]))
        else:
            target.copy_(torch.matmul(rows, columns))
        if rank != me:
            handle.put_signal(rank, _PARTS_CHANNEL)
    for rank in range(size):
        if rank != me:
            handle.wait_signal(rank, _PARTS_CHANNEL)
    out.copy_(reduce_views([place(rank, me) for rank in range(size)], reduce_op))
    handle.barrier()  # they have read this rank's parts
    return out


def _scattered_product(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    operation, size = "fused_matmul_reduce_scatter", size_of(group_name)
    if reduce_op.lower() not in ("sum", "avg"):
        raise InvalidArgumentError(f"{operation}: Invalid reduce operation {reduce_op}; use sum or avg")
    dim = _check_product(operation, a, b, a.shape[-1] if a.dim() else 0, scatter_dim)
    shape = [*a.shape[:-1], b.shape[1]]
    if shape[dim] % size:
        raise InvalidArgumentError(
            f"{operation}: dim {dim} of the product, {shape}, must be a multiple of the group size {size}"
        )
    shape[dim] //= size
    return a.new_empty(shape)


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
