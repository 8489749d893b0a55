"""Where the parts of the ranks lie in a tensor: along dim 0 in the core, along any dim for the caller."""

import torch


def check_dim(operation: str, name: str, dim: int, dims: int) -> int:
    """A dim counted from the front.

    Raises:
        ValueError, IndexError: There is no such dim.
    """
    if dims == 0:
        raise ValueError(f"{operation}: the tensor has no dims, so there is none to split; give it at least one")
    if not -dims <= dim < dims:
        raise IndexError(f"{operation}: {name} is {dim}; a tensor with {dims} dims has {-dims} to {dims - 1}")
    return dim % dims


def _check_multiple(tensor: torch.Tensor, dim: int, size: int) -> None:
    if tensor.size(dim) % size != 0:
        raise AssertionError(
            f"input dimension {dim} has size {tensor.size(dim)}, which must be a multiple of group_size {size}"
        )


def parts_first(tensor: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """The parts of `tensor` along `dim`, one after another along dim 0."""
    _check_multiple(tensor, dim, size)
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
