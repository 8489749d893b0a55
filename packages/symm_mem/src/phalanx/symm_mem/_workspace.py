"""Symmetric memory of a group for whoever has none of their own for a moment."""

import torch

from phalanx.core import InvalidArgumentError
from phalanx.symm_mem._alloc import empty, with_index
from phalanx.symm_mem._groups import RankGroup, resolve
from phalanx.symm_mem._handle import SymmetricMemory
from phalanx.symm_mem._rendezvous import rendezvous

_SMALLEST = 64 << 10


def get_symm_mem_workspace(group_name: str, min_size: int, device: torch.device | str = "cpu") -> SymmetricMemory:
    """The workspace of a group, which grows to what is asked for. Collective whenever it grows.

    As `torch.distributed._symmetric_memory.get_symm_mem_workspace`. Its contents belong to whoever asked last: use it
    between two barriers.

    Args:
        group_name: Of a group of `set_group_info`, or of a torch process group.
        min_size: Bytes that are needed, alike on all ranks.
        device: Where; each has a workspace of its own. "cuda" is the current GPU, which is what torch's takes.

    Returns:
        A handle of at least so many bytes. It stays valid when the workspace grows, with the memory that it had.

    Raises:
        InvalidArgumentError: The size is negative.
        PhalanxError: As `rendezvous`.
    """
    if min_size < 0:
        raise InvalidArgumentError(f"get_symm_mem_workspace: min_size is {min_size}; give a number of bytes")
    members: RankGroup = resolve(group_name)
    place = with_index(torch.device(device))
    found = members.workspaces.get((place.type, place.index or 0))
    if found is None or found.buffer_size < min_size:
        size = _SMALLEST
        while size < min_size:
            size *= 2
        found = rendezvous(empty(size, dtype=torch.uint8, device=place), group_name)
        members.workspaces[place.type, place.index or 0] = found
    return found
