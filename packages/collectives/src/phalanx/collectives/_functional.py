"""The functional collectives. In eager mode they return before the peers have come; see AsyncCollectiveTensor."""

from functools import partial
from typing import Any

import torch
from torch import SymInt

from phalanx.collectives import _async_tensor, _autograd, _ops, _recording
from phalanx.collectives._async_tensor import AsyncCollectiveTensor, wrap
from phalanx.collectives._entry import Entry
from phalanx.collectives._errors import fail
from phalanx.collectives._groups import GroupLike, find, meet, own_rank, traced_name, traced_size
from phalanx.collectives._layout import check_dim, joined_at, parts_first
from phalanx.collectives._reductions import check_reduction
from phalanx.collectives._registry import ready
from phalanx.collectives._short_road import InPlace, Start
from phalanx.collectives._torch_compat import is_dynamo_compiling, is_tracing, is_watched

# ---- how an op is called ---------------------------------------------------------------------------------------------


class _Op(Start):
    """An op that makes a new tensor, on both roads: `begin`, and where that is closed, `call`."""

    __slots__ = ("function", "name")

    def __init__(self, name: str, function: Any) -> None:
        super().__init__(name)
        self.name = name
        self.function = function

    def call(self, entry: Entry, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        """Start the op through the dispatcher, and wrap its result."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{self.name} takes a torch.Tensor, not {type(tensor).__name__}")
        if torch.is_grad_enabled() and tensor.requires_grad and not is_tracing():
            result: torch.Tensor = self.function.apply(lambda *inner: self._wrapped(entry, *inner), tensor, *args)
            return result
        return self._wrapped(entry, tensor, *args)

    def _wrapped(self, entry: Entry, *args: Any) -> torch.Tensor:
        recorder = _recording.on(entry.name)
        if recorder is not None and not is_tracing():
            return recorder.record(self, *args)
        started = self.started(entry, *args)
        if is_tracing() or type(started) is not torch.Tensor:
            waited: torch.Tensor = torch.ops.phalanx.wait_tensor(started)
            return waited
        return wrap(started)

    def started(self, entry: Entry, *args: Any) -> torch.Tensor:
        """Start the op below autograd, and give what it will write."""
        if not entry.may_serve(args[0]) and not is_watched():
            return self._through_torch(entry, *args)  # without a detour, so it stays asynchronous
        result: torch.Tensor = getattr(torch.ops.phalanx, self.name)(*args)
        return result

    def _through_torch(self, entry: Entry, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        given = list(args)
        if self.name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_v"):
            given[0] = check_reduction(given[0])
        elif self.name == "all_to_all_single" and not given[0] and not given[1]:
            given[0] = given[1] = _ops.even(tensor.size(0), entry.size)
        started: torch.Tensor = _ops.through_torch(self.name)(tensor.contiguous(), *given)
        return started


ALL_REDUCE = _Op("all_reduce", _autograd.AllReduce)
ALL_GATHER = _Op("all_gather_into_tensor", _autograd.AllGather)
REDUCE_SCATTER = _Op("reduce_scatter_tensor", _autograd.ReduceScatter)
ALL_GATHER_V = _Op("all_gather_v", _autograd.AllGatherV)
REDUCE_SCATTER_V = _Op("reduce_scatter_v", _autograd.ReduceScatterV)
ALL_TO_ALL = _Op("all_to_all_single", _autograd.AllToAll)
BROADCAST = _Op("broadcast", _autograd.Broadcast)
_ALL_REDUCE_ = InPlace("all_reduce_")
_BROADCAST_ = InPlace("broadcast_")

_OUT_OF_PLACE = {"all_reduce_": ALL_REDUCE, "broadcast_": BROADCAST}

_WAIT: Any = _autograd.Wait.apply

_ready = ready.get  # bound here once and not in every call


def _not_now(*_: Any) -> None:
    """For the short road of what makes a new tensor: closed, so that `call` records it."""


def _recorded(name: str, recorder: Any, tensor: torch.Tensor, argument: Any, group: str) -> torch.Tensor | None:
    """For the short road of what works in place."""
    if type(tensor) is not torch.Tensor:
        return None
    if name == "broadcast_":
        _check_source(name, argument, recorder.entry)
    recorder.write(_OUT_OF_PLACE[name], tensor, argument)
    return tensor


for _op in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_GATHER_V, REDUCE_SCATTER_V, ALL_TO_ALL, BROADCAST):
    _recording.detour(_op, "begin", _not_now)
_recording.detour(_ALL_REDUCE_, "run", partial(_recorded, "all_reduce_"))
_recording.detour(_BROADCAST_, "run", partial(_recorded, "broadcast_"))


# ---- collectives -----------------------------------------------------------------------------------------------------


def all_reduce(self: torch.Tensor, reduceOp: str, group: GroupLike, tag: str = "") -> torch.Tensor:  # noqa: N803
    """Reduce a tensor over all ranks; every rank gets the result, to the bit. Collective.

    As torch.distributed._functional_collectives.all_reduce. Differentiable for sum and avg.

    Args:
        self: Any shape, strides and dtype; left as it is, and free to be changed when the call returns (if the core
            serves the group). bool, integers and floats; complex numbers for sum and avg.
        reduceOp: sum, avg, product, min, max, band, bor or bxor, in upper or lower case. 16-bit floats are added
            in float32 and rounded once; avg of integers rounds towards zero.
        group: A ProcessGroup, a one-dimensional DeviceMesh, (DeviceMesh, dim by its number or name), a list of global
            ranks, a list of lists of them (each rank takes part in the one that holds it), the name of a process group,
            a phalanx.core.Group, or None for the default process group. The first collective of a rank on a group waits
            until all its ranks come.
        tag: With a list, tells groups of the same ranks apart; one that does not exist is made.

    Returns:
        Of the shape of `self`, contiguous: an AsyncCollectiveTensor, or in a compiled graph the finished tensor.

    Raises:
        ValueError: Unknown reduction, or not a group of this rank; nothing was sent.
        RuntimeError: A gradient is needed that the reduction does not have; nothing was sent.
        PhalanxError: From here or from the first use of the result: a peer died (PeerDeadError) or did not come
            (WaitTimeoutError), or the ranks made different calls (MismatchError). The group is of no use after it.
    """
    if is_dynamo_compiling():
        return _traced(torch.ops.phalanx.all_reduce(self, reduceOp.lower(), traced_name(group, tag)))
    entry = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        if entry is not None and entry.core is not None:
            started = ALL_REDUCE.begin(self, reduceOp, entry.name)
            if started is not None:
                return started
        entry = entry or find(group, tag)
        check_reduction(reduceOp)
        meet(entry, self)
        return ALL_REDUCE.call(entry, self, reduceOp, entry.name)
    except (RuntimeError, ValueError) as error:
        fail(error)


def all_gather_tensor(self: torch.Tensor, gather_dim: int, group: GroupLike, tag: str = "") -> torch.Tensor:
    """Join the tensors of all ranks along a dim; every rank gets the result. Collective.

    As torch.distributed._functional_collectives.all_gather_tensor. Differentiable.

    Args:
        self: Any shape, strides and dtype, the same shape and dtype on all ranks. One without dims counts as one of
            shape (1,).
        gather_dim: Along which to join; negative ones count from the end.
        group, tag: As for `all_reduce`.

    Returns:
        Of the shape of `self`, with `gather_dim` group-size times as long, contiguous. An AsyncCollectiveTensor when
        gather_dim is 0; otherwise joining may have waited.

    Raises:
        IndexError: There is no such dim; nothing was sent.
        ValueError, PhalanxError: As for `all_reduce`.
    """
    dim = 0 if gather_dim == 0 else check_dim("all_gather_tensor", "gather_dim", gather_dim, max(self.dim(), 1))
    if is_dynamo_compiling():
        name = traced_name(group, tag)
        size = traced_size(name)
        traced = _traced(torch.ops.phalanx.all_gather_into_tensor(self, size, name))
        return joined_at(traced, size, dim)
    entry = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        gathered: torch.Tensor | None = None
        if entry is not None and entry.core is not None:
            gathered = ALL_GATHER.begin(self, entry.size, entry.name)
        else:
            entry = entry or find(group, tag)
        if gathered is None:
            meet(entry, self)
            gathered = ALL_GATHER.call(entry, self, entry.size, entry.name)
        if dim == 0:
            return gathered
        recorder = _recording.on(entry.name)
        return joined_at(gathered, entry.size, dim) if recorder is None else recorder.joined(gathered, dim)
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
        self: Any shape, strides and dtype, the same shape and dtype on all ranks.
        reduceOp: As for `all_reduce`.
        scatter_dim: Along which to split; negative ones count from the end. Its size must be a multiple of the group
            size.
        group, tag: As for `all_reduce`.

    Returns:
        The part of this rank: of the shape of `self`, with `scatter_dim` divided by the group size, contiguous. An
        AsyncCollectiveTensor, or in a compiled graph the finished tensor.

    Raises:
        AssertionError: The size is no multiple; nothing was sent.
        IndexError: There is no such dim; nothing was sent.
        ValueError, RuntimeError, PhalanxError: As for `all_reduce`.
    """
    dim = check_dim("reduce_scatter_tensor", "scatter_dim", scatter_dim, self.dim())
    if is_dynamo_compiling():
        name = traced_name(group, tag)
        size = traced_size(name)
        parts = parts_first(self, size, dim)
        return _traced(torch.ops.phalanx.reduce_scatter_tensor(parts, reduceOp.lower(), size, name))
    entry = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        entry = entry or find(group, tag)
        parts = parts_first(self, entry.size, dim)
        if entry.core is not None:
            started = REDUCE_SCATTER.begin(parts, reduceOp, entry.size, entry.name)
            if started is not None:
                return started
        check_reduction(reduceOp)
        meet(entry, parts)
        return REDUCE_SCATTER.call(entry, parts, reduceOp, entry.size, entry.name)
    except (RuntimeError, ValueError) as error:
        fail(error)


def all_gather_v(
    self: torch.Tensor, sizes: list[int], gather_dim: int, group: GroupLike, tag: str = ""
) -> torch.Tensor:
    """Join tensors of different sizes along a dim; every rank gets the result. Collective.

    all_gather_tensor for uneven parts, without padding. torch.distributed has none such; MPI calls it Allgatherv.
    Differentiable.

    Args:
        self: At least one dim, any strides and dtype; of the same shape on all ranks but for `gather_dim`.
        sizes: The size of `gather_dim` on each rank, by group rank; the same list on all ranks.
        gather_dim: Along which to join; negative ones count from the end.
        group, tag: As for `all_reduce`.

    Returns:
        Of the shape of `self`, with sum(sizes) at `gather_dim`, contiguous. An AsyncCollectiveTensor when gather_dim
        is 0; otherwise joining may have waited. Within a coalescing manager: along dim 0 only.

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
    rows = self if dim == 0 else self.movedim(dim, 0)
    if is_dynamo_compiling():
        whole = _traced(torch.ops.phalanx.all_gather_v(rows, sizes, traced_name(group, tag)))
    else:
        whole = _of_sizes(ALL_GATHER_V, group, tag, rows, sizes)
    return whole if dim == 0 else wait_tensor(whole).movedim(0, dim).contiguous()


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
        self: At least one dim, any strides and dtype, the same shape and dtype on all ranks.
        reduceOp: As for `all_reduce`.
        sizes: The size of each rank's part of `scatter_dim`, by group rank; the same list on all ranks.
        scatter_dim: Along which to split; negative ones count from the end.
        group, tag: As for `all_reduce`.

    Returns:
        The part of this rank: of the shape of `self`, with its size at `scatter_dim`, contiguous. An
        AsyncCollectiveTensor when scatter_dim is 0; otherwise laying it out may have waited. Within a coalescing
        manager: along dim 0 only.

    Raises:
        IndexError: There is no such dim; nothing was sent.
        ValueError: The sizes do not fit the tensor or the group; nothing was sent.
        RuntimeError, PhalanxError: As for `all_reduce`.

    Example:
        >>> reduce_scatter_v(torch.ones(3, 4), "sum", [2, 1], 0, dist.group.WORLD).shape  # on rank 1
        torch.Size([1, 4])
    """
    dim = check_dim("reduce_scatter_v", "scatter_dim", scatter_dim, self.dim())
    rows = self if dim == 0 else self.movedim(dim, 0)
    if is_dynamo_compiling():
        name = traced_name(group, tag)
        own = sizes[own_rank(name)[0]]
        part = _traced(torch.ops.phalanx.reduce_scatter_v(rows, reduceOp.lower(), sizes, own, name))
    else:
        check_reduction(reduceOp)
        part = _of_sizes(REDUCE_SCATTER_V, group, tag, rows, sizes, reduceOp)
    return part if dim == 0 else wait_tensor(part).movedim(0, dim).contiguous()


def _of_sizes(
    op: _Op, group: GroupLike, tag: str, tensor: torch.Tensor, sizes: list[int], *reduction: str
) -> torch.Tensor:
    """Start all_gather_v or reduce_scatter_v on rows of dim 0, checked."""
    counts = _split_sizes("sizes", sizes)
    entry = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        entry = entry or find(group, tag)
        if len(counts) != entry.size:
            raise ValueError(f"{op.name}: sizes has {len(counts)} entries, but the group has {entry.size} ranks")
        if any(count < 0 for count in counts):
            raise ValueError(f"{op.name}: sizes has a negative entry: {counts}")
        own, rows = counts[entry.group_rank], tensor.size(0)
        if reduction and sum(counts) != rows:
            raise ValueError(f"{op.name}: sizes add up to {sum(counts)}, but the dim of the tensor has size {rows}")
        if not reduction and own != rows:
            raise ValueError(f"{op.name}: sizes has {own} for this rank, but the dim of the tensor has size {rows}")
        args: tuple[Any, ...] = (*reduction, counts, *((own,) if reduction else ()), entry.name)
        if entry.core is not None:
            started = op.begin(tensor, *args)
            if started is not None:
                return started
        meet(entry, tensor)
        return op.call(entry, tensor, *args)
    except (RuntimeError, ValueError) as error:
        fail(error)


def broadcast(self: torch.Tensor, src: int, group: GroupLike, tag: str = "") -> torch.Tensor:
    """Give every rank the tensor of one. Collective.

    As torch.distributed._functional_collectives.broadcast. Differentiable: the source gets the sum of all gradients,
    the others get zeros.

    Args:
        self: Any shape, strides and dtype, the same shape and dtype on all ranks; only the values of the source count.
        src: The source, as a rank within the group.
        group, tag: As for `all_reduce`.

    Returns:
        Of the shape of `self`, contiguous: an AsyncCollectiveTensor, or in a compiled graph the finished tensor.

    Raises:
        ValueError: No such rank in the group, or not a group of this rank; nothing was sent.
        PhalanxError: As for `all_reduce`.
    """
    if is_dynamo_compiling():
        return _traced(torch.ops.phalanx.broadcast(self, src, traced_name(group, tag)))
    entry = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        if entry is not None and entry.core is not None:
            started = BROADCAST.begin(self, src, entry.name)
            if started is not None:
                return started
        entry = entry or find(group, tag)
        _check_source("broadcast", src, entry)
        meet(entry, self)
        return BROADCAST.call(entry, self, src, entry.name)
    except (RuntimeError, ValueError) as error:
        fail(error)


def all_to_all_single(
    self: torch.Tensor,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
    group: GroupLike,
    tag: str = "",
) -> torch.Tensor:
    """Send a part of the tensor to each rank, and join what comes from each. Collective.

    As torch.distributed._functional_collectives.all_to_all_single. Differentiable.

    Args:
        self: At least one dim, any strides and dtype. Its rows (indices of dim 0) are dealt to the ranks in order.
        output_split_sizes: How many rows come from each rank; what that rank sends here.
        input_split_sizes: How many rows go to each rank. Both None, on all ranks, for an even split.
        group, tag: As for `all_reduce`.

    Returns:
        The rows that came, in rank order, contiguous: an AsyncCollectiveTensor, or in a compiled graph the finished
        tensor.

    Raises:
        AssertionError: Only one of the two is None, or an entry is no int; nothing was sent.
        ValueError: The splits do not fit the tensor or the group; nothing was sent.
        MismatchError: Ranks disagree about how many rows go from one to the other.
        PhalanxError: As for `all_reduce`.
    """
    output_rows = _split_sizes("output_split_sizes", output_split_sizes)
    input_rows = _split_sizes("input_split_sizes", input_split_sizes)
    if (output_split_sizes is None) != (input_split_sizes is None):
        raise AssertionError(
            "output_split_sizes and input_split_sizes must either be specified together or both set to None"
        )
    if is_dynamo_compiling():
        name = traced_name(group, tag)
        return _traced(torch.ops.phalanx.all_to_all_single(self, output_rows, input_rows, name))
    entry = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        if entry is not None and entry.core is not None:
            started = ALL_TO_ALL.begin(self, output_rows, input_rows, entry.name)
            if started is not None:
                return started
        entry = entry or find(group, tag)
        _check_splits(self, output_rows, input_rows, entry)
        meet(entry, self)
        return ALL_TO_ALL.call(entry, self, output_rows, input_rows, entry.name)
    except (RuntimeError, ValueError) as error:
        fail(error)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until no collective writes into the tensor any more. Not collective.

    On a CPU it blocks; on a GPU it makes the current stream wait. A second call, and a call on a tensor that no
    collective writes into, does nothing. As torch.distributed._functional_collectives.wait_tensor.

    Args:
        tensor: Any.

    Returns:
        The finished tensor: an ordinary one for an AsyncCollectiveTensor, otherwise `tensor`.

    Raises:
        PhalanxError: The collective failed.
    """
    if is_dynamo_compiling():
        return _traced(tensor)
    if type(tensor) is AsyncCollectiveTensor:
        if _async_tensor.needs_gradient(tensor):
            result: torch.Tensor = _WAIT(_finished, tensor)
            return result
        return tensor.trigger_wait()
    try:
        return _traced(tensor)
    except (RuntimeError, ValueError) as error:
        fail(error)


def all_reduce_(self: torch.Tensor, reduceOp: str, group: GroupLike, tag: str = "") -> torch.Tensor:  # noqa: N803
    """Reduce a tensor over all ranks, in place. Collective. It returns when the result is there.

    Args:
        self: As for `all_reduce`; gets the result. Must not need a gradient.
        reduceOp, group, tag: As for `all_reduce`.

    Returns:
        `self`.

    Raises:
        ValueError, RuntimeError, PhalanxError: As for `all_reduce`.
    """
    if is_dynamo_compiling():
        return self.copy_(all_reduce(self, reduceOp, group, tag))
    entry = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        if entry is not None and entry.core is not None and _ALL_REDUCE_.run(self, reduceOp, entry.name) is not None:
            return self
        return _in_place("all_reduce_", self, group, tag, reduceOp)
    except (RuntimeError, ValueError) as error:
        fail(error)


def broadcast_(self: torch.Tensor, src: int, group: GroupLike, tag: str = "") -> torch.Tensor:
    """Give every rank the tensor of one, in place. Collective. It returns when the result is there.

    Args:
        self: As for `broadcast`; gets the result. Must not need a gradient.
        src, group, tag: As for `broadcast`.

    Returns:
        `self`.

    Raises:
        ValueError, RuntimeError, PhalanxError: As for `broadcast`.
    """
    if is_dynamo_compiling():
        return self.copy_(broadcast(self, src, group, tag))
    entry = _ready(group if type(group) is str else id(group)) if not tag else None
    try:
        if entry is not None and entry.core is not None and _BROADCAST_.run(self, src, entry.name) is not None:
            return self
        return _in_place("broadcast_", self, group, tag, src)
    except (RuntimeError, ValueError) as error:
        fail(error)


# ---- parts of them ---------------------------------------------------------------------------------------------------


def _traced(started: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = torch.ops.phalanx.wait_tensor(started)
    return done


def _finished(tensor: AsyncCollectiveTensor) -> torch.Tensor:
    return tensor.trigger_wait().detach()


def _in_place(name: str, tensor: torch.Tensor, group: GroupLike, tag: str, argument: Any) -> torch.Tensor:
    """Where the short road is closed."""
    target = tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
    entry = find(group, tag)
    if name == "broadcast_":
        _check_source(name, argument, entry)
    else:
        check_reduction(argument)
    meet(entry, target)
    recorder = _recording.on(entry.name)
    if recorder is not None and not is_tracing():
        recorder.write(_OUT_OF_PLACE[name], target, argument)
        return tensor
    getattr(torch.ops.phalanx, name)(target, argument, entry.name)
    torch.ops.phalanx.wait_tensor(target)
    return tensor


def _check_source(operation: str, src: int, entry: Entry) -> None:
    if not 0 <= src < entry.size:
        raise ValueError(
            f"{operation} on group '{entry.name}': src is {src}; it must be a rank within the group, 0 to "
            f"{entry.size - 1}"
        )


def _split_sizes(name: str, sizes: list[int] | None) -> list[int]:
    if sizes is None:
        return []
    if not all(isinstance(size, (int, SymInt)) for size in sizes):
        raise AssertionError(f"All {name} must be int or SymInt, got {sizes}")
    return list(sizes)


def _check_splits(tensor: torch.Tensor, output_rows: list[int], input_rows: list[int], entry: Entry) -> None:
    operation = f"all_to_all_single on group '{entry.name}'"
    if tensor.dim() == 0:
        raise ValueError(f"{operation}: the tensor has no dims, so there is none to split; give it at least one")
    if not output_rows and not input_rows:
        _ops.even(tensor.size(0), entry.size)
        return
    for name, rows in (("output_split_sizes", output_rows), ("input_split_sizes", input_rows)):
        if len(rows) != entry.size:
            raise ValueError(f"{operation}: {name} has {len(rows)} entries, but the group has {entry.size} ranks")
        if any(size < 0 for size in rows):
            raise ValueError(f"{operation}: {name} has a negative entry: {rows}")
    if sum(input_rows) != tensor.size(0):
        raise ValueError(
            f"{operation}: input_split_sizes add up to {sum(input_rows)}, but dim 0 of the tensor has size "
            f"{tensor.size(0)}"
        )
