"""Matrix products fused with the collective before or after them.

On CPU the cores that compute also move the data, and a product that is split into one for each rank packs its operands
again for each. There is therefore one product, and fusing avoids the copies, new pages and waits around it:

all_gather, then matmul. The shards of all ranks are mapped one after another (as by `SymmetricMemory.get_gathered`), so
the product reads them in place, as one matrix. If A is not in symmetric memory, it is copied into staging before.

matmul, then reduce_scatter. Every rank computes its product in memory that the others read, and sums its part of all.

Both are native: all_gather_mms and mm_reduce_scatter in core/torch. Other dims, and gathered tensors that the caller
keeps, use unfused.py; CUDA uses fused_matmul_cuda.py.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch

from phalanx.core import InvalidArgumentError, PhalanxError, load_torch_ops
from phalanx.symm_mem._ops import fused_matmul_cuda
from phalanx.symm_mem._ops._common import check_sum, gather_dim_of, handle_of, op, part_of, size_of
from phalanx.symm_mem._ops.unfused import gathered, scattered
from phalanx.symm_mem._process_group import RankGroup, resolve
from phalanx.symm_mem._state import current

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check_product(operation: str, a: torch.Tensor, b: torch.Tensor, inner: int, dim: int) -> int:
    """Check the operands. Returns the dim, counted from the front."""
    if a.dim() < 2 or b.dim() != 2 or a.dtype != b.dtype or b.shape[0] != inner:
        raise InvalidArgumentError(
            f"{operation}: A has shape {list(a.shape)} of {a.dtype} and B {list(b.shape)} of {b.dtype}; A needs two "
            f"dims or more, and B must be a matrix of the same dtype with {inner} rows"
        )
    if not -a.dim() <= dim < a.dim():
        raise InvalidArgumentError(f"{operation}: dim is {dim}; it must be from {-a.dim()} to {a.dim() - 1}")
    return dim % a.dim()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient: there is no backward, and torch would warn."""
    return tensor.detach() if tensor.requires_grad else tensor


def _fail(members: RankGroup, error: Exception) -> NoReturn:
    """Raise the error of a native op, as an error of the core if it is one."""
    explained = load_torch_ops().explain(error)
    if isinstance(explained, PhalanxError):
        raise members.with_global_ranks(explained) from None
    raise error


@cache
def _all_gather_mms() -> Any:
    return torch.ops.phalanx.all_gather_mms.default


@cache
def _mm_reduce_scatter() -> Any:
    return torch.ops.phalanx.mm_reduce_scatter.default


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b, for a of any number of dims, into a contiguous tensor."""
    if a.dim() == 2:
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    rows = a.reshape(-1, a.shape[-1])
    if out is None:
        return torch.mm(rows, b).view(*a.shape[:-1], b.shape[1])
    torch.mm(rows, b, out=out.view(-1, out.shape[-1]))
    return out


# ---- all_gather, then matmul -----------------------------------------------------------------------------------------


def _gathered_products(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,  # noqa: N803
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    size, shape = size_of(group_name), list(a.shape)
    shape[_check_gather("fused_all_gather_matmul", a, bs, gather_dim, size)] *= size
    return a.new_empty(shape) if return_A else None, [a.new_empty([*shape[:-1], b.shape[1]]) for b in bs]


@op(
    "fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True) "
    "-> (Tensor?, Tensor[])",
    _gathered_products,
)
def fused_all_gather_matmul(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,  # noqa: N803
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    operation, members = "fused_all_gather_matmul", resolve(group_name, "fused_all_gather_matmul")
    size = members.info.world_size
    a, bs = _plain(a), [_plain(b) for b in bs]
    if a.is_cuda:
        dim = _check_gather(operation, a, bs, gather_dim, size)
        return fused_matmul_cuda.all_gather_matmul(operation, a, bs, dim, members, return_A, _product)
    if gather_dim == 0 and not return_A and a.dim() == 2 and a.dtype in _FLOATS:
        return None, _gather_products(operation, a, bs, members)  # which checks the rest
    dim = _check_gather(operation, a, bs, gather_dim, size)
    if dim == 0 and not return_A and a.dtype in _FLOATS:
        products = _gather_products(operation, a.reshape(-1, a.shape[-1]), bs, members)
        return None, [product.view(size * a.shape[0], *a.shape[1:-1], product.shape[1]) for product in products]
    whole = gathered(operation, a, dim, members, return_A)
    return whole if return_A else None, [_product(whole, b) for b in bs]


def _gather_products(
    operation: str, rows: torch.Tensor, bs: Sequence[torch.Tensor], members: RankGroup
) -> list[torch.Tensor]:
    if rows.untyped_storage().data_ptr() in current().allocations and rows.is_contiguous():
        handle_of(operation, rows, members.name)  # makes sure that it had its rendezvous
    try:
        products: list[torch.Tensor] = _all_gather_mms()(rows, bs, members.info.world_size, members.native_name())
        return products
    except (RuntimeError, ValueError) as error:
        _fail(members, error)


def _check_gather(operation: str, a: torch.Tensor, bs: Sequence[torch.Tensor], gather_dim: int, size: int) -> int:
    dim = gather_dim_of(operation, a, gather_dim)
    inner = a.shape[-1] * size if dim == a.dim() - 1 else a.shape[-1]
    for b in bs:
        _check_product(operation, a, b, inner, gather_dim)
    return dim


# ---- matmul, then reduce_scatter -------------------------------------------------------------------------------------


def _scattered_product(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    operation = "fused_matmul_reduce_scatter"
    return a.new_empty(_check_scatter(operation, a, b, reduce_op, scatter_dim, size_of(group_name))[1])


@op(
    "fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor",
    _scattered_product,
)
def fused_matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    operation, members = "fused_matmul_reduce_scatter", resolve(group_name, "fused_matmul_reduce_scatter")
    size = members.info.world_size
    a, b = _plain(a), _plain(b)
    if a.is_cuda:
        dim, _ = _check_scatter(operation, a, b, reduce_op, scatter_dim, size)
        return fused_matmul_cuda.matmul_reduce_scatter(operation, a, b, dim, reduce_op, members, _product)
    if scatter_dim == 0 and a.dim() == 2 and a.dtype in _FLOATS and reduce_op in ("sum", "avg"):
        return _scatter_product(a, b, reduce_op, members)  # which checks the rest
    dim, part = _check_scatter(operation, a, b, reduce_op, scatter_dim, size)
    if dim == 0 and a.dtype in _FLOATS:
        return _scatter_product(a.reshape(-1, a.shape[-1]), b, reduce_op.lower(), members).view(part)
    shape = [*a.shape[:-1], b.shape[1]]
    call = f"{operation}(A {list(a.shape)}, B {list(b.shape)} of {a.dtype}, {reduce_op.lower()}, dim {dim})"

    def product(out: torch.Tensor | None) -> torch.Tensor:
        return _product(a, b, out)

    return scattered(call, product, shape, a.dtype, dim, reduce_op, members, a.device)


def _scatter_product(rows: torch.Tensor, b: torch.Tensor, reduce_op: str, members: RankGroup) -> torch.Tensor:
    try:
        size, name = members.info.world_size, members.native_name()
        part: torch.Tensor = _mm_reduce_scatter()(rows, b, reduce_op, size, name, 0)
        return part
    except (RuntimeError, ValueError) as error:
        _fail(members, error)


def _check_scatter(
    operation: str, a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, size: int
) -> tuple[int, list[int]]:
    """Check the operands. Returns the dim, counted from the front, and the shape of one rank's part."""
    check_sum(operation, reduce_op)
    dim = _check_product(operation, a, b, a.shape[-1] if a.dim() else 0, scatter_dim)
    return dim, part_of(operation, [*a.shape[:-1], b.shape[1]], dim, size, "the product, {},")
