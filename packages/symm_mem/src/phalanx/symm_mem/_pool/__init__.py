"""Memory pools: inside a `with`, all memory that torch allocates on the CPU is symmetric memory::

    pool = symm_mem.get_mem_pool()
    with symm_mem.use_mem_pool(pool):
        hidden = relu(x @ up)                            # made by torch's own ops
    torch.ops.phalanx.two_shot_all_reduce_(hidden, "sum", group_name)

A pool takes segments of symmetric memory of at least 2 MiB, and gives pieces of them to torch, aligned to 64 bytes. A
segment has one rendezvous with each group, with the first tensor in it; later handles of its tensors need no
communication.

A handle has the offset of this rank's tensor in the segment, and ops use the same offset for the peers. As with all
symmetric memory, the ranks must therefore allocate the same sizes in the same order inside the `with`, and free them in
the same order. The offsets depend on nothing else. Work of some ranks only (printing, checks) belongs outside of the
`with`. `MemPool.layout` tells whether the ranks have the same layout.

heap.h       the free pieces of the segments
pools.cpp    the pools, the allocator in front of torch's CPU allocator, and the Python module of both
_build.py    compiles it
cuda.py      pools on GPUs, which are torch's
"""

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, overload

import torch

from phalanx.core import InvalidArgumentError, OutOfMemoryError, UnsupportedError
from phalanx.symm_mem._allocation import empty, with_index
from phalanx.symm_mem._allocators import get_allocator
from phalanx.symm_mem._pool import _build
from phalanx.symm_mem._pool.cuda import CudaMemPool
from phalanx.symm_mem._state import Allocator, RankContext, Slot, current


class PoolSegment(NamedTuple):
    """One block of symmetric memory of a pool.

    Attributes:
        address: Address of its first byte.
        total_bytes: Size of the block.
        used_bytes: Bytes in use by torch, rounded up to 64 for each storage.
    """

    address: int
    total_bytes: int
    used_bytes: int


class MemPool:
    """Symmetric memory of this rank for torch's CPU tensors inside `use_mem_pool`. Not collective.

    The first pool of a process compiles a small library if there is none yet (15 seconds, once on a host), and installs
    an allocator in front of torch's. Outside of `use_mem_pool` that allocator calls the previous one, at the cost of
    reading one thread-local variable.

    The pool keeps its segments until it ends; a segment with tensors stays until the last of them is gone. It belongs
    to the rank context in which it was made, and takes its segments from the allocator registered there for "cpu".

    Raises:
        UnsupportedError: There is no compiler, or other code replaced the allocator; the text says what to do.

    Example:
        >>> pool = MemPool()
        >>> with use_mem_pool(pool):
        ...     hidden = torch.ones(16)
        >>> pool
        MemPool(1 segments, 64 of 2097152 bytes in use)
    """

    def __init__(self) -> None:
        native = _build.module()
        if not native.install():
            raise UnsupportedError(
                "MemPool: other code in this process replaced torch's CPU allocator, so a memory pool cannot serve it; "
                "make the pool after that replacement, or allocate with phalanx.symm_mem.empty"
            )
        context = current()
        self._native = native
        self._context = weakref.ref(context)  # weak: the context holds the pool
        self._pool: Any = native.Pool(functools.partial(_segment, self._context))

    @property
    def device(self) -> torch.device:
        """The device of its memory."""
        return torch.device("cpu")

    @property
    def segments(self) -> list[PoolSegment]:
        """Its segments, in the order of their allocation."""
        return [PoolSegment(*each) for each in self._pool.segments()]

    @property
    def reserved_bytes(self) -> int:
        """Size of all segments."""
        return sum(each.total_bytes for each in self.segments)

    @property
    def used_bytes(self) -> int:
        """Bytes in use by torch, rounded up to 64 for each storage."""
        return sum(each.used_bytes for each in self.segments)

    def layout(self) -> int:
        """A 64-bit hash of the pieces in use. Not collective.

        Ranks with the same number have their tensors at the same offsets.
        """
        return int(self._pool.layout())

    def trim(self) -> None:
        """Free the segments without tensors. Not collective, but all ranks must call it at the same point."""
        self._pool.trim()

    def __repr__(self) -> str:
        return f"MemPool({len(self.segments)} segments, {self.used_bytes} of {self.reserved_bytes} bytes in use)"


_pools: Slot[dict[torch.device, MemPool | CudaMemPool]] = Slot(dict)  # of a rank: those that `get_mem_pool` returns


@overload
def get_mem_pool(device: Literal["cpu"] = "cpu") -> MemPool: ...


@overload
def get_mem_pool(device: Literal["cuda"]) -> CudaMemPool: ...


@overload
def get_mem_pool(device: torch.device | str) -> MemPool | CudaMemPool: ...


def get_mem_pool(device: torch.device | str = "cpu") -> MemPool | CudaMemPool:
    """The memory pool of this rank. Not collective.

    As `torch.distributed._symmetric_memory.get_mem_pool`, which has none for CPU.

    Args:
        device: "cpu" or "cuda".

    Returns:
        The same pool in each call; it ends with the rank context (`finalize`). `MemPool()` makes a further one for CPU.

    Raises:
        UnsupportedError: There is no such device, or as `MemPool`.

    Example:
        >>> get_mem_pool() is get_mem_pool()
        True
    """
    place = _checked("get_mem_pool", device)
    context = current()
    if place.type == "cpu":
        _build.module()  # not under the lock: it may take a while
    pools = _pools.of(context)
    with context.lock:
        if place not in pools:
            pools[place] = MemPool() if place.type == "cpu" else CudaMemPool(place, context)
        return pools[place]


def get_mempool_allocator(device: torch.device | str = "cpu") -> Allocator:
    """The allocator of the segments of pools of a device. Not collective.

    As `torch.distributed._symmetric_memory.get_mempool_allocator`. Torch's result is an argument for a new pool. In
    this package every pool uses it, and `register_allocator` replaces it.

    Args:
        device: "cpu" or "cuda". The pools on GPUs are torch's, and always take memory of the core.

    Raises:
        UnsupportedError: There is no such device.

    Example:
        >>> get_mempool_allocator("cpu").name
        'SHM'
    """
    return get_allocator(_checked("get_mempool_allocator", device).type)


@contextmanager
def use_mem_pool(pool: MemPool | CudaMemPool) -> Iterator[None]:
    """Let torch allocate memory from a pool, in this thread and inside the `with`. Not collective.

    As `torch.cuda.use_mem_pool`. It affects every storage that an op of torch makes in this thread, also in C++:
    activations, gradients of a backward on the CPU (which torch runs in the calling thread), the state of an optimizer.
    It does not affect `torch.UntypedStorage(n)` and `copy.deepcopy` of a tensor, which use torch's default allocator.
    Memory is not zeroed. Other threads, pinned memory and other devices are not affected. A tensor that is resized gets
    memory by the place of the resize. Calls may be nested; the innermost pool is used.

    On a GPU this is torch's `use_mem_pool`: a backward runs in another thread there, and is not affected.

    Args:
        pool: A pool of this rank.

    Raises:
        InvalidArgumentError: The pool belongs to another rank context, or one that was closed, or to the process that
            this one was forked from.
        torch.OutOfMemoryError: Raised by torch's ops if there is not enough memory for a new segment.

    Example:
        >>> with use_mem_pool(get_mem_pool()):
        ...     hidden = torch.ones(4) @ torch.ones(4, 2)
        >>> is_symm_mem_tensor(hidden)
        True
    """
    if not isinstance(pool, MemPool | CudaMemPool):
        raise InvalidArgumentError(f"use_mem_pool: pool is a {type(pool).__name__}; expected a result of get_mem_pool")
    if (pool._context() if isinstance(pool, MemPool) else pool.context) is not current():
        raise InvalidArgumentError(
            "use_mem_pool: the pool belongs to another rank context, to one that was closed, or to the process that "
            "this one was forked from; call get_mem_pool in this context and process"
        )
    if isinstance(pool, CudaMemPool):
        with pool.entered():
            yield
        return
    entered = pool._pool.enter()
    try:
        yield
    finally:
        if not pool._native.leave(entered):
            raise RuntimeError(
                "use_mem_pool: the with block was left in another thread or in another order than it was entered; "
                "leave the innermost block first, in the thread that entered it"
            )


def _segment(context_of: "weakref.ref[RankContext]", size_bytes: int) -> tuple[int, object]:
    """Called by the compiled module: the address of a new segment and its owner, or 0 and the reason."""
    context = context_of()
    if context is None:
        raise InvalidArgumentError(
            "use_mem_pool: the rank context of this memory pool was closed; call get_mem_pool again"
        )
    with context.active():
        try:
            owner = empty(size_bytes, dtype=torch.uint8, device="cpu")
        except OutOfMemoryError as error:
            return 0, str(error)
    return owner.data_ptr(), owner


def _checked(operation: str, device: torch.device | str) -> torch.device:
    place = torch.device(device)
    if place.type == "cuda" and torch.cuda.is_available():
        return with_index(place)
    if place.type == "cpu":
        return torch.device("cpu")
    raise UnsupportedError(
        f"{operation}: the device is '{place}', and on this host memory pools of phalanx.symm_mem are for CPU tensors "
        "only; for 'cuda' torch.cuda.is_available() must be true"
    )
