"""Statistics of the symmetric memory of a rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phalanx.core import MemoryCount
from phalanx.symm_mem import _cuda
from phalanx.symm_mem._handle import HANDLES, LIVE_HANDLES
from phalanx.symm_mem._state import Allocation, current


@dataclass(frozen=True)
class PersistentBlock:
    """A block that was allocated with an alloc id and not dropped.

    Attributes:
        alloc_id, group_name: As in `empty_strided_p2p`.
        device: Device type and index, such as ("cpu", 0).
        size_bytes: Size of the block.
        live: Whether a tensor of it is alive. Otherwise the block is idle, and retained for the next tensor.
        handles: Number of handles that it keeps.
    """

    alloc_id: int
    group_name: str | None
    device: tuple[str, int]
    size_bytes: int
    live: bool
    handles: int


class MemStats(MemoryCount):
    """A tuple (blocks, size_bytes) for all blocks of this rank, idle persistent blocks included.

    Attributes:
        blocks: Number of blocks.
        size_bytes: Sum of their sizes.
        by_device: The same for each device that has any, such as ("cuda", 1). Memory pools on GPUs are counted in the
            totals only.
        persistent: The persistent blocks, in the order of their alloc ids.
        handles: Number of handles of `rendezvous` that are alive. Handles live as long as their block.
        peer_size_bytes: Bytes of the blocks of other ranks that these handles have mapped, without signal pads; a block
            counts once for each group.
    """

    # Not in the tuple, as in os.stat_result: code that unpacks or compares the two numbers keeps working.
    by_device: Mapping[tuple[str, int], MemoryCount] = MappingProxyType({})
    persistent: tuple[PersistentBlock, ...] = ()
    handles: int = 0
    peer_size_bytes: int = 0

    @property
    def live_persistent_blocks(self) -> int:
        """Number of persistent blocks with a tensor that is alive."""
        return sum(block.live for block in self.persistent)

    @property
    def idle_persistent_blocks(self) -> int:
        """Number of persistent blocks without a tensor; `drop` frees such a block."""
        return len(self.persistent) - self.live_persistent_blocks

    def __repr__(self) -> str:
        return (
            f"MemStats(blocks={self.blocks}, size_bytes={self.size_bytes}, persistent={self.persistent}, "
            f"handles={self.handles}, peer_size_bytes={self.peer_size_bytes}, by_device={dict(self.by_device)})"
        )


def get_mem_stats() -> MemStats:
    """Statistics of what this rank has allocated and mapped. Not collective.

    Returns:
        A tuple (blocks, size_bytes) with further attributes: see `MemStats`.

    Example:
        >>> with rank_context():
        ...     tensor = empty(4)
        ...     get_mem_stats()[:]
        (1, 16)
    """
    context = current()
    if not context.has_world:
        return MemStats(0, 0)  # without making a world: the size of signal pads can still be set
    _cuda.drain()
    world = context.world
    with context.lock:
        handles = list(LIVE_HANDLES.of(context))
        allocations = list(context.allocations.values())
    blocks = []
    for each in allocations:
        if each.alloc_id is None:
            continue
        block = world.find(each.address)
        if block is not None and block.alloc_id == each.alloc_id:  # otherwise it was dropped meanwhile
            count = len(HANDLES.of(each).by_place)
            blocks.append(PersistentBlock(each.alloc_id, each.group_name, each.device, each.size, block.live, count))
    stats = MemStats(*world.mem_count())
    stats.by_device = _by_device(allocations)
    stats.persistent = tuple(sorted(blocks, key=lambda block: (block.alloc_id, block.group_name or "", block.device)))
    stats.handles = len(handles)
    mapped = {handle.symm: (handle.world_size - 1) * handle.buffer_size for handle in handles}  # views share a mapping
    stats.peer_size_bytes = sum(mapped.values())
    return stats


def _by_device(allocations: list[Allocation]) -> dict[tuple[str, int], MemoryCount]:
    counts: dict[tuple[str, int], MemoryCount] = {}
    for allocation in allocations:
        before = counts.get(allocation.device, MemoryCount(0, 0))
        counts[allocation.device] = MemoryCount(before.blocks + 1, before.size_bytes + allocation.size)
    return counts
