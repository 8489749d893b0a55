"""Memory pools on GPUs: those of torch, with segments of symmetric memory, by what torch has in public for this.

torch takes the segments from an allocator in C, which is in the library of the ops (core/torch/pool.cpp), as torch has
a lock when it asks for one. They are made in the world that the thread has entered with `use_mem_pool`. To which of
them a tensor belongs is found out when somebody asks about it: see `find` in _alloc.py.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from phalanx.core import UnsupportedError, World, load_torch_ops
from phalanx.symm_mem._context import RankContext

_worlds: list[World] = []  # that have had pools: each must live until its last segment is given back


def segment_number(address: int) -> int:
    """The number of the segment that begins at an address, never used again; 0 where none does."""
    ops = load_torch_ops()
    return int(ops.lib.phxt_pool_segment(ops.ffi.cast("void *", address)))


class CudaMemPool:
    """Symmetric memory of this rank that torch's tensors on a GPU are made of inside `use_mem_pool`. Not collective.

    As `MemPool`, but it is torch's: `torch_pool.snapshot()` lists its segments. Torch frees them when the pool is gone
    and no tensor lies in them, or with `torch.cuda.empty_cache()`. `register_allocator` does not concern it.

    Args:
        device: A GPU, with its index.
        context: The rank's.

    Attributes:
        device: The GPU.
        torch_pool: The torch.cuda.MemPool.

    Raises:
        UnsupportedError: This torch was built without CUDA.
    """

    def __init__(self, device: torch.device, context: RankContext) -> None:
        if torch.version.cuda is None:
            raise UnsupportedError("get_mem_pool: this torch was built without CUDA, so it has no memory pools there")
        ops = load_torch_ops()
        _worlds[:] = [world for world in _worlds if ops.lib.phxt_pool_count(world.pointer)]
        self.device = device
        self.context = context
        make: Any = torch.cuda.memory.CUDAPluggableAllocator
        self._allocator = make(str(ops.path), "phxt_pool_alloc", "phxt_pool_free")
        self.torch_pool: Any = torch.cuda.MemPool(self._allocator.allocator())
        _worlds.append(context.world)
        context.segment_number = segment_number

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """See `use_mem_pool`."""
        with torch.cuda.use_mem_pool(self.torch_pool, self.device), entered(self.context.world):
            yield

    def __repr__(self) -> str:
        return f"CudaMemPool(on {self.device})"


@contextlib.contextmanager
def entered(world: World) -> Iterator[None]:
    """Let the segments that torch asks for in this thread be memory of this world."""
    ops = load_torch_ops()
    before = ops.lib.phxt_pool_enter(world.pointer)
    try:
        yield
    finally:
        ops.lib.phxt_pool_enter(before)
