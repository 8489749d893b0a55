"""Rendezvous: the ranks of a group map each other's blocks."""

import torch

from phalanx.collectives import GroupLike, c10d
from phalanx.core import InvalidArgumentError, NotFoundError, PhalanxError, Symm, ffi
from phalanx.symm_mem import _cuda
from phalanx.symm_mem._allocation import find
from phalanx.symm_mem._handle import HANDLES, LIVE_HANDLES, SymmetricMemory
from phalanx.symm_mem._process_group import RankGroup, resolve
from phalanx.symm_mem._state import Allocation, current


def rendezvous(tensor: torch.Tensor, group: GroupLike | None = None, *, timeout_ms: int = 0) -> SymmetricMemory:
    """Map the memory of a tensor on every rank of a group.

    Collective among the ranks of the group the first time for this memory and this group: each rank gives a tensor of
    its own, in a block with the same number of bytes. Later calls return the same handle at once. As
    `torch.distributed._symmetric_memory.rendezvous`.

    Args:
        tensor: A tensor of `empty` or `empty_strided_p2p`, or a view of one. A view gives a handle with the `offset` of
            the view; handles of one block share their signals.
        group: The name given to `set_group_info`, or any form of a group that `phalanx.collectives` takes except a core
            group. None is the group that the tensor was allocated for.
        timeout_ms: The timeout in milliseconds; 0 is the default of the rank context, or else of the process group, or
            five minutes.

    Returns:
        The handle.

    Raises:
        InvalidArgumentError: The tensor is ordinary memory, or no group was given.
        NotFoundError: There is no such group.
        MismatchError: The blocks of the ranks differ; the text, on every rank, names the one that differs.
        WaitTimeoutError: Ranks did not call it in time; the text names them. The group is unusable afterwards.
        UnsupportedError: The ranks share no memory, such as ranks on different hosts; or a stream is being captured.

    Example:
        >>> handle = rendezvous(empty(4), group)
        >>> handle.world_size, handle.buffer_size
        (2, 16)
    """
    allocation, offset, members = _located("rendezvous", tensor, group)
    handle = HANDLES.of(allocation).by_place.get((members, offset))
    if handle is not None:
        return handle
    _cuda.refuse_capture("rendezvous", tensor.device, "ranks cannot connect during a capture; call it before")
    try:
        symm = members.initialize(current(), timeout_ms).rendezvous(allocation.address, timeout_ms)
    except PhalanxError as error:
        members.with_global_ranks(error)
        raise
    return _handle(allocation, members, symm, offset)


def rendezvous_by_name(tensor: torch.Tensor, group_name: str | None = None) -> SymmetricMemory:
    """`rendezvous` with the arguments of torch's `_SymmetricMemory.rendezvous`. Collective as that.

    Args:
        tensor: As for `phalanx.symm_mem.rendezvous`.
        group_name: The name of the group; None for the group that the tensor was allocated for.

    Returns:
        The handle.

    Raises:
        PhalanxError: As for `phalanx.symm_mem.rendezvous`.
    """
    return rendezvous(tensor, group_name)


def get_symmetric_memory(tensor: torch.Tensor, group: GroupLike | None = None) -> SymmetricMemory:
    """The handle of an earlier `rendezvous` of this memory with this group. Not collective.

    Args:
        tensor, group: As in `rendezvous`.

    Raises:
        NotFoundError: There was no rendezvous, or there is no such group.
        InvalidArgumentError: The tensor is ordinary memory, or no group was given.

    Example:
        >>> tensor = empty(4)
        >>> handle = rendezvous(tensor, group)
        >>> get_symmetric_memory(tensor, group) is handle
        True
    """
    allocation, offset, members = _located("get_symmetric_memory", tensor, group)
    handle = HANDLES.of(allocation).by_place.get((members, offset))
    if handle is not None:
        return handle
    core_group = members.initialized()
    symm = None if core_group is None else core_group.find_symm(allocation.address)
    if symm is None:
        raise NotFoundError(
            f"get_symmetric_memory: this tensor had no rendezvous with group {members.name!r}; call "
            "rendezvous(tensor, group) first, on all ranks of the group",
            group=members.name,
        )
    return _handle(allocation, members, symm, offset)  # the rendezvous was of another view of the block


def _handle(allocation: Allocation, members: RankGroup, symm: Symm, offset: int) -> SymmetricMemory:
    """The handle for this offset in a block, which another thread may have made before."""
    handles = HANDLES.of(allocation)
    order = handles.orders.setdefault(members, _cuda.StreamOrder())
    new = SymmetricMemory(members, symm, allocation.device, offset, order)
    handle = handles.by_place.setdefault((members, offset), new)
    if handle is new:
        context = current()
        with context.lock:
            LIVE_HANDLES.of(context).add(handle)
    return handle


class _WindowMemory:
    """What windows of the backend `phalanx` need of this package."""

    def block(self, tensor: torch.Tensor) -> tuple[int, int]:
        place = find(tensor, "window.tensor_register")
        return (0, 0) if place is None else (place[0].address, int(ffi.cast("uintptr_t", current().world.pointer)))


c10d.set_symmetric_memory(_WindowMemory())


def _located(operation: str, tensor: torch.Tensor, group: GroupLike | None) -> tuple[Allocation, int, RankGroup]:
    """The allocation of a tensor, the tensor's offset in it, and the group that is meant."""
    place = find(tensor, operation)
    if place is None:
        raise InvalidArgumentError(
            f"{operation}: the tensor ({list(tensor.shape)}, {tensor.dtype}, {tensor.device}) is ordinary memory, not "
            "symmetric memory of this rank; allocate it with phalanx.symm_mem.empty"
        )
    wish = place[0].group_name if group is None else group
    if wish is None:
        raise InvalidArgumentError(
            f"{operation}: no group was given, and the tensor was allocated without a group_name; give a group, such "
            "as torch.distributed.group.WORLD"
        )
    return place[0], place[1], resolve(wish, operation)
