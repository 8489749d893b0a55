"""What a rank's symmetric memory amounts to."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phalanx.core import MemoryCount
from phalanx.symm_mem import _streams
from phalanx.symm_mem._alloc import Allocation
from phalanx.symm_mem._context import current


@dataclass(frozen=True)
class PersistentBlock:
    """A block that was allocated with an alloc id and not dropped.

    Attributes:
        alloc_id: As in `empty_strided_p2p`.
        group_name: As there.
        device: Such as ("cpu", 0).
        size_bytes: Of the block.
        live: Whether a tensor of it is alive. Otherwise it is idle, and waits for the next one.
        handles: How many handles it keeps.
    """

    alloc_id: int
    group_name: str | None
    device: tuple[str, int]
    size_bytes: int
    live: bool
    handles: int


class MemStats(MemoryCount):
    """A tuple (blocks, size_bytes) of all that this rank has allocated, idle persistent blocks included.

    Attributes:
        blocks: How many there are.
        size_bytes: Their sizes added up.
        by_device: Of each device that has any, such as ("cuda", 1), how many there are, and their sizes added up.
            Memory pools on GPUs are counted in the whole alone.
        persistent: The persistent ones among them, in the order of their alloc ids.
        handles: How many handles of `rendezvous` are alive. One of a block is kept for as long as the block.
        peer_size_bytes: Bytes of the blocks of other ranks that these handles have mapped, without signal pads; a
            block counts once for each group.
    """

    # Beside the tuple, as in os.stat_result: what unpacks the two numbers or compares them goes on.
    by_device: Mapping[tuple[str, int], MemoryCount] = MappingProxyType({})
    persistent: tuple[PersistentBlock, ...] = ()
    handles: int = 0
    peer_size_bytes: int = 0

    @property
    def live_persistent_blocks(self) -> int:
        """How many persistent blocks have a tensor that is alive."""
        return sum(block.live for block in self.persistent)

    @property
    def idle_persistent_blocks(self) -> int:
        """How many persistent blocks have none; `drop` frees such a block."""
        return len(self.persistent) - self.live_persistent_blocks

    def __repr__(self) -> str:
        return (
            f"MemStats(blocks={self.blocks}, size_bytes={self.size_bytes}, persistent={self.persistent}, "
            f"handles={self.handles}, peer_size_bytes={self.peer_size_bytes}, by_device={dict(self.by_device)})"
        )


def get_mem_stats() -> MemStats:
    """What this rank has allocated and mapped. Not collective.

    Returns:
        A tuple (blocks, size_bytes) with more attributes: see `MemStats`.
    """
    context = current()
    if not context.has_world:
        return MemStats(0, 0)  # and the size of signal pads can still be set
    _streams.drain()
    world = context.world
    with context.lock:
        handles = list(context.handles)
        allocations = list(context.allocations.values())
    blocks = []
    for each, alloc_id in [(each, each.alloc_id) for each in allocations if each.alloc_id is not None]:
        found = world.find(each.address)
        if found is not None and found.alloc_id == alloc_id:  # otherwise it has been dropped meanwhile
            handle_count = len(each.handles)
            blocks.append(PersistentBlock(alloc_id, each.group_name, each.device, each.size, found.live, handle_count))
    stats = MemStats(*world.mem_count())
    stats.by_device = _by_device(allocations)
    stats.persistent = tuple(sorted(blocks, key=lambda block: (block.alloc_id, block.group_name or "", block.device)))
    stats.handles = len(handles)
    mapped = {handle.symm: (handle.world_size - 1) * handle.buffer_size for handle in handles}  # views share a mapping
    stats.peer_size_bytes = sum(mapped.values())
    return stats


def _by_device(allocations: list[Allocation]) -> dict[tuple[str, int], MemoryCount]:
    counts: dict[tuple[str, int], MemoryCount] = {}
    for each in allocations:
        before = counts.get(each.device, MemoryCount(0, 0))
        counts[each.device] = MemoryCount(before.blocks + 1, before.size_bytes + each.size)
    return counts
