"""Where the parts of the ranks lie in a tensor: along dim 0 in the core, along any dim for the caller."""

from typing import Any

import torch


def check_dim(operation: str, name: str, dim: int, dims: int) -> int:
    """A dim counted from the front.

    Raises:
        ValueError, IndexError: There is no such dim.
    """
    if dims == 0:
        raise ValueError(no_dims(operation))
    if not -dims <= dim < dims:
        raise IndexError(
            f"{operation}: {name} is {dim}, and the tensor has {dims} dims; {name} must be from {-dims} to {dims - 1}"
        )
    return dim % dims


def no_dims(operation: str) -> str:
    """The text of the error for a tensor without dims that is to be split."""
    return f"{operation}: the tensor has no dims, so it cannot be split; give a tensor of at least one dim"


def not_divisible(operation: str, dim: int, rows: int, size: int, advice: str) -> str:
    """The text of the error for a dim that cannot be split evenly."""
    return f"{operation}: dim {dim} has size {rows}, which is not divisible by the group size {size}; {advice}"


def contiguous_like(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """A new contiguous tensor of the same shape, dtype and device."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def even_part(
    tensor: torch.Tensor,
    size: int,
    dim: int,
    operation: str = "reduce_scatter_tensor",
    advice: str = "pad it, split another dim, or use reduce_scatter_v",
) -> int:
    """The size of each of `size` equal parts of `tensor` along `dim`.

    Raises:
        AssertionError: The dim cannot be split evenly.
    """
    if tensor.size(dim) % size != 0:
        raise AssertionError(not_divisible(operation, dim, tensor.size(dim), size, advice))
    return tensor.size(dim) // size


def parts_first(tensor: torch.Tensor, size: int, dim: int, operation: str = "reduce_scatter_tensor") -> torch.Tensor:
    """The parts of `tensor` along `dim`, one after another along dim 0.

    Raises:
        AssertionError: The dim cannot be split evenly.
    """
    even_part(tensor, size, dim, operation)
    if dim == 0:
        return tensor
    shape = tensor.shape
    split = tensor.reshape([*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :]]).movedim(dim, 0)
    return split.reshape([size * shape[0], *split.shape[2:]])


def joined_at(gathered: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """The parts that lie one after another along dim 0, one after another along `dim`."""
    if dim == 0:
        return gathered
    shape = gathered.shape
    parts = gathered.view([size, shape[0] // size, *shape[1:]]).movedim(0, dim)
    return parts.reshape([*parts.shape[:dim], size * parts.shape[dim + 1], *parts.shape[dim + 2 :]]).contiguous()
