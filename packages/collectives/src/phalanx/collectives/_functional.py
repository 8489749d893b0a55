"""The functional collectives. In eager mode they return before the peers have come; see AsyncCollectiveTensor."""

from typing import Any

import torch
from torch import SymInt

from phalanx.collectives import _async_tensor, _autograd, _op_table, _recording
from phalanx.collectives._async_tensor import AsyncCollectiveTensor
from phalanx.collectives._errors import fail
from phalanx.collectives._layout import check_dim, even_part, joined_at, parts_first
from phalanx.collectives._library import wait
from phalanx.collectives._operation import InPlaceOperation, Operation
from phalanx.collectives._process_group import GroupLike, find, own_rank, traced_name, traced_size
from phalanx.collectives._registry import ready
from phalanx.collectives._torch_compat import is_dynamo_compiling, is_plain
from phalanx.collectives.reductions import check_reduction

ALL_REDUCE = Operation(_op_table.ALL_REDUCE)
ALL_GATHER = Operation(_op_table.ALL_GATHER)
REDUCE_SCATTER = Operation(_op_table.REDUCE_SCATTER)
ALL_GATHER_V = Operation(_op_table.ALL_GATHER_V)
REDUCE_SCATTER_V = Operation(_op_table.REDUCE_SCATTER_V)
ALL_TO_ALL = Operation(_op_table.ALL_TO_ALL)
SHARD_DIM_ALLTOALL = Operation(_op_table.SHARD_DIM_ALLTOALL)
BROADCAST = Operation(_op_table.BROADCAST)
_ALL_REDUCE_ = InPlaceOperation(_op_table.ALL_REDUCE)
_BROADCAST_ = InPlaceOperation(_op_table.BROADCAST)

_WAIT: Any = _autograd.Wait.apply

_ready = ready.get  # bound here once and not in every call


# ---- collectives -----------------------------------------------------------------------------------------------------


def all_reduce(self: torch.Tensor, reduceOp: str, group: GroupLike, tag: str = "") -> torch.Tensor:  # noqa: N803
    """Reduce a tensor over all ranks; every rank gets the result, to the bit. Collective.

    As torch.distributed._functional_collectives.all_reduce. Differentiable for sum and avg.

    Args:
        self: A tensor of any shape and strides; it is not changed, and may be changed as soon as the call returns (if
            the core serves the group). The dtype is bool, an integer or a float; complex for sum and avg only.
        reduceOp: sum, avg, product, min, max, band, bor or bxor, in upper or lower case. 16-bit floats are added
            in float32 and rounded once; avg of integers rounds towards zero.
        group: A ProcessGroup, a one-dimensional DeviceMesh, (DeviceMesh, dim by its number or name), a list of global
            ranks, a list of lists of them (each rank takes part in the one that holds it), the name of a process group,
            a phalanx.core.Group, or None for the default process group. The first collective of a rank on a group waits
            until all ranks of the group have called theirs.
        tag: With a list, tells groups of the same ranks apart; one that does not exist is made.

    Returns:
        A contiguous tensor of the shape of `self`: an AsyncCollectiveTensor, or in a compiled graph a finished tensor.

    Raises:
        ValueError: The reduction is unknown, or the group is not one of this rank's; nothing was sent.
        RuntimeError: A gradient is needed that the reduction does not have; nothing was sent.
        PhalanxError: From this call or from the first use of the result: a peer died (PeerDeadError) or did not call it
            in time (WaitTimeoutError), or the ranks made different calls (MismatchError). The group is unusable then.

    Example:
        >>> all_reduce(torch.full((2,), rank + 1.0), "sum", group)
        AsyncCollectiveTensor(tensor([3., 3.]))
    """
    if is_dynamo_compiling():
        return wait(torch.ops.phalanx.all_reduce(self, reduceOp.lower(), traced_name(group, tag, "all_reduce")))
    state = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        if state is not None and state.fast_path:
            started = ALL_REDUCE.fast(self, reduceOp, state.op_name)
            if started is not None:
                return started
        return ALL_REDUCE.start(state or find(group, tag, "all_reduce"), self, reduceOp)
    except (RuntimeError, ValueError) as error:
        fail(error)


def all_gather_tensor(self: torch.Tensor, gather_dim: int, group: GroupLike, tag: str = "") -> torch.Tensor:
    """Join the tensors of all ranks along a dim; every rank gets the result. Collective.

    As torch.distributed._functional_collectives.all_gather_tensor. Differentiable.

    Args:
        self: A tensor of any shape, strides and dtype; shape and dtype are the same on all ranks. A tensor without dims
            counts as one of shape (1,).
        gather_dim: The dim along which to join; negative ones count from the end.
        group, tag: As for `all_reduce`.

    Returns:
        A contiguous tensor of the shape of `self`, with `gather_dim` group-size times as long: an AsyncCollectiveTensor
        if gather_dim is 0 or in a coalescing manager, and a finished tensor otherwise.

    Raises:
        IndexError: There is no such dim; nothing was sent.
        ValueError, PhalanxError: As for `all_reduce`.

    Example:
        >>> all_gather_tensor(torch.tensor([rank, rank]), 0, group)
        AsyncCollectiveTensor(tensor([0, 0, 1, 1]))
    """
    dim = 0 if gather_dim == 0 else check_dim("all_gather_tensor", "gather_dim", gather_dim, max(self.dim(), 1))
    if is_dynamo_compiling():
        name = traced_name(group, tag, "all_gather_tensor")
        size = traced_size(name)
        traced = wait(torch.ops.phalanx.all_gather_into_tensor(self, size, name))
        return joined_at(traced, size, dim)
    state = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        if dim != 0:
            state = state or find(group, tag, "all_gather_tensor")
            whole = ALL_GATHER_V.begin_by_rows(state, self, [self.size(dim)] * state.size, dim)
            if whole is not None:
                return wait_tensor(whole)
        gathered: torch.Tensor | None = None
        if state is not None and state.fast_path:
            gathered = ALL_GATHER.fast(self, state.size, state.op_name)
        if gathered is None:
            state = state or find(group, tag, "all_gather_tensor")
            gathered = ALL_GATHER.start(state, self)
        if dim == 0 or state is None:
            return gathered
        recorder = _recording.recorder_on(state)
        if recorder is not None:
            recorded: torch.Tensor = recorder.joined(gathered, dim)
            return recorded
        if type(gathered) is AsyncCollectiveTensor:  # operations on it take ten times as long as on an ordinary tensor
            gathered = wait_tensor(gathered)
        return joined_at(gathered, state.size, dim)
    except (RuntimeError, ValueError) as error:
        fail(error)


def reduce_scatter_tensor(
    self: torch.Tensor,
    reduceOp: str,  # noqa: N803
    scatter_dim: int,
    group: GroupLike,
    tag: str = "",
) -> torch.Tensor:
    """Reduce a tensor over all ranks; each rank gets its own part of the result. Collective.

    As torch.distributed._functional_collectives.reduce_scatter_tensor. Differentiable for sum and avg.

    Args:
        self: A tensor of any shape, strides and dtype; shape and dtype are the same on all ranks.
        reduceOp: As for `all_reduce`.
        scatter_dim: The dim along which to split; negative ones count from the end. Its size must be divisible by the
            group size.
        group, tag: As for `all_reduce`.

    Returns:
        The part of this rank: a contiguous tensor of the shape of `self`, with `scatter_dim` divided by the group size.
        An AsyncCollectiveTensor, or in a compiled graph the finished tensor.

    Raises:
        AssertionError: The size is not divisible by the group size; nothing was sent.
        IndexError: There is no such dim; nothing was sent.
        ValueError, RuntimeError, PhalanxError: As for `all_reduce`.

    Example:
        >>> reduce_scatter_tensor(torch.arange(4), "sum", 0, group)  # on rank 1
        AsyncCollectiveTensor(tensor([4, 6]))
    """
    dim = check_dim("reduce_scatter_tensor", "scatter_dim", scatter_dim, self.dim())
    if is_dynamo_compiling():
        name = traced_name(group, tag, "reduce_scatter_tensor")
        size = traced_size(name)
        parts = parts_first(self, size, dim)
        return wait(torch.ops.phalanx.reduce_scatter_tensor(parts, reduceOp.lower(), size, name))
    state = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        state = state or find(group, tag, "reduce_scatter_tensor")
        if dim != 0:
            check_reduction("reduce_scatter_tensor", reduceOp)
            own = even_part(self, state.size, dim)
            part = REDUCE_SCATTER_V.begin_by_rows(state, self, reduceOp, [own] * state.size, own, dim)
            if part is not None:
                return part
        parts = parts_first(self, state.size, dim)
        if state.fast_path:
            started = REDUCE_SCATTER.fast(parts, reduceOp, state.size, state.op_name)
            if started is not None:
                return started
        return REDUCE_SCATTER.start(state, parts, reduceOp)
    except (RuntimeError, ValueError) as error:
        fail(error)


def all_gather_v(
    self: torch.Tensor, sizes: list[int], gather_dim: int, group: GroupLike, tag: str = ""
) -> torch.Tensor:
    """Join tensors of different sizes along a dim; every rank gets the result. Collective.

    all_gather_tensor for uneven parts, without padding. torch.distributed has no such function; MPI calls it
    Allgatherv. Differentiable.

    Args:
        self: A tensor of at least one dim and of any strides and dtype; all dims but `gather_dim` have the same size on
            all ranks.
        sizes: The size of `gather_dim` on each rank, by group rank; the same list on all ranks.
        gather_dim: The dim along which to join; negative ones count from the end.
        group, tag: As for `all_reduce`.

    Returns:
        A contiguous tensor of the shape of `self`, with sum(sizes) at `gather_dim`: an AsyncCollectiveTensor, or in a
        compiled graph a finished tensor.

    Raises:
        IndexError: There is no such dim; nothing was sent.
        ValueError: The sizes do not fit the tensor or the group; nothing was sent.
        MismatchError: Ranks gave other sizes.
        PhalanxError: As for `all_reduce`.

    Example:
        >>> rows = [2, 1]  # 2 on rank 0, 1 on rank 1
        >>> all_gather_v(torch.ones(rows[rank], 4), rows, 0, dist.group.WORLD).shape
        torch.Size([3, 4])
    """
    dim = check_dim("all_gather_v", "gather_dim", gather_dim, self.dim())
    counts = _split_sizes("all_gather_v", "sizes", sizes)
    if is_dynamo_compiling():
        return wait(torch.ops.phalanx.all_gather_v(self, counts, dim, traced_name(group, tag, "all_gather_v")))
    state = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        return ALL_GATHER_V.begin(state or find(group, tag, "all_gather_v"), self, counts, dim)
    except (RuntimeError, ValueError) as error:
        fail(error)


def reduce_scatter_v(
    self: torch.Tensor,
    reduceOp: str,  # noqa: N803
    sizes: list[int],
    scatter_dim: int,
    group: GroupLike,
    tag: str = "",
) -> torch.Tensor:
    """Reduce a tensor over all ranks; each rank gets a part of its own size. Collective.

    reduce_scatter_tensor for uneven parts, without padding. Differentiable for sum and avg.

    Args:
        self: A tensor of at least one dim and of any strides; shape and dtype are the same on all ranks.
        reduceOp: As for `all_reduce`.
        sizes: The size of each rank's part of `scatter_dim`, by group rank; the same list on all ranks.
        scatter_dim: The dim along which to split; negative ones count from the end.
        group, tag: As for `all_reduce`.

    Returns:
        The part of this rank: a contiguous tensor of the shape of `self`, with its size at `scatter_dim`. An
        AsyncCollectiveTensor, or in a compiled graph a finished tensor.

    Raises:
        IndexError: There is no such dim; nothing was sent.
        ValueError: The sizes do not fit the tensor or the group; nothing was sent.
        RuntimeError, PhalanxError: As for `all_reduce`.

    Example:
        >>> reduce_scatter_v(torch.ones(3, 4), "sum", [2, 1], 0, dist.group.WORLD).shape  # on rank 1
        torch.Size([1, 4])
    """
    dim = check_dim("reduce_scatter_v", "scatter_dim", scatter_dim, self.dim())
    counts = _split_sizes("reduce_scatter_v", "sizes", sizes)
    if is_dynamo_compiling():
        name = traced_name(group, tag, "reduce_scatter_v")
        own = counts[own_rank(name)[0]]
        return wait(torch.ops.phalanx.reduce_scatter_v(self, reduceOp.lower(), counts, own, dim, name))
    state = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        state = state or find(group, tag, "reduce_scatter_v")
        own = counts[state.group_rank] if state.group_rank < len(counts) else 0
        return REDUCE_SCATTER_V.begin(state, self, reduceOp, counts, own, dim)
    except (RuntimeError, ValueError) as error:
        fail(error)


def broadcast(self: torch.Tensor, src: int, group: GroupLike, tag: str = "") -> torch.Tensor:
    """Give every rank the tensor of one. Collective.

    As torch.distributed._functional_collectives.broadcast. Differentiable: the source gets the sum of all gradients,
    the others get zeros.

    Args:
        self: A tensor of any shape, strides and dtype; shape and dtype are the same on all ranks. Only the values of
            the source are used.
        src: The source, as a rank within the group.
        group, tag: As for `all_reduce`.

    Returns:
        A contiguous tensor of the shape of `self`: an AsyncCollectiveTensor, or in a compiled graph a finished tensor.

    Raises:
        ValueError: There is no such rank in the group, or the group is not one of this rank's; nothing was sent.
        PhalanxError: As for `all_reduce`.

    Example:
        >>> broadcast(torch.tensor([rank]), 1, group)
        AsyncCollectiveTensor(tensor([1]))
    """
    if is_dynamo_compiling():
        return wait(torch.ops.phalanx.broadcast(self, src, traced_name(group, tag, "broadcast")))
    state = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        if state is not None and state.fast_path:
            started = BROADCAST.fast(self, src, state.op_name)
            if started is not None:
                return started
        return BROADCAST.start(state or find(group, tag, "broadcast"), self, src)
    except (RuntimeError, ValueError) as error:
        fail(error)


def all_to_all_single(
    self: torch.Tensor,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
    group: GroupLike,
    tag: str = "",
) -> torch.Tensor:
    """Send a part of the tensor to each rank, and join the parts that the ranks send to this one. Collective.

    As torch.distributed._functional_collectives.all_to_all_single. Differentiable.

    Args:
        self: A tensor of at least one dim and of any strides and dtype. Its rows (indices of dim 0) are sent to the
            ranks in order.
        output_split_sizes: The number of rows received from each rank.
        input_split_sizes: The number of rows sent to each rank. Both are None, on all ranks, for an even split.
        group, tag: As for `all_reduce`.

    Returns:
        The received rows in the order of the ranks, as a contiguous tensor: an AsyncCollectiveTensor, or in a compiled
        graph the finished tensor.

    Raises:
        AssertionError: Only one of the two is None, or an entry is not an int; nothing was sent.
        ValueError: The splits do not fit the tensor or the group; nothing was sent.
        MismatchError: Ranks disagree about how many rows go from one to the other.
        PhalanxError: As for `all_reduce`.

    Example:
        >>> all_to_all_single(torch.tensor([10 * rank, 10 * rank + 1]), [1, 1], [1, 1], group)  # on rank 0
        AsyncCollectiveTensor(tensor([ 0, 10]))
    """
    output_rows = _split_sizes("all_to_all_single", "output_split_sizes", output_split_sizes)
    input_rows = _split_sizes("all_to_all_single", "input_split_sizes", input_split_sizes)
    if (output_split_sizes is None) != (input_split_sizes is None):
        given, missing = ("input", "output") if output_split_sizes is None else ("output", "input")
        raise AssertionError(
            f"all_to_all_single: {given}_split_sizes is given and {missing}_split_sizes is None; give both, or None "
            "for both for an even split"
        )
    if is_dynamo_compiling():
        name = traced_name(group, tag, "all_to_all_single")
        return wait(torch.ops.phalanx.all_to_all_single(self, output_rows, input_rows, name))
    state = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        if state is not None and state.fast_path:
            started = ALL_TO_ALL.fast(self, output_rows, input_rows, state.op_name)
            if started is not None:
                return started
        return ALL_TO_ALL.start(state or find(group, tag, "all_to_all_single"), self, output_rows, input_rows)
    except (RuntimeError, ValueError) as error:
        fail(error)


def shard_dim_alltoall(
    self: torch.Tensor,
    gather_dim: int,
    shard_dim: int,
    group: GroupLike,
    tag: str = "",
    gather_sizes: list[int] | None = None,
    shard_sizes: list[int] | None = None,
) -> torch.Tensor:
    """Split the tensor along one dim, send a part to each rank, and join what comes along another dim. Collective.

    A tensor that is sharded over the group along `gather_dim` becomes one that is sharded along `shard_dim`, as from
    tokens to heads in sequence parallelism. As torch's DTensor does it (_dtensor::shard_dim_alltoall). Differentiable.

    Args:
        self: A tensor of at least two dims and of any strides and dtype. Shape and dtype are the same on all ranks, but
            for `gather_dim` where `gather_sizes` say so.
        gather_dim: The dim along which to join; negative ones count from the end.
        shard_dim: The dim along which to split, another one.
        group, tag: As for `all_reduce`.
        gather_sizes: The size of `gather_dim` on each rank, by group rank.
        shard_sizes: The size of each rank's part of `shard_dim`, by group rank. Both lists are the same on all ranks;
            without them all parts are of one size.

    Returns:
        A contiguous tensor of the shape of `self`, with the sum of the sizes at `gather_dim` and this rank's size at
        `shard_dim`: an AsyncCollectiveTensor, or in a compiled graph a finished tensor.

    Raises:
        AssertionError: Only one of the lists is None, or there are none and `shard_dim` is not divisible by the group
            size; nothing was sent.
        IndexError: There is no such dim; nothing was sent.
        ValueError: The two dims are one, or the sizes do not fit the tensor or the group; nothing was sent.
        PhalanxError: As for `all_reduce`.

    Example:
        >>> shard_dim_alltoall(torch.tensor([[10 * rank, 10 * rank + 1]]), 0, 1, group)  # on rank 1
        AsyncCollectiveTensor(tensor([[ 1],
                [11]]))
    """
    name = "shard_dim_alltoall"
    join = check_dim(name, "gather_dim", gather_dim, self.dim())
    split = check_dim(name, "shard_dim", shard_dim, self.dim())
    if join == split:
        raise ValueError(f"{name}: gather_dim and shard_dim are both {split}; give two dims")
    if (gather_sizes is None) != (shard_sizes is None):
        given, missing = ("gather", "shard") if shard_sizes is None else ("shard", "gather")
        raise AssertionError(f"{name}: {given}_sizes is given and {missing}_sizes is None; give both, or None for both")
    state = None
    if is_dynamo_compiling():
        group_name = traced_name(group, tag, name)
        rank, size = own_rank(group_name)
    else:
        state = _ready(group if type(group) is str else id(group)) if not tag else None
        state = state or find(group, tag, name)
        rank, size = state.group_rank, state.size
    if gather_sizes is None or shard_sizes is None:
        own = even_part(self, size, split, name, "pad it, split another dim, or give the sizes")
        if state is None:  # a compiler merges the permutations into what is before and after
            moved = wait(torch.ops.phalanx.all_to_all_single(parts_first(self, size, split), [], [], group_name))
            return joined_at(moved, size, join)
        joined, parts = [self.size(join)] * size, [own] * size
    else:
        joined = _split_sizes(name, "gather_sizes", gather_sizes)
        parts = _split_sizes(name, "shard_sizes", shard_sizes)
        own = parts[rank] if rank < len(parts) else 0
    if state is None:
        return wait(torch.ops.phalanx.shard_dim_alltoall(self, joined, parts, own, join, split, group_name))
    try:
        return SHARD_DIM_ALLTOALL.begin(state, self, joined, parts, own, join, split)
    except (RuntimeError, ValueError) as error:
        fail(error)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until no collective writes into the tensor any more. Not collective.

    On a CPU it blocks; on a GPU it makes the current stream wait. A second call, and a call on a tensor that no
    collective writes into, does nothing. As torch.distributed._functional_collectives.wait_tensor.

    Args:
        tensor: Any tensor.

    Returns:
        The finished tensor: an ordinary tensor for an AsyncCollectiveTensor, otherwise `tensor`.

    Raises:
        PhalanxError: The collective failed.

    Example:
        >>> wait_tensor(all_reduce(torch.ones(2), "sum", group))
        tensor([2., 2.])
    """
    if is_dynamo_compiling():
        return wait(tensor)
    if type(tensor) is AsyncCollectiveTensor:
        if _async_tensor.needs_gradient(tensor):
            result: torch.Tensor = _WAIT(_finished, (), tensor)
            return result
        return tensor.trigger_wait()
    try:
        if is_plain(tensor):
            _async_tensor.wait_plain(tensor)
            return tensor
        return wait(tensor)
    except (RuntimeError, ValueError) as error:
        fail(error)


def all_reduce_(self: torch.Tensor, reduceOp: str, group: GroupLike, tag: str = "") -> torch.Tensor:  # noqa: N803
    """Reduce a tensor over all ranks, in place. Collective. It returns when the result is complete.

    Args:
        self: As for `all_reduce`; gets the result. Must not need a gradient.
        reduceOp, group, tag: As for `all_reduce`.

    Returns:
        `self`.

    Raises:
        ValueError, RuntimeError, PhalanxError: As for `all_reduce`.

    Example:
        >>> x = torch.ones(2)
        >>> all_reduce_(x, "sum", group) is x
        True
        >>> x
        tensor([2., 2.])
    """
    if is_dynamo_compiling():
        return self.copy_(all_reduce(self, reduceOp, group, tag))
    state = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        if state is not None and state.fast_path and _ALL_REDUCE_.fast(self, reduceOp, state.op_name) is not None:
            return self
        return _ALL_REDUCE_.start(state or find(group, tag, "all_reduce_"), self, reduceOp)
    except (RuntimeError, ValueError) as error:
        fail(error)


def broadcast_(self: torch.Tensor, src: int, group: GroupLike, tag: str = "") -> torch.Tensor:
    """Give every rank the tensor of one, in place. Collective. It returns when the result is complete.

    Args:
        self: As for `broadcast`; gets the result. Must not need a gradient.
        src, group, tag: As for `broadcast`.

    Returns:
        `self`.

    Raises:
        ValueError, RuntimeError, PhalanxError: As for `broadcast`.

    Example:
        >>> broadcast_(torch.tensor([rank]), 1, group)
        tensor([1])
    """
    if is_dynamo_compiling():
        return self.copy_(broadcast(self, src, group, tag))
    state = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        if state is not None and state.fast_path and _BROADCAST_.fast(self, src, state.op_name) is not None:
            return self
        return _BROADCAST_.start(state or find(group, tag, "broadcast_"), self, src)
    except (RuntimeError, ValueError) as error:
        fail(error)


# ---- parts of them ---------------------------------------------------------------------------------------------------


def _finished(tensor: AsyncCollectiveTensor) -> torch.Tensor:
    return tensor.trigger_wait().detach()


def _split_sizes(operation: str, name: str, sizes: list[int] | None) -> list[int]:
    if sizes is None:
        return []
    if not all(isinstance(size, (int, SymInt)) for size in sizes):
        raise AssertionError(f"{operation}: all entries of {name} must be int or SymInt, got {sizes}")
    return list(sizes)
