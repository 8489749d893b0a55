"""Common parts of the ops: declarations, checks of arguments, counterparts of a tensor on other ranks, reductions."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from phalanx.collectives.reductions import REDUCTIONS, accumulation_dtype, combine, unknown_reduction
from phalanx.core import InvalidArgumentError, ReduceOp
from phalanx.symm_mem._handle import SymmetricMemory
from phalanx.symm_mem._process_group import resolve
from phalanx.symm_mem._rendezvous import rendezvous

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


class Op(NamedTuple):
    """An op of torch.ops.phalanx. `fake` gives its results for tensors without data."""

    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]


OPS: list[Op] = []  # of all modules of this folder


def op(schema: str, fake: Callable[..., Any] | None = None) -> Callable[[Kernel], Kernel]:
    """Declares the kernel of an op. `fake` is needed if the result is a new tensor, not nothing or an argument."""

    def declare(kernel: Kernel) -> Kernel:
        OPS.append(Op(schema, kernel, fake or _fake_of(schema)))
        return kernel

    return declare


def arguments_of(schema: str) -> list[str]:
    """The arguments of a schema, each with its type and its name, and perhaps a default."""
    listed = schema[schema.index("(") + 1 : schema.rindex(") ->")].split(", ")
    return [argument for argument in listed if argument != "*"]


def _fake_of(schema: str) -> Callable[..., Any]:
    result = schema.rpartition("-> ")[2]
    if result == "()":
        return lambda *arguments, **named: None
    place = [argument.partition(" ")[0] for argument in arguments_of(schema)].index(result)
    return lambda *arguments: arguments[place]


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


def size_of(group_name: str) -> int:
    """The number of ranks of a group. Not collective."""
    return resolve(group_name, "an op of symm_mem").info.world_size


def part_of(operation: str, shape: Sequence[int], dim: int, size: int, text: str = "{}") -> list[int]:
    """The shape of one rank's part along a dim, which must be a multiple of the group size."""
    part = list(shape)
    if not part or part[dim] % size:
        raise InvalidArgumentError(
            f"{operation}: dim {dim} of {text.format(part)} must be a multiple of the group size {size}"
        )
    part[dim] //= size
    return part


def gather_dim_of(operation: str, a: torch.Tensor, gather_dim: int) -> int:
    """The dim, counted from the front, along which the matrix A of a product is gathered."""
    if a.dim() < 2 or not -a.dim() <= gather_dim < a.dim():
        raise InvalidArgumentError(
            f"{operation}: A has shape {list(a.shape)} and gather_dim is {gather_dim}; A needs two dims or more, and "
            "gather_dim must be one of them"
        )
    return gather_dim % a.dim()


def check_sum(operation: str, reduce_op: str) -> None:
    """Raise an error unless products can be reduced so."""
    if reduce_op.lower() not in ("sum", "avg"):
        raise InvalidArgumentError(f"{operation}: unknown reduce op {reduce_op!r}; expected sum or avg")


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
