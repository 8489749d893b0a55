"""The collectives, one record for each. What Python knows of an op of torch.ops.phalanx derives from its record.

The schemas and the kernels are in one table of C++ (core/torch/library.cpp). From a record here derive the kernels for
tensors without data, gradients, the fast path, in-place and coalesced forms, the rows of a coalescing manager, the way
through torch.distributed, what compilers and CommDebugMode see, and the bodies of the functional forms.

In each function of a record, `args` are the arguments of the op after its tensor, without the last one, the name of the
group; and `group` is the group as this rank sees it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from phalanx.collectives._layout import contiguous_like, no_dims, not_divisible
from phalanx.collectives.reductions import check_reduction
from phalanx.core import lib


class GroupFacts(Protocol):
    """The facts of a group that a record may use."""

    name: str
    size: int
    group_rank: int


class Adjoint(NamedTuple):
    """The collective that brings the gradient back.

    Attributes:
        op: Its name.
        arguments: arguments(shape, *args) gives its arguments, of those of the collective on a tensor of that shape.
        finish: finish(gradient, shape, *args) gives the gradient of the collective's input, of what it gave.
    """

    op: str
    arguments: Callable[..., tuple[Any, ...]]
    finish: Callable[..., torch.Tensor] = lambda gradient, *_: gradient


@dataclass(frozen=True)
class Collective:
    """A collective of torch.ops.phalanx.

    Attributes:
        name: The name of the op.
        function: The name of its functional form.
        result: result(tensor, *args) is a new tensor of the shape, dtype and device of the result.
        adjoint: How its gradient comes back.
        check: check(group, tensor, *args) raises ValueError where an argument is wrong.
        forms: The endings of its other forms: "_" and "_out" write into an argument, "_coalesced" and "_coalesced_"
            take lists.
        kind: As a row of phx_coalesced (PHX_CALL_*); -1 where there is no such row.
        reduces: Whether its first argument is a reduction.
        torch_name: The op of torch that does the same, or most of it; CommDebugMode counts it as that.
        through_torch: through_torch(group, tensor, *args) starts it by torch's ops; None: torch's op of `torch_name`
            takes the same arguments.
        takes_size: Whether the size of the group is its last argument but one.
    """

    name: str
    function: str
    result: Callable[..., torch.Tensor]
    adjoint: Adjoint
    check: Callable[..., object] = lambda *_: None
    forms: tuple[str, ...] = ()
    kind: int = -1
    reduces: bool = False
    torch_name: str = ""
    through_torch: Callable[..., torch.Tensor] | None = None
    takes_size: bool = False


# ---- results ---------------------------------------------------------------------------------------------------------


def _rows(tensor: torch.Tensor, rows: Any) -> torch.Tensor:
    return tensor.new_empty([rows, *tensor.size()[1:]])


def _resized(tensor: torch.Tensor, dim: int, size: Any) -> torch.Tensor:
    return tensor.new_empty([*tensor.size()[:dim], size, *tensor.size()[dim + 1 :]])


def _redivided(
    tensor: torch.Tensor, gather_sizes: Sequence[Any], shard_sizes: Any, own: Any, gather_dim: int, shard_dim: int
) -> torch.Tensor:
    return _resized(_resized(tensor, shard_dim, own), gather_dim, sum(gather_sizes))


def _exchanged(tensor: torch.Tensor, output_splits: Sequence[Any], input_splits: Sequence[Any]) -> torch.Tensor:
    return _rows(tensor, sum(output_splits)) if output_splits else contiguous_like(tensor)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_source(group: GroupFacts, tensor: torch.Tensor, src: int) -> None:
    if not isinstance(src, (int, torch.SymInt)) or not 0 <= src < group.size:
        raise ValueError(
            f"broadcast on group '{group.name}': src is {src!r}; it must be a rank within the group, an int from 0 to "
            f"{group.size - 1}"
        )


def _check_list(operation: str, group: GroupFacts, name: str, sizes: Sequence[int]) -> None:
    if len(sizes) != group.size:
        raise ValueError(
            f"{operation}: {name} has {len(sizes)} entries, but the group has {group.size} ranks; give one for each "
            "rank"
        )
    if any(size < 0 for size in sizes):
        raise ValueError(f"{operation}: {name} has a negative entry: {list(sizes)}; sizes are 0 or more")


def _check_gathered_v(group: GroupFacts, tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> None:
    _check_list("all_gather_v", group, "sizes", sizes)
    own, rows = sizes[group.group_rank], tensor.size(dim)
    if own != rows:
        raise ValueError(
            f"all_gather_v: sizes has {own} for this rank, but the gathered dim of its tensor has size {rows}; give "
            "the size of that dim on each rank"
        )


def _check_scattered_v(
    group: GroupFacts, tensor: torch.Tensor, reduce_op: str, sizes: Sequence[int], own: int, dim: int
) -> None:
    check_reduction("reduce_scatter_v", reduce_op)
    _check_list("reduce_scatter_v", group, "sizes", sizes)
    if sum(sizes) != tensor.size(dim):
        raise ValueError(
            f"reduce_scatter_v: sizes add up to {sum(sizes)}, but the scattered dim of the tensor has size "
            f"{tensor.size(dim)}; the two must be equal"
        )


def _check_two_dims(
    group: GroupFacts,
    tensor: torch.Tensor,
    gather_sizes: Sequence[int],
    shard_sizes: Sequence[int],
    own: int,
    gather_dim: int,
    shard_dim: int,
) -> None:
    _check_list("shard_dim_alltoall", group, "gather_sizes", gather_sizes)
    _check_list("shard_dim_alltoall", group, "shard_sizes", shard_sizes)
    here, rows = gather_sizes[group.group_rank], tensor.size(gather_dim)
    if here != rows:
        raise ValueError(
            f"shard_dim_alltoall: gather_sizes has {here} for this rank, but dim {gather_dim} of its tensor has size "
            f"{rows}; give the size of that dim on each rank"
        )
    if sum(shard_sizes) != tensor.size(shard_dim):
        raise ValueError(
            f"shard_dim_alltoall: shard_sizes add up to {sum(shard_sizes)}, but dim {shard_dim} of the tensor has size "
            f"{tensor.size(shard_dim)}; the two must be equal"
        )


def _check_splits(
    group: GroupFacts, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> None:
    operation = f"all_to_all_single on group '{group.name}'"
    if tensor.dim() == 0:
        raise ValueError(no_dims(operation))
    if not output_splits and not input_splits:
        _even_splits(tensor.size(0), group.size)
        return
    _check_list(operation, group, "output_split_sizes", output_splits)
    _check_list(operation, group, "input_split_sizes", input_splits)
    if sum(input_splits) != tensor.size(0):
        raise ValueError(
            f"{operation}: input_split_sizes add up to {sum(input_splits)}, but dim 0 of the tensor has size "
            f"{tensor.size(0)}; the two must be equal"
        )


def _even_splits(rows: int, size: int) -> list[int]:
    if rows % size:
        raise ValueError(not_divisible("all_to_all_single", 0, rows, size, "give split sizes"))
    return [rows // size] * size


# ---- gradients -------------------------------------------------------------------------------------------------------


def _divided(gradient: torch.Tensor, shape: Sequence[int], reduce_op: str, sizes: Any, *_: Any) -> torch.Tensor:
    """The gathered gradient of a reduction; for the average it is divided by the number of ranks."""
    return gradient / (len(sizes) if isinstance(sizes, (list, tuple)) else sizes) if reduce_op == "avg" else gradient


def _without_dim(gradient: torch.Tensor, shape: Sequence[int], *_: Any) -> torch.Tensor:
    return gradient if shape else gradient.squeeze(0)


# ---- through torch.distributed ---------------------------------------------------------------------------------------


def _all_gather_v_through_torch(
    group: GroupFacts, tensor: torch.Tensor, sizes: Sequence[int], dim: int
) -> torch.Tensor:
    everywhere = torch.cat([tensor.movedim(dim, 0)] * len(sizes))
    started = _all_to_all_through_torch(group, everywhere, sizes, [tensor.size(dim)] * len(sizes))
    if dim == 0:
        return started
    whole: torch.Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return whole.movedim(0, dim).contiguous()


def _reduce_scatter_v_through_torch(
    group: GroupFacts, tensor: torch.Tensor, reduce_op: str, sizes: Sequence[int], own: int, dim: int
) -> torch.Tensor:
    started = torch.ops._c10d_functional.all_reduce(tensor, reduce_op, group.name)
    whole = torch.ops._c10d_functional.wait_tensor(started)
    part: torch.Tensor = whole.narrow(dim, sum(sizes[: group.group_rank]), own)
    return part.clone(memory_format=torch.contiguous_format)


def _all_to_all_through_torch(
    group: GroupFacts, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> torch.Tensor:
    if not output_splits and not input_splits:
        output_splits = input_splits = _even_splits(tensor.size(0), group.size)
    exchanged: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(
        tensor, output_splits, input_splits, group.name
    )
    return exchanged


def _shard_dim_alltoall_through_torch(
    group: GroupFacts,
    tensor: torch.Tensor,
    gather_sizes: Sequence[int],
    shard_sizes: Sequence[int],
    own: int,
    gather_dim: int,
    shard_dim: int,
) -> torch.Tensor:
    parts = [part.reshape(-1) for part in torch.split(tensor, list(shard_sizes), shard_dim)]
    shape = list(tensor.shape)
    shape[shard_dim] = own
    shapes = [[*shape[:gather_dim], n, *shape[gather_dim + 1 :]] for n in gather_sizes]
    counts = [math.prod(shape) for shape in shapes]
    started = _all_to_all_through_torch(group, torch.cat(parts), counts, [part.numel() for part in parts])
    moved = torch.split(torch.ops._c10d_functional.wait_tensor(started), counts)
    return torch.cat([part.view(form) for part, form in zip(moved, shapes, strict=True)], gather_dim)


# ---- the records -----------------------------------------------------------------------------------------------------

ALL_REDUCE = Collective(
    name="all_reduce",
    function="all_reduce",
    result=contiguous_like,
    check=lambda group, tensor, reduce_op: check_reduction("all_reduce", reduce_op),
    adjoint=Adjoint("all_reduce", lambda shape, reduce_op: (reduce_op,)),
    forms=("_", "_coalesced", "_coalesced_"),
    kind=int(lib.PHX_CALL_ALL_REDUCE),
    reduces=True,
    torch_name="all_reduce",
)
ALL_GATHER = Collective(
    name="all_gather_into_tensor",
    function="all_gather_tensor",
    result=lambda tensor, size: _rows(tensor, size * (tensor.size(0) if tensor.dim() else 1)),
    adjoint=Adjoint("reduce_scatter_tensor", lambda shape, size: ("sum", size), _without_dim),
    forms=("_out", "_coalesced"),
    kind=int(lib.PHX_CALL_ALL_GATHER),
    torch_name="all_gather_into_tensor",
    takes_size=True,
)
REDUCE_SCATTER = Collective(
    name="reduce_scatter_tensor",
    function="reduce_scatter_tensor",
    result=lambda tensor, reduce_op, size: _rows(tensor, tensor.size(0) // size),
    check=lambda group, tensor, reduce_op: check_reduction("reduce_scatter_tensor", reduce_op),
    adjoint=Adjoint("all_gather_into_tensor", lambda shape, reduce_op, size: (size,), _divided),
    forms=("_out", "_coalesced"),
    kind=int(lib.PHX_CALL_REDUCE_SCATTER),
    reduces=True,
    torch_name="reduce_scatter_tensor",
    takes_size=True,
)
ALL_GATHER_V = Collective(
    name="all_gather_v",
    function="all_gather_v",
    result=lambda tensor, sizes, dim: _resized(tensor, dim, sum(sizes)),
    check=_check_gathered_v,
    adjoint=Adjoint("reduce_scatter_v", lambda shape, sizes, dim: ("sum", sizes, shape[dim], dim)),
    torch_name="all_gather_into_tensor",
    through_torch=_all_gather_v_through_torch,
)
REDUCE_SCATTER_V = Collective(
    name="reduce_scatter_v",
    function="reduce_scatter_v",
    result=lambda tensor, reduce_op, sizes, own, dim: _resized(tensor, dim, own),
    check=_check_scattered_v,
    adjoint=Adjoint("all_gather_v", lambda shape, reduce_op, sizes, own, dim: (sizes, dim), _divided),
    reduces=True,
    torch_name="reduce_scatter_tensor",
    through_torch=_reduce_scatter_v_through_torch,
)
ALL_TO_ALL = Collective(
    name="all_to_all_single",
    function="all_to_all_single",
    result=_exchanged,
    check=_check_splits,
    adjoint=Adjoint("all_to_all_single", lambda shape, output_splits, input_splits: (input_splits, output_splits)),
    kind=int(lib.PHX_CALL_ALL_TO_ALL),
    torch_name="all_to_all_single",
    through_torch=_all_to_all_through_torch,
)
SHARD_DIM_ALLTOALL = Collective(
    name="shard_dim_alltoall",
    function="shard_dim_alltoall",
    result=_redivided,
    check=_check_two_dims,
    adjoint=Adjoint(
        "shard_dim_alltoall",
        lambda shape, gather_sizes, shard_sizes, own, gather_dim, shard_dim: (
            shard_sizes,
            gather_sizes,
            shape[gather_dim],
            shard_dim,
            gather_dim,
        ),
    ),
    torch_name="all_to_all_single",
    through_torch=_shard_dim_alltoall_through_torch,
)
BROADCAST = Collective(
    name="broadcast",
    function="broadcast",
    result=contiguous_like,
    check=_check_source,
    adjoint=Adjoint("broadcast_backward", lambda shape, src: (src,)),
    forms=("_",),
    kind=int(lib.PHX_CALL_BROADCAST),
    torch_name="broadcast",
)
COLLECTIVES = (
    ALL_REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_GATHER_V,
    REDUCE_SCATTER_V,
    ALL_TO_ALL,
    SHARD_DIM_ALLTOALL,
    BROADCAST,
)

# The gradient of broadcast: the sum on the source and zeros elsewhere. It is an op of its own because its result
# depends on the rank, and a compiled graph must not: torch's caches give one rank the graphs of another.
BROADCAST_BACKWARD = Collective(
    name="broadcast_backward",
    function="broadcast",
    result=contiguous_like,
    check=_check_source,
    adjoint=Adjoint("broadcast", lambda shape, src: (src,)),
)


# ---- the forms -------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """One op: a collective in one of its forms.

    Attributes:
        collective: The collective.
        name: The name of the op, such as all_reduce_coalesced_.
        takes_list: Whether it is of several tensors, which it takes as a list.
        in_place: Whether it writes into its tensor.
        into_out: Whether it writes into its argument `out`.
    """

    collective: Collective
    name: str
    takes_list: bool = False
    in_place: bool = False
    into_out: bool = False

    @property
    def writes(self) -> bool:
        """Whether it writes into an argument, and returns nothing."""
        return self.in_place or self.into_out


def _form(collective: Collective, ending: str) -> Form:
    takes_list, in_place = ending.startswith("_coalesced"), ending in ("_", "_coalesced_")
    return Form(collective, collective.name + ending, takes_list, in_place, ending == "_out")


# By the name of the op. Each is also complete on return, as blocking_<name>, and in phalanx_ordered.
FORMS = {
    form.name: form
    for collective in COLLECTIVES
    for form in (_form(collective, ending) for ending in ("", *collective.forms))
}
BLOCKING = {f"blocking_{name}": name for name in FORMS}
OPS = ("broadcast_backward", "wait_tensor", *FORMS, *BLOCKING)  # all with an autograd kernel


def form_of(op: str) -> Form | None:
    """The collective and the form of an op of torch.ops.phalanx or torch.ops._c10d_functional. Not collective.

    For compilers, and for tools that count collectives.

    Args:
        op: The name of the op, without namespace and overload.

    Returns:
        The form, or None if the op is not a collective.

    Example:
        >>> form = form_of("reduce_scatter_tensor_coalesced")
        >>> form.collective.name, form.takes_list, form.writes
        ('reduce_scatter_tensor', True, False)
        >>> form_of("wait_tensor") is None
        True
    """
    return FORMS.get(BLOCKING.get(op, op))


def fake_kernel(form: Form) -> Callable[..., Any]:
    """The kernel of an op for tensors without data."""
    collective = form.collective

    def result(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if collective.reduces:
            check_reduction(collective.name, args[0])
        return collective.result(tensor, *args[:-1])

    if form.writes:
        return gives_nothing
    return (lambda tensors, *args: [result(tensor, *args) for tensor in tensors]) if form.takes_list else result


def gives_nothing(*_: Any, **__: Any) -> None:
    """The kernel, for tensors without data, of an op that writes into an argument."""
