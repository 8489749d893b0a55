"""Memory pools: inside a `with`, whatever torch allocates on the CPU is symmetric memory::

    pool = symm_mem.get_mem_pool()
    with symm_mem.use_mem_pool(pool):
        hidden = relu(x @ up)                            # made by torch's own ops
    torch.ops.phalanx.two_shot_all_reduce_(hidden, "sum", group_name)

A pool takes segments of symmetric memory, from 2 MiB on, and gives pieces of them to torch, aligned to 64 bytes. A
segment meets each group once, at the first rendezvous of any tensor in it; after that a tensor's handle costs no
communication.

A handle says where this rank's tensor is in the segment, and ops look for the peers' at the same place. So, as
with any symmetric memory, the ranks must allocate alike: the same sizes in the same order, and free in the same order,
inside the `with`. Places follow from that alone. What only some ranks do (printing, checking) belongs outside of
the `with`. `MemPool.layout` tells whether they did.

heap.cpp      which pieces of the segments are free
pools.cpp     the pools, and torch's CPU allocator in front of them
module.cpp    both for Python
_build.py     compiles them
cuda.py       pools on GPUs, which are torch's
"""

import functools
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from phalanx.core import InvalidArgumentError, OutOfMemoryError, UnsupportedError
from phalanx.symm_mem._alloc import empty, with_index
from phalanx.symm_mem._allocators import Allocator, get_allocator
from phalanx.symm_mem._context import RankContext, current
from phalanx.symm_mem._pool import _build
from phalanx.symm_mem._pool.cuda import CudaMemPool


class PoolSegment(NamedTuple):
    """One block of symmetric memory of a pool.

    Attributes:
        address: Of its first byte.
        total_bytes: Of the block.
        used_bytes: In the hands of torch, rounded up to 64 for each storage.
    """

    address: int
    total_bytes: int
    used_bytes: int


class MemPool:
    """Symmetric memory of this rank that torch's CPU tensors are made of inside `use_mem_pool`. Not collective.

    The first pool of a process compiles a small library if it is not there (a quarter of a minute, once on a host),
    and puts an allocator in front of torch's. Outside of `use_mem_pool` that one calls the previous allocator, at the
    price of reading one variable of the thread.

    The pool keeps its segments until it dies. A segment in which a tensor lies then lives on until the last one is
    gone. It belongs to the rank context in which it was made, and takes its segments from the allocator registered
    there for "cpu".

    Raises:
        UnsupportedError: There is no compiler, or something else took the place of the allocator; says what to do.
    """

    def __init__(self) -> None:
        native = _build.module()
        if not native.install():
            raise UnsupportedError(
                "torch's CPU allocator was replaced by other code in this process, so memory pools cannot serve it; "
                "make the pool after that, or allocate with phalanx.symm_mem.empty"
            )
        context = current()
        self._native = native
        self._context = weakref.ref(context)  # which may hold the pool
        self._pool: Any = native.Pool(functools.partial(_segment, self._context))

    @property
    def device(self) -> torch.device:
        """Where its memory is."""
        return torch.device("cpu")

    @property
    def segments(self) -> list[PoolSegment]:
        """Its blocks, in the order in which they were made."""
        return [PoolSegment(*each) for each in self._pool.segments()]

    @property
    def reserved_bytes(self) -> int:
        """Of all segments."""
        return sum(each.total_bytes for each in self.segments)

    @property
    def used_bytes(self) -> int:
        """In the hands of torch, rounded up to 64 for each storage."""
        return sum(each.used_bytes for each in self.segments)

    def layout(self) -> int:
        """A number of 64 bits that says which pieces of which segments are taken. Not collective.

        Ranks that got the same number have their tensors at the same places, and will have the next ones there if
        they go on alike.
        """
        return int(self._pool.layout())

    def trim(self) -> None:
        """Free the segments in which no tensor lies. Not collective, but to be called by all ranks alike."""
        self._pool.trim()

    def __repr__(self) -> str:
        return f"MemPool({len(self.segments)} segments, {self.used_bytes} of {self.reserved_bytes} bytes in use)"


_pools: weakref.WeakKeyDictionary[RankContext, MemPool] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # of short sections
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def get_mem_pool(device: torch.device | str = "cpu") -> "MemPool | CudaMemPool":
    """The memory pool of this rank. Not collective.

    As `torch.distributed._symmetric_memory.get_mem_pool`, which has none for CPU.

    Args:
        device: "cpu" or "cuda".

    Returns:
        The same pool at each call; it ends with the rank context (`finalize`). `MemPool()` makes another one for CPU.

    Raises:
        UnsupportedError: There is no such device, or as `MemPool`.
    """
    place = _checked("get_mem_pool", device)
    context = current()
    if place.type == "cuda":
        with context.lock:
            found = context.pools.get(place.index)
            if found is None:
                found = context.pools[place.index] = CudaMemPool(place, context)
            return found
    _build.module()  # not under the lock: it may take a while
    with _lock:
        pool = _pools.get(context)
        if pool is None:
            pool = _pools[context] = MemPool()
        return pool


def get_mempool_allocator(device: torch.device | str = "cpu") -> Allocator:
    """What the pools of a device take their segments from. Not collective.

    As `torch.distributed._symmetric_memory.get_mempool_allocator`. There one makes a pool of it; here every pool uses
    it, and `register_allocator` replaces it.

    Args:
        device: "cpu" or "cuda", of which the pools are torch's, and always take memory of the core.

    Raises:
        UnsupportedError: There is no such device.
    """
    return get_allocator(_checked("get_mempool_allocator", device).type)


@contextmanager
def use_mem_pool(pool: MemPool | CudaMemPool) -> Iterator[None]:
    """Let torch allocate memory from a pool, in this thread and inside the `with`. Not collective.

    As `torch.cuda.use_mem_pool`. It concerns every storage that an op of torch makes in this thread, in C++ too:
    activations, gradients of a backward that runs on the CPU (torch does that in the thread that calls it), an
    optimizer's state. Not `torch.UntypedStorage(n)` and `copy.deepcopy` of a tensor, for which torch takes its default
    allocator. Memory is not zeroed. Other threads, pinned memory and other devices are as they were. A tensor
    that is resized gets its memory from where it is resized. It may be nested; the innermost pool serves.

    On a GPU it is torch's `use_mem_pool`: a backward runs in a thread of its own there, and is not concerned.

    Args:
        pool: Of this rank.

    Raises:
        InvalidArgumentError: The pool belongs to another rank context, or one that was closed, or to the process that
            this one was forked from.
        torch.OutOfMemoryError: By torch's ops: there is not enough memory for a new segment.
    """
    if isinstance(pool, CudaMemPool) and pool.context is current():
        with pool.entered():
            yield
        return
    if not isinstance(pool, MemPool | CudaMemPool):
        raise InvalidArgumentError(f"use_mem_pool: pool is a {type(pool).__name__}; give what get_mem_pool returned")
    if isinstance(pool, CudaMemPool) or pool._context() is not current():
        raise InvalidArgumentError(
            "use_mem_pool: the pool belongs to another rank context, one that was closed, or the process that this one "
            "was forked from; call get_mem_pool here"
        )
    entered = pool._pool.enter()
    try:
        yield
    finally:
        if not pool._native.leave(entered):
            raise RuntimeError("use_mem_pool: left in another thread or in another order than it was entered")


def _segment(context_of: "weakref.ref[RankContext]", size_bytes: int) -> tuple[int, object]:
    """For the compiled part: a new segment, and what keeps it; or 0, and why there is not enough memory."""
    context = context_of()
    if context is None:
        raise InvalidArgumentError("the rank context of this memory pool was closed; call get_mem_pool again")
    with context.active():
        try:
            keeper = empty(size_bytes, dtype=torch.uint8, device="cpu")
        except OutOfMemoryError as error:
            return 0, str(error)
    return keeper.data_ptr(), keeper


def _checked(operation: str, device: torch.device | str) -> torch.device:
    place = torch.device(device)
    if place.type == "cuda" and torch.cuda.is_available():
        return with_index(place)
    if place.type != "cpu":
        raise UnsupportedError(
            f"{operation}: memory pools of phalanx.symm_mem are for CPU tensors here, not for {place}; for CUDA there "
            "must be a GPU (torch.cuda.is_available())"
        )
    return place
