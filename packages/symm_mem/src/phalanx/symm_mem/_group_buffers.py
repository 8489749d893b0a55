"""Buffers that a group keeps from one call to the next: workspaces, staging, and memory for gathered tensors.

All of them grow by one rule: to the next power of two, from 64 KiB on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch

from phalanx.core import InvalidArgumentError, RevokedError
from phalanx.symm_mem._allocation import empty, with_index
from phalanx.symm_mem._handle import SymmetricMemory
from phalanx.symm_mem._process_group import RankGroup, resolve
from phalanx.symm_mem._rendezvous import rendezvous
from phalanx.symm_mem._state import Slot

_MIN_BYTES = 64 << 10


class GroupBuffers:
    """The buffers of one group, as this rank has them.

    Attributes:
        workspaces: The workspaces, by device type and index.
        staging: Host memory in which an op leaves its product for the other ranks.
        failure: The failure of a call in staging, after which the ranks may be out of step, or "".
        gathered: Ordinary host memory for a gathered tensor that only one call needs.
        copy_streams: The second stream of each GPU, for copies during matrix products.
    """

    def __init__(self) -> None:
        self.workspaces: dict[tuple[str, int], SymmetricMemory] = {}
        self.staging: SymmetricMemory | None = None
        self.failure = ""
        self.gathered: torch.Tensor | None = None
        self.copy_streams: dict[torch.device, torch.cuda.Stream] = {}


_buffers: Slot[GroupBuffers] = Slot(GroupBuffers)


def _grown(nbytes: int) -> int:
    return max(_MIN_BYTES, 1 << max(nbytes - 1, 0).bit_length())


def _symmetric(present: SymmetricMemory | None, nbytes: int, device: torch.device, group: str) -> SymmetricMemory:
    """Symmetric memory of at least so many bytes: the present one if it suffices. Collective if it must grow."""
    if present is not None and present.buffer_size >= nbytes:
        return present
    return rendezvous(empty(_grown(nbytes), dtype=torch.uint8, device=device), group)


def get_symm_mem_workspace(group_name: str, min_size: int, device: torch.device | str = "cpu") -> SymmetricMemory:
    """The workspace of a group, which grows as needed. Collective whenever it grows.

    As `torch.distributed._symmetric_memory.get_symm_mem_workspace`. Every caller may overwrite its contents: use it
    between two barriers.

    Args:
        group_name: A name given to `set_group_info`, or the name of a torch process group.
        min_size: The least size in bytes, the same on all ranks.
        device: Each device has a workspace of its own. "cuda" is the current GPU, which is the default of torch.

    Returns:
        A handle of at least so many bytes. It stays valid with its memory when the workspace grows.

    Raises:
        InvalidArgumentError: The size is negative.
        PhalanxError: As `rendezvous`.

    Example:
        >>> get_symm_mem_workspace(group.group_name, 1000).buffer_size >= 1000
        True
    """
    if min_size < 0:
        raise InvalidArgumentError(f"get_symm_mem_workspace: min_size is {min_size}; expected a number of bytes")
    buffers, place = _buffers.of(resolve(group_name, "get_symm_mem_workspace")), with_index(torch.device(device))
    key = place.type, place.index or 0
    workspace = buffers.workspaces[key] = _symmetric(buffers.workspaces.get(key), min_size, place, group_name)
    return workspace


@contextmanager
def staging_of(members: RankGroup, nbytes: int, call: str) -> Iterator[SymmetricMemory]:
    """Use the staging of a group for one collective in which no rank returns while others read. Collective if it grows.

    Raises:
        RevokedError: An earlier call failed within, so that the ranks may be out of step.
        PhalanxError: As `rendezvous`.
    """
    buffers = _buffers.of(members)
    if buffers.failure:
        raise RevokedError(
            f"{call} on group {members.name!r}: an earlier call failed, so the ranks may be out of step; make a new "
            f"group. The first failure was: {buffers.failure}",
            group=members.name,
        )
    staging = buffers.staging = _symmetric(buffers.staging, nbytes, torch.device("cpu"), members.name)
    try:
        yield staging
    except BaseException as error:
        buffers.failure = f"{call}: {type(error).__name__}: {error}"
        raise


def gathered_memory(members: RankGroup, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Ordinary host memory for a tensor that is needed only until the next call on the group."""
    buffers, nbytes = _buffers.of(members), prod(shape) * dtype.itemsize
    if buffers.gathered is None or buffers.gathered.numel() < nbytes:
        buffers.gathered = torch.empty(_grown(nbytes), dtype=torch.uint8)
    return buffers.gathered[:nbytes].view(dtype).view(tuple(shape))


def copy_stream(members: RankGroup, device: torch.device) -> torch.cuda.Stream:
    """The second stream of a group on a GPU, for copies during matrix products."""
    streams = _buffers.of(members).copy_streams
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]
