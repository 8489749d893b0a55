"""All the forms of a group argument, and the state of the group that each means."""

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

_ACCEPTED = (
    "pass a ProcessGroup such as torch.distributed.group.WORLD, a one-dimensional DeviceMesh, (DeviceMesh, dim), a "
    "list of global ranks, the name of a process group, a phalanx.core.Group, or None for the default group"
)
_NO_GROUPS = "there are no process groups; call torch.distributed.init_process_group first"


# ---- in eager mode ---------------------------------------------------------------------------------------------------


def find(group: GroupLike, tag: str, operation: str) -> GroupState:
    """The state of a group. Not collective, unless a tag asks for a new process group.

    Args:
        group, tag, operation: As for `process_group_of`.

    Raises:
        ValueError, AssertionError: The argument names no group of this rank; the text says why.
    """
    _library.loaded()
    if isinstance(group, Group):
        return _registry.state_of_core(group)
    if not dist.is_available():
        raise ValueError(
            f"{operation}: there are no process groups, because this torch was built without torch.distributed; "
            "install a torch that has it, or pass a phalanx.core.Group"
        )
    if isinstance(group, str) and (dist.is_initialized() or _torch_compat.group_named(group) is not None):
        return _registry.state_named(group, operation)
    process_group = process_group_of(group, tag, operation=operation)
    if tag and _torch_compat.is_registered(process_group) and _torch_compat.tag_of(process_group) != tag:
        process_group = _group_of_ranks(dist.get_process_group_ranks(process_group), tag, operation)
    return _registry.state_of(process_group, operation=operation)


def ensure_initialized(state: GroupState, tensor: torch.Tensor) -> None:
    """Connect the ranks of a group before its first collective on a CPU tensor, and before its first on a GPU tensor.
    Collective then.

    Raises:
        PhalanxError: The ranks could not connect.
    """
    if state.decided and (state.decided_on_gpus or not getattr(tensor, "is_cuda", False)):
        return
    if _torch_compat.is_tracing():
        return
    if getattr(tensor, "is_cpu", False):
        state.decide()
    elif getattr(tensor, "is_cuda", False):
        state.decide_on_gpus(tensor.device)


def process_group_of(group: Any, tag: str = "", *, operation: str = "process_group_of") -> dist.ProcessGroup:
    """The process group that a group argument means. Not collective, unless a tag asks for a new one.

    Args:
        group: A ProcessGroup, a one-dimensional DeviceMesh, (DeviceMesh, dim by its number or name), a list of global
            ranks, a list of lists of them, or None for the default process group.
        tag: With a list, tells groups of the same ranks apart.
        operation: The name of the function that was called, with which the texts of errors begin.

    Raises:
        ValueError: The argument names no group of this rank; the text says why.
        AssertionError: It is a mesh of several dims.

    Example:
        >>> process_group_of([0, 1]) is process_group_of(None) is group
        True
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if (group is None or isinstance(group, (str, list))) and not dist.is_initialized():
        raise ValueError(f"{operation}: {_NO_GROUPS}")
    if group is None:
        return cast(dist.ProcessGroup, dist.group.WORLD)
    if isinstance(group, list):
        return _group_of_ranks(_own_ranks(group, operation), tag, operation)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise AssertionError(
                f"{operation}: the group is a DeviceMesh of {group.ndim} dims; pass (mesh, dim), or a mesh of one dim: "
                "mesh['name']"
            )
        return group.get_group()
    if isinstance(group, tuple):
        if len(group) != 2 or not isinstance(group[0], DeviceMesh) or type(group[1]) not in (int, str):
            kinds = ", ".join(type(value).__name__ for value in group)
            raise ValueError(f"{operation}: a tuple as group must be (DeviceMesh, dim), not ({kinds})")
        mesh, dim = group
        if isinstance(dim, str):
            names = mesh.mesh_dim_names or ()
            if dim not in names:
                raise ValueError(
                    f"{operation}: the group is (DeviceMesh, {dim!r}), and the dims of the mesh have the names "
                    f"{list(names)}; pass one of them, or the number of a dim"
                )
            dim = names.index(dim)
        if not -mesh.ndim <= dim < mesh.ndim:
            raise ValueError(
                f"{operation}: the group is (DeviceMesh, {dim}), and the mesh has {mesh.ndim} dims; the dim must be "
                f"from {-mesh.ndim} to {mesh.ndim - 1}"
            )
        return cast(dist.ProcessGroup, mesh.get_group(dim % mesh.ndim))
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{operation}: this rank is not in the group: torch.distributed.new_group returned "
            "GroupMember.NON_GROUP_MEMBER; call it only on the ranks that are in the group"
        )
    raise ValueError(f"{operation}: {type(group).__name__} is not a valid type for a group; {_ACCEPTED}")


def _own_ranks(group: list[Any], operation: str) -> list[int]:
    """This rank's list among one or several lists of ranks."""
    nested = bool(group) and all(isinstance(each, list) for each in group)
    lists = group if nested else [group]
    if not all(lists) or not lists:
        raise ValueError(f"{operation}: the list of ranks {group} is empty; list at least the calling rank")
    for ranks in lists:
        if len(ranks) != len(lists[0]):
            raise ValueError(
                f"{operation}: all lists of ranks must have the same length, and {group} has lists of "
                f"{len(lists[0])} and {len(ranks)} ranks"
            )
    flat = [rank for ranks in lists for rank in ranks]
    if bad := [rank for rank in flat if type(rank) is not int]:
        raise ValueError(f"{operation}: a list of ranks must hold only ints, or only lists of ints, not {bad[0]!r}")
    size = dist.get_world_size()
    if bad := [rank for rank in flat if not 0 <= rank < size]:
        raise ValueError(f"{operation}: rank {bad[0]} does not exist; the ranks are 0 to {size - 1}")
    if bad := sorted({rank for rank in flat if flat.count(rank) > 1}):
        raise ValueError(f"{operation}: rank {bad[0]} is listed twice in {group}; list each rank once")
    me = dist.get_rank()
    for ranks in lists:
        if me in ranks:
            return list(ranks)
    raise ValueError(
        f"{operation}: the calling rank {me} is not in {group}; only the ranks of a group may call its collectives"
    )


def _group_of_ranks(ranks: list[int], tag: str, operation: str) -> dist.ProcessGroup:
    found = _torch_compat.find_group(ranks, tag)
    if found is None and not tag:
        raise ValueError(
            f"{operation}: no process group has exactly the ranks {ranks}; make one with "
            f"torch.distributed.new_group({ranks}), or give a tag, for which one is made"
        )
    return found if found is not None else _torch_compat.make_group(ranks, tag)


# ---- names of torch's module that other code uses -------------------------------------------------------------------

RANK_TYPES = GroupLike  # the name that torch has for it


def _expand_group(group: GroupLike, tag: str = "") -> tuple[str, list[int], int]:
    """The tag of a group, the global ranks of it (of all groups, for a list of lists), and its size. Not collective.

    As torch.distributed._functional_collectives._expand_group.

    Raises:
        ValueError, AssertionError: The argument names no group of this rank.
    """
    operation = "_expand_group"
    if isinstance(group, list):
        nested = bool(group) and isinstance(group[0], list)
        own = _own_ranks(group, operation)
        return tag, [rank for ranks in cast(Any, group) for rank in ranks] if nested else own, len(own)
    named = _torch_compat.group_named(group) if isinstance(group, str) else group
    process_group = process_group_of(named, operation=operation)
    ranks = list(_torch_compat.ranks_of(process_group))
    return tag or _torch_compat.tag_of(process_group), ranks, len(ranks)


def _resolve_group_name(group: GroupLike, tag: str = "") -> str:
    """The name by which ops find a group. Not collective, unless a tag asks for a new process group.

    As torch.distributed._functional_collectives._resolve_group_name.

    Raises:
        ValueError, AssertionError: The argument names no group of this rank.
    """
    return group if isinstance(group, str) else find(group, tag, "_resolve_group_name").op_name


# ---- while torch.compile traces --------------------------------------------------------------------------------------
# Dynamo follows the functions that are not constant, and guards on the group. Nothing is sent: the ranks meet when the
# graph runs first.


def traced_name(group: Any, tag: str, operation: str) -> str:
    """The name of a group, for a graph."""
    if isinstance(group, str):
        return group
    if group is None or isinstance(group, (Group, list)):
        return _name_of(group, tag if isinstance(group, list) else "", operation)
    if isinstance(group, dist.ProcessGroup):
        name: str = group.group_name
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise AssertionError(f"{operation}: the group is a DeviceMesh of several dims; pass (mesh, dim)")
        name = group.get_group().group_name
    elif isinstance(group, tuple):
        if len(group) != 2 or not isinstance(group[0], DeviceMesh):
            raise ValueError(f"{operation}: a tuple as group must be (DeviceMesh, dim)")
        name = group[0].get_group(group[1]).group_name
    else:
        raise ValueError(f"{operation}: the group has no valid type; {_ACCEPTED}")
    return _name_with_tag(name, tag, operation) if tag else name


@_torch_compat.constant_in_graphs
def _name_of(group: GroupLike, tag: str, operation: str) -> str:
    return find(group, tag, operation).name


@_torch_compat.constant_in_graphs
def _name_with_tag(name: str, tag: str, operation: str) -> str:
    group = _torch_compat.group_named(name)
    return name if group is None else find(group, tag, operation).name


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
    """Connect the ranks of a group now, instead of at its first collective on a CPU tensor.

    Collective among the ranks of the group the first time, for the CPU and for GPUs; later calls return at once.

    Args:
        group: A ProcessGroup, a one-dimensional DeviceMesh, (DeviceMesh, dim by its number or name), a list of global
            ranks, a list of lists of them (each rank takes part in the one that holds it), the name of a process group,
            a phalanx.core.Group, or None for the default process group.
        tag: With a list, tells groups of the same ranks apart; one that does not exist is made.
        device: A GPU of this rank: also find out whether the core serves tensors there. By default only of the CPU.

    Returns:
        True if the core serves tensors of that device. False if torch.distributed serves them: the ranks are on several
        hosts and there is no UCX, or the tensors are on GPUs; the core cannot use the GPU of a rank; or the ranks of
        the backend are not processes (fake, threaded). The same on every rank.

    Raises:
        ValueError, AssertionError: The argument names no group of this rank.
        UnsupportedError: The ranks would connect while a stream of the GPU is captured.
        PhalanxError: The ranks could not connect.

    Example:
        >>> enable_group(group)
        True
    """
    state = find(group, tag, "enable_group")
    if device is not None and device.type == "cuda":
        if not state.decided_on_gpus:
            index = torch.cuda.current_device() if device.index is None else device.index
            state.decide_on_gpus(torch.device("cuda", index))
        return state.on_gpus
    if not state.decided:
        state.decide()
    return state.core is not None


def is_core_group(group: GroupLike, tag: str = "", *, device: torch.device | None = None) -> bool:
    """Whether the ranks of a group are connected and the core serves it. Not collective.

    Args:
        group, tag, device: As for `enable_group`.

    Raises:
        ValueError, AssertionError: As for `enable_group`.

    Example:
        >>> enable_group(group) and is_core_group(group)
        True
    """
    state = find(group, tag, "is_core_group")
    return state.on_gpus if device is not None and device.type == "cuda" else state.core is not None


def core_group(group: GroupLike, tag: str = "") -> Group | None:
    """The core's group behind a group, or None if torch.distributed serves the group.

    Collective among the ranks of the group the first time, as `enable_group`. Do not use the result after the process
    group was destroyed.

    Args:
        group, tag: As for `enable_group`.

    Raises:
        ValueError, AssertionError, PhalanxError: As for `enable_group`.

    Example:
        >>> core_group(group).group_rank == rank
        True
    """
    enable_group(group, tag)
    return find(group, tag, "core_group").core


def finalize() -> None:
    """Release all that this rank's collectives hold: shared memory, sockets, a thread. Not collective.

    Without this call the same is done for each process group when it is destroyed, and for all at the end of the
    process. A later collective connects the ranks again.

    Example:
        >>> finalize()
        >>> all_reduce(torch.ones(1), "sum", group)  # the ranks connect again
        AsyncCollectiveTensor(tensor([2.]))
    """
    _registry.release_rank()
