"""All the forms of a group argument, and the state of the group that each means."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from phalanx.collectives import _library, _registry, _torch_compat
from phalanx.collectives._group_state import GroupState
from phalanx.collectives._torch_compat import DeviceMesh
from phalanx.core import Group

# What may be given as a group: a ProcessGroup, a mesh with one dim, (mesh, dim), a list of ranks, a list of such lists,
# a name, or a group of the core. None is the default group, as dist.group.WORLD is before init_process_group.
GroupLike = (
    dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | list[int] | list[list[int]] | str | Group | None
)

_NOT_1D = "Only 1D mesh is supported, pass in (DeviceMesh, int) together if mesh > 1D"
_TUPLE = "Invalid tuple for group must be (DeviceMesh, int) or (DeviceMesh, str)"
_ACCEPTED = (
    "Invalid type for group, must be one of List, ProcessGroup, DeviceMesh or (DeviceMesh, int), the name of a process "
    "group, or a phalanx.core.Group"
)


# ---- in eager mode ---------------------------------------------------------------------------------------------------


def find(group: GroupLike, tag: str = "") -> GroupState:
    """The state of a group. Not collective, unless a tag asks for a new process group.

    Raises:
        ValueError, AssertionError: It is no group of this rank; the text says why.
    """
    _library.loaded()
    if isinstance(group, Group):
        return _registry.state_of_core(group)
    if not dist.is_available():
        raise ValueError("there are no process groups: this torch was built without torch.distributed")
    if isinstance(group, str) and (dist.is_initialized() or _torch_compat.group_named(group) is not None):
        return _registry.state_named(group)
    process_group = process_group_of(group, tag)
    if tag and _torch_compat.is_registered(process_group) and _torch_compat.tag_of(process_group) != tag:
        process_group = _group_of_ranks(dist.get_process_group_ranks(process_group), tag)
    return _registry.state_of(process_group)


def ensure_initialized(state: GroupState, tensor: torch.Tensor) -> None:
    """Let the ranks of a group meet before the first collective on a CPU tensor, and on one of a GPU. Collective then.

    Raises:
        PhalanxError: The ranks could not meet.
    """
    if state.decided and (state.decided_on_gpus or not getattr(tensor, "is_cuda", False)):
        return
    if _torch_compat.is_tracing():
        return
    if getattr(tensor, "is_cpu", False):
        state.decide()
    elif getattr(tensor, "is_cuda", False):
        state.decide_on_gpus(tensor.device)


def process_group_of(group: Any, tag: str = "") -> dist.ProcessGroup:
    """The process group that a group argument means. Not collective, unless a tag asks for a new one.

    Args:
        group: A ProcessGroup, a one-dimensional DeviceMesh, (DeviceMesh, dim by its number or name), a list of global
            ranks, a list of lists of them, or None for the default process group.
        tag: With a list, tells groups of the same ranks apart.

    Raises:
        ValueError, AssertionError: It is no group of this rank; the text says why.

    Example:
        >>> process_group_of([0, 1]) is process_group_of(None) is group
        True
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if (group is None or isinstance(group, (str, list))) and not dist.is_initialized():
        raise ValueError("there are no process groups: call torch.distributed.init_process_group first")
    if group is None:
        return cast(dist.ProcessGroup, dist.group.WORLD)
    if isinstance(group, list):
        return _group_of_ranks(_own_ranks(group), tag)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise AssertionError(_NOT_1D)
        return group.get_group()
    if isinstance(group, tuple):
        if len(group) != 2 or not isinstance(group[0], DeviceMesh) or type(group[1]) not in (int, str):
            raise ValueError(f"{_TUPLE}, not {_kinds(group)}")
        mesh, dim = group
        if isinstance(dim, str):
            names = mesh.mesh_dim_names or ()
            if dim not in names:
                raise ValueError(f"(DeviceMesh, {dim!r}): the dims of the mesh have the names {list(names)}")
            dim = names.index(dim)
        if not -mesh.ndim <= dim < mesh.ndim:
            raise ValueError(f"(DeviceMesh, {dim}): the mesh has {mesh.ndim} dims, so the dim must be below that")
        return cast(dist.ProcessGroup, mesh.get_group(dim % mesh.ndim))
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group: new_group gave GroupMember.NON_GROUP_MEMBER")
    raise ValueError(f"{_ACCEPTED}, not {type(group).__name__}")


def _kinds(values: Sequence[Any]) -> str:
    return f"({', '.join(type(value).__name__ for value in values)})"


def _own_ranks(group: list[Any]) -> list[int]:
    """This rank's list among one or several lists of ranks."""
    nested = bool(group) and all(isinstance(each, list) for each in group)
    lists = group if nested else [group]
    if not all(lists) or not lists:
        raise ValueError("an empty list of ranks is no group: list at least the calling rank")
    for ranks in lists:
        if len(ranks) != len(lists[0]):
            raise ValueError(f"group sizes must be identical found {len(lists[0])} and {len(ranks)}")
    flat = [rank for ranks in lists for rank in ranks]
    if bad := [rank for rank in flat if type(rank) is not int]:
        raise ValueError(f"a list of ranks must hold ints only (or lists of ints only), not {bad[0]!r}")
    size = dist.get_world_size()
    if bad := [rank for rank in flat if not 0 <= rank < size]:
        raise ValueError(f"rank {bad[0]} does not exist: there are {size} ranks")
    if bad := sorted({rank for rank in flat if flat.count(rank) > 1}):
        raise ValueError(f"rank {bad[0]} is listed twice in {group}; list each rank once")
    me = dist.get_rank()
    for ranks in lists:
        if me in ranks:
            return list(ranks)
    raise ValueError(f"rank {me}, which is calling, is not in {group}; only the ranks of a group call its collectives")


def _group_of_ranks(ranks: list[int], tag: str) -> dist.ProcessGroup:
    found = _torch_compat.find_group(ranks, tag)
    if found is None and not tag:
        raise ValueError(
            f"no process group has just the ranks {ranks}: make one with torch.distributed.new_group({ranks}), or "
            "give a tag to have one made"
        )
    return found if found is not None else _torch_compat.make_group(ranks, tag)


# ---- what others use of torch's module, by its names there ----------------------------------------------------------

RANK_TYPES = GroupLike  # the name that torch has for it


def _expand_group(group: GroupLike, tag: str = "") -> tuple[str, list[int], int]:
    """The tag of a group, the global ranks of it (of all groups, for a list of lists), and its size. Not collective.

    As torch.distributed._functional_collectives._expand_group.

    Raises:
        ValueError, AssertionError: It is no group of this rank.
    """
    if isinstance(group, list):
        nested = bool(group) and isinstance(group[0], list)
        own = _own_ranks(group)
        return tag, [rank for ranks in cast(Any, group) for rank in ranks] if nested else own, len(own)
    process_group = process_group_of(_torch_compat.group_named(group) if isinstance(group, str) else group)
    ranks = list(_torch_compat.ranks_of(process_group))
    return tag or _torch_compat.tag_of(process_group), ranks, len(ranks)


def _resolve_group_name(group: GroupLike, tag: str = "") -> str:
    """The name by which ops find a group. Not collective, unless a tag asks for a new process group.

    As torch.distributed._functional_collectives._resolve_group_name.

    Raises:
        ValueError, AssertionError: It is no group of this rank.
    """
    return group if isinstance(group, str) else find(group, tag).op_name


# ---- while torch.compile traces --------------------------------------------------------------------------------------
# Dynamo follows the functions that are not constant, and guards on the group. Nothing is sent: the ranks meet when the
# graph runs first.


def traced_name(group: Any, tag: str) -> str:
    """The name of a group, for a graph."""
    if isinstance(group, str):
        return group
    if group is None:
        of_all: str = _name_of_default()
        return of_all
    if isinstance(group, Group):
        of_core: str = _name_of_core(group)
        return of_core
    if isinstance(group, list):
        listed: str = _name_of_ranks(tuple(tuple(each) if isinstance(each, list) else each for each in group), tag)
        return listed
    if isinstance(group, dist.ProcessGroup):
        name: str = group.group_name
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise AssertionError(_NOT_1D)
        name = group.get_group().group_name
    elif isinstance(group, tuple):
        if len(group) != 2 or not isinstance(group[0], DeviceMesh):
            raise ValueError(_TUPLE)
        name = group[0].get_group(group[1]).group_name
    else:
        raise ValueError(_ACCEPTED)
    tagged: str = _name_with_tag(name, tag) if tag else name
    return tagged


@_torch_compat.constant_in_graphs
def _name_of_ranks(ranks: tuple[Any, ...], tag: str) -> str:
    return find([list(each) if isinstance(each, tuple) else each for each in ranks], tag).name


@_torch_compat.constant_in_graphs
def _name_of_default() -> str:
    return find(None).name


@_torch_compat.constant_in_graphs
def _name_of_core(group: Group) -> str:
    return find(group).name


@_torch_compat.constant_in_graphs
def _name_with_tag(name: str, tag: str) -> str:
    group = _torch_compat.group_named(name)
    return name if group is None else find(group, tag).name


@_torch_compat.constant_in_graphs
def traced_size(name: str) -> int:
    """The size of a group, for a graph."""
    return _registry.state_named(name).size


@_torch_compat.constant_in_graphs
def own_rank(name: str) -> tuple[int, int]:
    """This rank's position in a group and the group's size, for a graph that only this rank runs."""
    state = _registry.state_named(name)
    return state.group_rank, state.size


# ---- public ----------------------------------------------------------------------------------------------------------


def enable_group(group: GroupLike, tag: str = "", *, device: torch.device | None = None) -> bool:
    """Let the ranks of a group meet now, instead of at its first collective on a CPU tensor.

    Collective among the ranks of the group the first time, for the CPU and for GPUs; later calls return at once.

    Args:
        group: A ProcessGroup, a one-dimensional DeviceMesh, (DeviceMesh, dim by its number or name), a list of global
            ranks, a list of lists of them (each rank takes part in the one that holds it), the name of a process group,
            a phalanx.core.Group, or None for the default process group.
        tag: With a list, tells groups of the same ranks apart; one that does not exist is made.
        device: A GPU of this rank: also find out whether the core serves tensors there. By default only of the CPU.

    Returns:
        True if the core serves it (tensors of that device). False if torch.distributed does: its ranks are on several
        hosts and there is no UCX, or the tensors are those of GPUs; the core cannot use the GPU of one; or the backend
        is none whose ranks are processes (fake, threaded). The same on every rank.

    Raises:
        ValueError, AssertionError: It is no group of this rank.
        UnsupportedError: Its ranks would meet while a stream of the GPU is captured.
        PhalanxError: The ranks could not meet.

    Example:
        >>> enable_group(group)
        True
    """
    state = find(group, tag)
    if device is not None and device.type == "cuda":
        if not state.decided_on_gpus:
            index = torch.cuda.current_device() if device.index is None else device.index
            state.decide_on_gpus(torch.device("cuda", index))
        return state.on_gpus
    if not state.decided:
        state.decide()
    return state.core is not None


def is_core_group(group: GroupLike, tag: str = "", *, device: torch.device | None = None) -> bool:
    """Whether the ranks of a group have met and the core serves it. Not collective.

    Args:
        group, tag, device: As for `enable_group`.

    Example:
        >>> enable_group(group) and is_core_group(group)
        True
    """
    state = find(group, tag)
    return state.on_gpus if device is not None and device.type == "cuda" else state.core is not None


def core_group(group: GroupLike, tag: str = "") -> Group | None:
    """The core's group behind a group, or None: torch.distributed serves it.

    Collective among the ranks of the group the first time, as `enable_group`. It is of no use any more when the process
    group was destroyed.

    Args:
        group, tag: As for `enable_group`.

    Example:
        >>> core_group(group).group_rank == rank
        True
    """
    enable_group(group, tag)
    return find(group, tag).core


def finalize() -> None:
    """Release all that this rank's collectives hold: shared memory, sockets, a thread. Not collective.

    It is done without this call for each process group when it is destroyed, and at the end of the process. A later
    collective lets the ranks meet again.

    Example:
        >>> finalize()
        >>> all_reduce(torch.ones(1), "sum", group)  # the ranks meet again
        AsyncCollectiveTensor(tensor([2.]))
    """
    _registry.release_rank()
