"""Functional collectives that are made of the others, and the names and forms that torch has of each."""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.collectives import _op_table, _recording
from phalanx.collectives._functional import (
    all_gather_tensor,
    all_reduce,
    all_reduce_,
    all_to_all_single,
    broadcast,
    broadcast_,
    reduce_scatter_tensor,
    wait_tensor,
)
from phalanx.collectives._functional_coalesced import all_gather_into_tensor_coalesced, reduce_scatter_tensor_coalesced
from phalanx.collectives._op_table import Collective
from phalanx.collectives._process_group import GroupLike, find, own_rank, traced_name
from phalanx.collectives._registry import ready
from phalanx.collectives._torch_compat import is_dynamo_compiling

# Newer names of torch, and its differentiable forms. All forms of this package are differentiable.
all_gather_single = all_gather_tensor
all_gather_single_autograd = all_gather_tensor
all_gather_tensor_autograd = all_gather_tensor
all_gather_single_coalesced = all_gather_into_tensor_coalesced
reduce_scatter_single = reduce_scatter_tensor
reduce_scatter_single_autograd = reduce_scatter_tensor
reduce_scatter_tensor_autograd = reduce_scatter_tensor
reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
all_to_all_single_autograd = all_to_all_single


def permute_tensor(self: torch.Tensor, src_dst: Sequence[int], group: GroupLike, tag: str = "") -> torch.Tensor:
    """Send the tensor to one rank, and receive the tensor of another. Collective.

    As torch.distributed._functional_collectives.permute_tensor, for tensors of any number of dims. Differentiable.

    Args:
        self: A tensor of any shape, strides and dtype; shape and dtype are the same on all ranks.
        src_dst: A permutation of the group's ranks: rank i sends to rank src_dst[i].
        group, tag: As for `all_reduce`.

    Returns:
        A contiguous tensor of the shape of `self`: an AsyncCollectiveTensor, or in a compiled graph a finished tensor.

    Raises:
        ValueError: src_dst is not a permutation of the ranks; nothing was sent.
        ValueError, PhalanxError: As for `all_reduce`.

    Example:
        >>> permute_tensor(torch.tensor([rank]), [1, 0], group)  # on rank 0
        AsyncCollectiveTensor(tensor([1]))
    """
    rank, size = _place(group, tag, "permute_tensor")
    targets = [i for each in src_dst for i in range(size) if each == i]  # by comparison: constants also in a graph
    if len(src_dst) != size or sorted(targets) != list(range(size)):
        raise ValueError(
            f"permute_tensor: src_dst is {list(src_dst)}; it must be a permutation of the ranks 0 to {size - 1}"
        )
    sent, received = [0] * size, [0] * size
    rows = self if self.dim() else self.reshape(1)
    sent[targets[rank]] = received[targets.index(rank)] = rows.size(0)
    moved = all_to_all_single(rows, received, sent, group, tag)
    return moved if self.dim() else moved.view(())


# ---- into tensors of the caller: torch.compile replaces the calls of torch.distributed by these ----------------------


def all_reduce_inplace(
    tensor: torch.Tensor, op: str = "sum", group: GroupLike = None, async_op: bool = False, tag: str = ""
) -> torch.Tensor:
    """`all_reduce` into its input. Collective.

    Args:
        tensor, op, group, tag: As for `all_reduce`.
        async_op: Must be False.

    Returns:
        `tensor`.

    Raises:
        AssertionError: async_op is True, or there is no default group.
        ValueError, RuntimeError, PhalanxError: As for `all_reduce`.

    Example:
        >>> all_reduce_inplace(torch.ones(2))
        tensor([2., 2.])
    """
    _check_sync("all_reduce_inplace", async_op)
    if _recorder(group, tag, "all_reduce_inplace") is not None:
        return all_reduce_(tensor, op, group, tag)
    return tensor.copy_(all_reduce(tensor, op, group, tag))


def all_gather_tensor_inplace(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: GroupLike = None,
    async_op: bool = False,
    tag: str = "",
    gather_dim: int = 0,
) -> torch.Tensor:
    """`all_gather_tensor` into a tensor. Collective.

    Args:
        output_tensor: A tensor of the shape of the result.
        input_tensor, group, tag, gather_dim: As for `all_gather_tensor`.
        async_op: Must be False.

    Returns:
        `output_tensor`.

    Raises:
        AssertionError: async_op is True, or there is no default group.
        IndexError, ValueError, PhalanxError: As for `all_gather_tensor`.

    Example:
        >>> all_gather_tensor_inplace(torch.empty(2), torch.ones(1))
        tensor([1., 1.])
    """
    _check_sync("all_gather_tensor_inplace", async_op)
    recorder = _recorder(group, tag, "all_gather_tensor_inplace")
    if recorder is not None and gather_dim == 0 and input_tensor.dim():
        shape = [recorder.group.size * input_tensor.size(0), *input_tensor.shape[1:]]
        if _into(_op_table.ALL_GATHER, output_tensor, input_tensor, shape, recorder=recorder):
            return output_tensor
    return _copied(output_tensor, all_gather_tensor(input_tensor, gather_dim, group, tag), group, tag)


def all_gather_inplace(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: GroupLike = None,
    async_op: bool = False,
    tag: str = "",
) -> list[torch.Tensor]:
    """Gather the tensors of all ranks into a list of tensors. Collective.

    Args:
        tensor_list: One tensor of the shape of `tensor` for each rank.
        tensor: A tensor of any shape and dtype, the same on all ranks.
        group, tag: As for `all_reduce`.
        async_op: Must be False.

    Returns:
        `tensor_list`.

    Raises:
        AssertionError: async_op is True, there is no default group, or the sizes differ.
        ValueError, PhalanxError: As for `all_gather_tensor`.

    Example:
        >>> all_gather_inplace([torch.empty(1), torch.empty(1)], torch.tensor([float(rank)]))
        [tensor([0.]), tensor([1.])]
    """
    _check_sync("all_gather_inplace", async_op)
    if any(each.shape != tensor.shape for each in tensor_list):
        raise AssertionError(
            "all_gather_inplace: every tensor of the list must have the shape of the input, "
            f"{list(tensor.shape)}; give all ranks tensors of one shape"
        )
    _, size = _place(group, tag, "all_gather_inplace")
    if len(tensor_list) != size:
        raise AssertionError(
            f"all_gather_inplace: the list has {len(tensor_list)} tensors for {size} ranks; give one for each rank"
        )
    gathered = _viewable(all_gather_tensor(tensor.unsqueeze(0), 0, group, tag), group, tag)
    for i, each in enumerate(tensor_list):
        _copied(each, gathered[i], group, tag)
    return tensor_list


def reduce_scatter_tensor_inplace(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    op: str = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    scatter_dim: int = 0,
    tag: str = "",
) -> torch.Tensor:
    """`reduce_scatter_tensor` into a tensor. Collective.

    Args:
        output: A tensor of the shape of the result.
        input, op, group, scatter_dim, tag: As for `reduce_scatter_tensor`.
        async_op: Must be False.

    Returns:
        `output`.

    Raises:
        AssertionError: async_op is True, or there is no default group.
        IndexError, ValueError, RuntimeError, PhalanxError: As for `reduce_scatter_tensor`.

    Example:
        >>> reduce_scatter_tensor_inplace(torch.empty(1), torch.arange(2.0))  # on rank 1
        tensor([2.])
    """
    _check_sync("reduce_scatter_tensor_inplace", async_op)
    recorder = _recorder(group, tag, "reduce_scatter_tensor_inplace")
    if recorder is not None and scatter_dim == 0 and input.dim() and input.size(0) % recorder.group.size == 0:
        shape = [input.size(0) // recorder.group.size, *input.shape[1:]]
        if _into(_op_table.REDUCE_SCATTER, output, input, shape, op, recorder=recorder):
            return output
    return _copied(output, reduce_scatter_tensor(input, op, scatter_dim, group, tag), group, tag)


def reduce_scatter_inplace(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: str = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    tag: str = "",
) -> torch.Tensor:
    """Reduce lists of tensors, each tensor of a list for another rank. Collective.

    Args:
        output: Of the shape of the tensors of the list.
        input_list: One tensor for each rank of the group, in order, all of one shape.
        op, group, tag: As for `all_reduce`.
        async_op: Must be False.

    Returns:
        `output`.

    Raises:
        AssertionError: async_op is True, there is no default group, or the list does not fit.
        ValueError, RuntimeError, PhalanxError: As for `reduce_scatter_tensor`.

    Example:
        >>> reduce_scatter_inplace(torch.empty(1), [torch.zeros(1), torch.ones(1)])  # on rank 1
        tensor([2.])
    """
    _check_sync("reduce_scatter_inplace", async_op)
    if any(each.shape != output.shape for each in input_list):
        raise AssertionError(
            f"reduce_scatter_inplace: every tensor of the list must have the shape of the output, {list(output.shape)}"
        )
    _, size = _place(group, tag, "reduce_scatter_inplace")
    if len(input_list) != size:
        raise AssertionError(f"reduce_scatter_inplace: {len(input_list)} tensors for {size} ranks; give one for each")
    reduced = _viewable(reduce_scatter_tensor(torch.stack(input_list), op, 0, group, tag), group, tag)
    return _copied(output, reduced.view(output.shape), group, tag)


def all_to_all_inplace(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    tag: str = "",
) -> torch.Tensor:
    """`all_to_all_single` into a tensor. Collective.

    Args:
        output: A tensor of the shape of the result.
        input, output_split_sizes, input_split_sizes, group, tag: As for `all_to_all_single`; group None is the default
            process group.
        async_op: Must be False.

    Returns:
        `output`.

    Raises:
        AssertionError: async_op is True, or there is no default group.
        ValueError, PhalanxError: As for `all_to_all_single`.

    Example:
        >>> all_to_all_inplace(torch.empty(2), torch.full((2,), float(rank)))
        tensor([0., 1.])
    """
    _check_sync("all_to_all_inplace", async_op)
    moved = all_to_all_single(input, output_split_sizes, input_split_sizes, group, tag)
    return _copied(output, moved, group, tag)


def broadcast_inplace(
    tensor: torch.Tensor, src: int, group: GroupLike = None, async_op: bool = False, tag: str = ""
) -> torch.Tensor:
    """`broadcast` into its input. Collective.

    Args:
        tensor, src, group, tag: As for `broadcast`.
        async_op: Must be False.

    Returns:
        `tensor`.

    Raises:
        AssertionError: async_op is True, or there is no default group.
        ValueError, PhalanxError: As for `broadcast`.

    Example:
        >>> broadcast_inplace(torch.tensor([rank]), 1)
        tensor([1])
    """
    _check_sync("broadcast_inplace", async_op)
    if _recorder(group, tag, "broadcast_inplace") is not None:
        return broadcast_(tensor, src, group, tag)
    return tensor.copy_(broadcast(tensor, src, group, tag))


def _recorder(group: GroupLike, tag: str, operation: str) -> Any:
    """The recorder of this thread, if a coalescing manager of the group is open."""
    if is_dynamo_compiling() or not _recording.is_any_open():
        return None
    state = ready.get(group if type(group) is str else id(group)) if not tag else None
    return _recording.recorder_on(state or find(group, tag, operation))


def _viewable(result: torch.Tensor, group: GroupLike, tag: str) -> torch.Tensor:
    """The result, finished if it can be: to take a view of one that is not goes through Python."""
    if is_dynamo_compiling() or _recorder(group, tag, "wait") is not None:
        return result
    return wait_tensor(result)


def _copied(out: torch.Tensor, result: torch.Tensor, group: GroupLike, tag: str) -> torch.Tensor:
    """`out` with the result in it. If a recorder is open, the result is copied into it at the end of the body."""
    recorder = _recorder(group, tag, "copy")  # the collective has found the group before
    if recorder is None:
        return out.copy_(result)
    recorder.copied(out, result)
    return out


def _into(
    collective: Collective, out: torch.Tensor, tensor: torch.Tensor, shape: Any, *args: Any, recorder: Any
) -> bool:
    """Record a call that writes a result of this shape right into `out`, if it can."""
    group = recorder.group
    if list(out.shape) != shape or out.dtype is not tensor.dtype or group.core is None:
        return False
    if torch.is_grad_enabled() and (tensor.requires_grad or out.requires_grad):
        return False
    recorder.write_into(collective, out, tensor, *args, group.size)
    return True


def _place(group: GroupLike, tag: str, operation: str) -> tuple[int, int]:
    """This rank's position in the group, and the group's size."""
    if is_dynamo_compiling():
        return own_rank(traced_name(group, tag, operation))
    state = find(group, tag, operation)
    return state.group_rank, state.size


def _check_sync(operation: str, async_op: bool) -> None:
    if async_op:
        raise AssertionError(
            f"{operation}: async_op is {async_op!r} and must be False; the result is complete when the call returns"
        )
