"""The functional collectives of several tensors: one call of the core for all of them."""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.collectives import _autograd, _op_table, _recording
from phalanx.collectives._async_tensor import wrap
from phalanx.collectives._errors import fail
from phalanx.collectives._group_state import GroupState
from phalanx.collectives._layout import check_dim, parts_first
from phalanx.collectives._library import wait
from phalanx.collectives._op_table import Collective
from phalanx.collectives._process_group import GroupLike, ensure_initialized, find, traced_name, traced_size
from phalanx.collectives._torch_compat import is_dynamo_compiling, is_tracing
from phalanx.collectives.reductions import check_reduction


def all_reduce_coalesced(
    self: Sequence[torch.Tensor],
    reduceOp: str,  # noqa: N803
    group: GroupLike,
    tag: str = "",
) -> list[torch.Tensor]:
    """Reduce several tensors over all ranks. Collective.

    As torch.distributed._functional_collectives.all_reduce_coalesced. Differentiable for sum and avg.

    Args:
        self: Tensors of any shapes and dtypes, the same on all ranks, in the same order; they are left as they are.
        reduceOp, group, tag: As for `all_reduce`.

    Returns:
        A result for each tensor, as that of `all_reduce`. They complete together.

    Raises:
        ValueError, RuntimeError, PhalanxError: As for `all_reduce`.

    Example:
        >>> all_reduce_coalesced([torch.ones(2), torch.tensor(rank)], "sum", group)
        [AsyncCollectiveTensor(tensor([2., 2.])), AsyncCollectiveTensor(1)]
    """
    return _call(_op_table.ALL_REDUCE, _listed("all_reduce_coalesced", self), group, tag, reduceOp)


def all_gather_into_tensor_coalesced(
    self: Sequence[torch.Tensor], group: GroupLike, tag: str = ""
) -> list[torch.Tensor]:
    """Join, for each of several tensors, those of all ranks along dim 0. Collective.

    As torch.distributed._functional_collectives.all_gather_into_tensor_coalesced. Differentiable.

    Args:
        self: Tensors of any shapes and dtypes, the same on all ranks, in the same order.
        group, tag: As for `all_reduce`.

    Returns:
        A result for each tensor, as that of `all_gather_tensor` for dim 0. They complete together.

    Raises:
        ValueError, PhalanxError: As for `all_reduce`.

    Example:
        >>> all_gather_into_tensor_coalesced([torch.tensor([rank]), torch.ones(1)], group)
        [AsyncCollectiveTensor(tensor([0, 1])), AsyncCollectiveTensor(tensor([1., 1.]))]
    """
    return _call(_op_table.ALL_GATHER, _listed("all_gather_into_tensor_coalesced", self), group, tag)


def reduce_scatter_tensor_coalesced(
    inputs: Sequence[torch.Tensor],
    reduceOp: str,  # noqa: N803
    scatter_dim: Sequence[int],
    group: GroupLike,
    tag: str = "",
) -> list[torch.Tensor]:
    """Reduce several tensors over all ranks; each rank gets its own part of each. Collective.

    As torch.distributed._functional_collectives.reduce_scatter_tensor_coalesced. Differentiable for sum and avg.

    Args:
        inputs: Tensors of any shapes and dtypes, the same on all ranks, in the same order. The list is left as it is.
        reduceOp, group, tag: As for `all_reduce`.
        scatter_dim: The dim along which to split each tensor, as a list; negative ones count from the end.

    Returns:
        A result for each tensor, as that of `reduce_scatter_tensor`. They complete together.

    Raises:
        AssertionError: A size is not divisible by the group size, or there are not as many dims as tensors; nothing
            was sent.
        IndexError, ValueError, RuntimeError, PhalanxError: As for `reduce_scatter_tensor`.

    Example:
        >>> reduce_scatter_tensor_coalesced([torch.arange(2), torch.ones(2, 2)], "sum", [0, 1], group)  # on rank 1
        [AsyncCollectiveTensor(tensor([2])), AsyncCollectiveTensor(tensor([[2.],
                [2.]]))]
    """
    operation = "reduce_scatter_tensor_coalesced"
    tensors = _listed(operation, inputs)
    if not tensors:
        return []
    if len(scatter_dim) != len(tensors):
        raise AssertionError(
            f"{operation}: scatter_dim has {len(scatter_dim)} entries for {len(tensors)} tensors; give one for each"
        )
    dims = [
        check_dim(operation, "scatter_dim", dim, tensor.dim()) for tensor, dim in zip(tensors, scatter_dim, strict=True)
    ]
    return _call(_op_table.REDUCE_SCATTER, tensors, group, tag, reduceOp, dims=dims)


# ---- parts of them ---------------------------------------------------------------------------------------------------


def _listed(operation: str, tensors: Any) -> list[torch.Tensor]:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{operation}: expected a list of tensors, not {type(tensors).__name__}")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{operation}: expected a list of tensors, but entry {i} is {type(tensor).__name__}")
    return list(tensors)


def _call(
    collective: Collective,
    tensors: list[torch.Tensor],
    group: GroupLike,
    tag: str,
    *reduce_op: str,
    dims: Sequence[int] = (),
) -> list[torch.Tensor]:
    """Call a collective of several tensors, which are split along these dims if there are any."""
    if not tensors:
        return []
    name = f"{collective.name}_coalesced"
    if is_dynamo_compiling():
        group_name = traced_name(group, tag, name)
        args: list[Any] = [each.lower() for each in reduce_op]
        if collective.takes_size:
            args.append(traced_size(group_name))
        if dims:
            tensors = _parts(name, tensors, args[-1], dims)
        return [wait(tensor) for tensor in getattr(torch.ops.phalanx, name)(tensors, *args, group_name)]
    try:
        for each in reduce_op:
            check_reduction(name, each)
        state = find(group, tag, name)
        if dims:
            tensors = _parts(name, tensors, state.size, dims)
        return _started(collective, state, tensors, *reduce_op)
    except (RuntimeError, ValueError) as error:
        fail(error)


def _parts(operation: str, tensors: list[torch.Tensor], size: int, dims: Sequence[int]) -> list[torch.Tensor]:
    return [parts_first(tensor, size, dim, operation) for tensor, dim in zip(tensors, dims, strict=True)]


def _started(collective: Collective, group: GroupState, tensors: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
    """Start a collective of several tensors and wrap its results. In a coalescing manager, record one for each."""
    name = f"{collective.name}_coalesced"
    ensure_initialized(group, tensors[0])
    if collective.takes_size:
        args = (*args, group.size)

    def run(given: list[torch.Tensor], *inner: Any) -> list[torch.Tensor]:
        recorder = _recording.recorder_on(group)
        if recorder is not None and not is_tracing():
            return [recorder.record(collective, tensor, *inner[:-1]) for tensor in given]
        started = getattr(torch.ops.phalanx, name)(given, *inner)
        if is_tracing():
            return [wait(tensor) for tensor in started]
        return [wrap(tensor) if type(tensor) is torch.Tensor else tensor for tensor in started]

    args = (*args, group.op_name)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and not is_tracing():
        return list(_autograd.FUNCTIONS[name].apply(run, args, *tensors))
    return run(tensors, *args)
