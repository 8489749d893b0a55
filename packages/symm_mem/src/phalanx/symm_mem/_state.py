"""The state of one rank: its world, allocators and allocations. Other modules keep theirs on it in slots."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from phalanx.core import InUseError, InvalidArgumentError, Memory, World

_DEFAULT_CHANNELS, _MAX_CHANNELS = 64, 65536  # of the core
_CHANNEL_BYTES = 8  # of a signal pad in a group of two ranks, the smallest that uses one: a word for each rank

T = TypeVar("T")


class HasSlots(Protocol):
    """An object on which other modules keep values of their own."""

    slots: "dict[Slot[Any], Any]"


class Slot(Generic[T]):
    """A value that a module keeps on an object of a module below it. `make` makes it at its first use."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def of(self, owner: HasSlots) -> T:
        """The value on this object."""
        value: T | None = owner.slots.get(self)
        if value is None:
            value = owner.slots.setdefault(self, self._make())  # atomic: another thread may have been first
        return value


class Allocator(Protocol):
    """Makes the blocks of one device type. Subclass `WorldAllocator`, or implement this protocol."""

    @property
    def name(self) -> str:
        """Name of the backend, for `get_backend` and `set_backend`."""

    def alloc(self, world: World, size: int, device: torch.device, scope: str | None, alloc_id: int | None) -> Memory:
        """Allocate a block in `world`. Groups can map only blocks of their world.

        Args:
            world: The world of this rank.
            size: Size in bytes.
            device: A device of the type that the allocator is registered for.
            scope: Name of the group that the alloc id belongs to, or None.
            alloc_id: As in `empty_strided_p2p`.

        Returns:
            The block, a result of `World.alloc`.

        Raises:
            OutOfMemoryError: There is not enough memory.
        """

    def free(self, memory: Memory) -> None:
        """Called once, on any thread, when the tensor and all views of it are gone.

        The block itself is freed with the last reference to `memory`. Must not raise.

        Args:
            memory: The result of `alloc`.
        """


@dataclass(eq=False)
class Allocation:
    """One block of this rank, from its allocation until its storage ends (persistent: until it is dropped).

    A storage may end in a garbage collection, on any thread and with any lock held, so its end takes no lock: it is one
    atomic operation on `RankContext.allocations`.

    Attributes:
        address: Address of its first byte.
        size: Size in bytes.
        device: Device type and index, such as ("cpu", 0).
        group_name: The group that it was allocated for, or None.
        alloc_id: The alloc id of a persistent block, or None.
        slots: Values of other modules: its handles, and the order of their work on streams.
    """

    address: int
    size: int
    device: tuple[str, int]
    group_name: str | None
    alloc_id: int | None
    slots: dict[Slot[Any], Any] = field(default_factory=dict)


class Retained(Protocol):
    """An object that only work on streams still uses: see _cuda.py."""

    def is_over(self) -> bool:
        """Whether the streams are done with it."""

    def synchronize(self) -> None:
        """Wait until they are."""


class RankContext:
    """The symmetric memory of one rank. Made by `rank_context`; a process has one by default.

    Args:
        timeout_ms: The default timeout of all waits, in milliseconds; 0 is that of the process group, or five minutes
            without one.
        signal_channels: Number of channels of each rendezvous; 0 is 64.
    """

    def __init__(self, timeout_ms: int = 0, signal_channels: int = 0) -> None:
        self.lock = threading.RLock()  # for short sections; never held while waiting for a peer
        self.slots: dict[Slot[Any], Any] = {}  # values of other modules: groups, handles, memory pools
        self.allocators: dict[str, Allocator] = {}  # by device type: those in use
        self.backends: dict[tuple[str, str], Allocator] = {}  # by name and device type: those to choose from
        self.allocations: dict[int, Allocation] = {}  # by address; see `Allocation` about threads
        self.retained: deque[Retained] = deque()  # any thread takes from it and adds to it, without a lock
        # Segments of memory pools on GPUs, which torch allocates and frees: by address, with their numbers.
        self.segments: dict[int, tuple[int, Allocation]] = {}
        self.segment_number: Callable[[int], int] | None = None  # None: there is no such pool
        self.timeout_ms = timeout_ms
        self._signal_channels = signal_channels
        self._signal_pad_size: int | None = None
        self._pid = os.getpid()
        self._world: World | None = None
        self._closed = False

    @property
    def world(self) -> World:
        """The world in which all memory of this rank is allocated, made at the first use.

        It has this rank only. Groups are attached to it (`World.attach_group`), so memory may be allocated before any
        group is known, and be used with any group later.

        Raises:
            InvalidArgumentError: The context was closed.
        """
        with self.lock:
            self._check_open()
            if self._world is None:
                self._world = World(0, 1, timeout_ms=self.timeout_ms, signal_channels=self._signal_channels)
            return self._world

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("this rank context was closed; make a new one with rank_context()")

    @property
    def has_world(self) -> bool:
        """Whether `world` has been made. Not collective.

        Raises:
            InvalidArgumentError: The context was closed.
        """
        self._check_open()
        return self._world is not None

    @property
    def signal_pad_size(self) -> int:
        """The least size of signal pads in groups of two ranks or more, in bytes."""
        if self._signal_pad_size is not None:
            return self._signal_pad_size
        return (self._signal_channels or _DEFAULT_CHANNELS) * _CHANNEL_BYTES

    def set_signal_pad_size(self, size: int) -> None:
        """Set the least size of the signal pads of later allocations. See `phalanx.symm_mem.set_signal_pad_size`.

        Args:
            size: The size in bytes; 0 is the default.

        Raises:
            InvalidArgumentError: The size is not possible, or the context was closed.
            InUseError: This rank has allocated memory with another size before.
        """
        largest = _MAX_CHANNELS * _CHANNEL_BYTES
        if not isinstance(size, int) or not 0 <= size <= largest:
            raise InvalidArgumentError(f"set_signal_pad_size: size is {size!r}; expected 0 to {largest} bytes")
        channels = -(-size // _CHANNEL_BYTES)
        with self.lock:
            self._check_open()
            before = self._signal_channels or _DEFAULT_CHANNELS
            if self._world is not None and (channels or _DEFAULT_CHANNELS) != before:
                raise InUseError(
                    f"set_signal_pad_size: {size} bytes make {channels or _DEFAULT_CHANNELS} channels, but this rank "
                    f"has allocated memory before, and its pads have {before}; set the size before the first "
                    "allocation, or after finalize()"
                )
            self._signal_channels, self._signal_pad_size = channels, size or None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the context of the calling thread, for further threads of a rank."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def of_this_process(self) -> bool:
        """Whether the context was made in this process, and not in one that it was forked from."""
        return self._pid == os.getpid()

    def close(self) -> None:
        """Leave all groups. Not collective. Tensors stay valid. Does nothing in a forked child."""
        if not self.of_this_process():
            return
        with self.lock:
            self._closed = True
            world, self._world = self._world, None
        self.allocations.clear()
        self.segments.clear()
        self.slots.clear()
        if world is not None:
            world.finalize()


_current: ContextVar[RankContext | None] = ContextVar("phalanx.symm_mem rank context", default=None)
_default: list[RankContext] = []  # at most one
_default_lock = threading.Lock()
os.register_at_fork(after_in_child=_default_lock._at_fork_reinit)  # type: ignore[attr-defined]


def current() -> RankContext:
    """The context of the calling thread: that of the innermost `rank_context`, else that of the process."""
    context = _current.get()
    if context is not None:
        return context
    if _default and _default[0].of_this_process():
        return _default[0]
    with _default_lock:
        if not _default or not _default[0].of_this_process():
            _default[:] = [RankContext()]
        return _default[0]


@contextmanager
def rank_context(*, timeout_ms: int = 0, signal_channels: int = 0) -> Iterator[RankContext]:
    """Give the calling thread a rank of its own, so that several ranks can live in one process.

    Groups, allocators, persistent allocations and handles belong to the context. Without one, all
    threads of the process are one rank. Other threads of the same rank enter it with
    `RankContext.active`. Not collective. At its end the context is closed: its groups are left,
    tensors stay valid until they are dropped.

    Args:
        timeout_ms: The default timeout of all waits, in milliseconds; 0 is that of the process group, or five minutes
            without one.
        signal_channels: Number of channels of signals and of barriers of each rendezvous, the same on all ranks; 0 is
            64.

    Yields:
        The context.

    Example:
        >>> with rank_context(signal_channels=8):
        ...     rendezvous(empty(4), group).signal_channels
        8
    """
    context = RankContext(timeout_ms, signal_channels)
    try:
        with context.active():
            yield context
    finally:
        context.close()


def finalize() -> None:
    """Leave all groups of this rank and forget its persistent allocations. Not collective.

    Tensors stay valid until they are dropped. The rank of the process starts anew at its next call; one of
    `rank_context` stays closed. At the end of a process this happens automatically.

    Example:
        >>> tensor = empty(4)
        >>> finalize()
        >>> tensor, is_symm_mem_tensor(tensor)
        (tensor([0., 0., 0., 0.]), False)
    """
    context = current()
    if _current.get() is None:
        with _default_lock:
            _default.clear()
    context.close()
