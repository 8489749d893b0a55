"""Memory pools on GPUs: those of torch, with segments of symmetric memory, by public functions of torch.

torch takes the segments from an allocator in C, which is in the library of the ops (core/torch/pool.cpp), as torch
holds a lock when it calls it. Segments are made in the world that the thread has entered with `use_mem_pool`. The
segment of a tensor is looked up when it is needed: see `find` in _allocation.py.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from phalanx.core import UnsupportedError, World, load_torch_ops
from phalanx.symm_mem._state import RankContext

_worlds: list[World] = []  # worlds with pools: each must live until its last segment is freed


def segment_number(address: int) -> int:
    """The number of the segment at an address; numbers are unique. 0 if there is none."""
    ops = load_torch_ops()
    return int(ops.lib.phxt_pool_segment(ops.ffi.cast("void *", address)))


class CudaMemPool:
    """Symmetric memory of this rank for torch's tensors on a GPU inside `use_mem_pool`. Not collective.

    As `MemPool`, but this is a pool of torch: `torch_pool.snapshot()` lists its segments. Torch frees them when the
    pool and all tensors in them are gone, or with `torch.cuda.empty_cache()`. `register_allocator` does not affect it.

    Args:
        device: A GPU, with its index.
        context: The context of the rank.

    Attributes:
        device: The GPU.
        torch_pool: The torch.cuda.MemPool.

    Raises:
        UnsupportedError: This torch was built without CUDA.
    """

    def __init__(self, device: torch.device, context: RankContext) -> None:
        if torch.version.cuda is None:
            raise UnsupportedError(
                "get_mem_pool: this torch was built without CUDA, so it has no memory pools for GPUs; install a "
                "torch with CUDA"
            )
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
    """Allocate the segments that torch requests in this thread in this world."""
    ops = load_torch_ops()
    before = ops.lib.phxt_pool_enter(world.pointer)
    try:
        yield
    finally:
        ops.lib.phxt_pool_enter(before)
