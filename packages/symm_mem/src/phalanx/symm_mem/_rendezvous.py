"""Rendezvous: the ranks of a group map each other's blocks."""

import torch

from phalanx.collectives import GroupLike
from phalanx.core import InvalidArgumentError, NotFoundError, PhalanxError, Symm
from phalanx.symm_mem import _streams
from phalanx.symm_mem._alloc import Allocation, find
from phalanx.symm_mem._context import current
from phalanx.symm_mem._groups import RankGroup, resolve
from phalanx.symm_mem._handle import SymmetricMemory


def rendezvous(tensor: torch.Tensor, group: GroupLike | None = None, *, timeout_ms: int = 0) -> SymmetricMemory:
    """Map the memory that a tensor lies in on every rank of a group.

    Collective among the ranks of the group the first time that this memory meets this group: each
    rank gives a tensor of its own, in a block with the same number of bytes. After that it returns
    the same handle at once. As `torch.distributed._symmetric_memory.rendezvous`.

    Args:
        tensor: Made by `empty` or `empty_strided_p2p`, or a view of such a one. A view gives a
            handle with the view's `offset`; handles of one block share their signals.
        group: The name given to `set_group_info`, or what `phalanx.collectives` takes as a group, but a core group.
            None: the group that the tensor was allocated for.
        timeout_ms: How long to wait for the other ranks, in milliseconds; 0 is the default of the rank context, or else
            of the process group, or five minutes.

    Returns:
        The handle.

    Raises:
        InvalidArgumentError: The tensor is ordinary memory, or no group was given.
        NotFoundError: There is no such group.
        MismatchError: The ranks' blocks differ; the text, on every rank, names the odd one.
        WaitTimeoutError: Ranks did not come; the text names them. The group is of no use after it.
        UnsupportedError: The ranks share no memory, such as those of different hosts; or a stream is being captured.
    """
    allocation, offset = _allocation_of("rendezvous", tensor)
    members = resolve(_group_of("rendezvous", allocation, group))
    handle = allocation.handles.get((members, offset))
    if handle is not None:
        return handle
    _streams.refuse_capture("rendezvous", tensor.device, "ranks cannot meet then; do it before")
    try:
        symm = members.meet(current(), timeout_ms).rendezvous(allocation.address, timeout_ms)
    except PhalanxError as error:
        members.in_global_ranks(error)
        raise
    return _kept(allocation, members, symm, offset)


def get_symmetric_memory(tensor: torch.Tensor, group: GroupLike | None = None) -> SymmetricMemory:
    """The handle that an earlier `rendezvous` of this memory with this group gave. Not collective.

    Args:
        tensor, group: As in `rendezvous`.

    Raises:
        NotFoundError: There was no rendezvous, or there is no such group.
        InvalidArgumentError: The tensor is ordinary memory, or no group was given.
    """
    allocation, offset = _allocation_of("get_symmetric_memory", tensor)
    members = resolve(_group_of("get_symmetric_memory", allocation, group))
    handle = allocation.handles.get((members, offset))
    if handle is not None:
        return handle
    core_group = members.met()
    symm = None if core_group is None else core_group.find_symm(allocation.address)
    if symm is None:
        raise NotFoundError(
            "must invoke rendezvous on a tensor before calling get_symmetric_memory on it "
            f"(this one has had none with group {members.name!r})",
            group=members.name,
        )
    return _kept(allocation, members, symm, offset)  # another view of the block had the rendezvous


def _kept(allocation: Allocation, members: RankGroup, symm: Symm, offset: int) -> SymmetricMemory:
    """The handle of this place of a block, which another thread may have made meanwhile."""
    order = allocation.orders.setdefault(members, _streams.Order())
    made = SymmetricMemory(members, symm, allocation.device, offset, order)
    handle = allocation.handles.setdefault((members, offset), made)
    if handle is made:
        context = current()
        with context.lock:
            context.handles.add(handle)
    return handle


def _allocation_of(operation: str, tensor: torch.Tensor) -> tuple[Allocation, int]:
    found = find(tensor)
    if found is None:
        raise InvalidArgumentError(
            f"{operation}: the tensor ({list(tensor.shape)}, {tensor.dtype}, {tensor.device}) is ordinary memory, not "
            "symmetric memory of this rank; allocate it with phalanx.symm_mem.empty"
        )
    return found


def _group_of(operation: str, allocation: Allocation, group: GroupLike | None) -> GroupLike:
    wish = allocation.group_name if group is None else group
    if wish is None:
        raise InvalidArgumentError(
            f"{operation}: the tensor was allocated without a group_name, so a group must be given"
        )
    return wish
