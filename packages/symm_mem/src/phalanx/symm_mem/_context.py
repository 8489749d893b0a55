"""What belongs to one rank: its world, groups, allocators and allocations."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import WeakSet

from phalanx.core import InUseError, InvalidArgumentError, World

if TYPE_CHECKING:
    from phalanx.symm_mem._alloc import Allocation
    from phalanx.symm_mem._allocators import Allocator
    from phalanx.symm_mem._groups import RankGroup
    from phalanx.symm_mem._handle import SymmetricMemory
    from phalanx.symm_mem._pool.cuda import CudaMemPool
    from phalanx.symm_mem._streams import Waiting

_DEFAULT_CHANNELS, _MOST_CHANNELS = 64, 65536  # of the core
_CHANNEL_BYTES = 8  # of a signal pad, in the smallest group that has use for one: a word for each of two ranks


class RankContext:
    """One rank's symmetric memory. Made by `rank_context`; a process has one by default.

    Args:
        timeout_ms: The default of every wait, in milliseconds; 0 is that of the process group, and five minutes where
            there is none.
        signal_channels: Of each rendezvous; 0 is 64.
    """

    def __init__(self, timeout_ms: int = 0, signal_channels: int = 0) -> None:
        self.lock = threading.RLock()  # of short sections; never held while waiting for a peer
        self.groups: dict[str, RankGroup] = {}
        self.allocators: dict[str, Allocator] = {}  # by device type: those in use
        self.backends: dict[tuple[str, str], Allocator] = {}  # by name and device type: those to choose from
        self.handles: WeakSet[SymmetricMemory] = WeakSet()  # changed and walked under the lock
        self.allocations: dict[int, Allocation] = {}  # by address; see _alloc.py for who may touch it
        self.ended: Waiting = deque()  # see _streams.py
        # Of segments of memory pools on GPUs, which torch makes and frees: by address, with their numbers.
        self.segments: dict[int, tuple[int, Allocation]] = {}
        self.segment_number: Callable[[int], int] | None = None  # None: there is no such pool
        self.pools: dict[int, CudaMemPool] = {}  # by GPU
        self.timeout_ms = timeout_ms
        self._signal_channels = signal_channels
        self._signal_pad_size: int | None = None
        self._pid = os.getpid()
        self._world: World | None = None
        self._closed = False

    @property
    def world(self) -> World:
        """The world that all of this rank's memory is allocated in, made at first use.

        It has this rank alone. Groups are attached to it (`World.attach_group`), so memory may be
        allocated before any group is known and meet any group later.

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
        """Whether `world` is made already. Not collective.

        Raises:
            InvalidArgumentError: The context was closed.
        """
        self._check_open()
        return self._world is not None

    @property
    def signal_pad_size(self) -> int:
        """Bytes that signal pads have at least in groups of two ranks or more."""
        if self._signal_pad_size is not None:
            return self._signal_pad_size
        return (self._signal_channels or _DEFAULT_CHANNELS) * _CHANNEL_BYTES

    def set_signal_pad_size(self, size: int) -> None:
        """See `phalanx.symm_mem.set_signal_pad_size`."""
        most = _MOST_CHANNELS * _CHANNEL_BYTES
        if not isinstance(size, int) or not 0 <= size <= most:
            raise InvalidArgumentError(f"set_signal_pad_size: size is {size!r}; give 0 to {most} bytes")
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
        """Make this the context of the calling thread: for the second and later threads of a rank."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def of_this_process(self) -> bool:
        """Whether the context was made here, and not in a process that this one was forked from."""
        return self._pid == os.getpid()

    def close(self) -> None:
        """Leave all groups. Not collective. Tensors stay valid until they are dropped. In a forked child, nothing."""
        if not self.of_this_process():
            return
        with self.lock:
            self._closed = True
            world, self._world = self._world, None
        self.allocations.clear()
        self.segments.clear()
        self.pools.clear()
        self.groups.clear()
        if world is not None:
            world.finalize()


_current: ContextVar[RankContext | None] = ContextVar("phalanx.symm_mem rank context", default=None)
_default: list[RankContext] = []  # at most one
_default_lock = threading.Lock()
os.register_at_fork(after_in_child=_default_lock._at_fork_reinit)  # type: ignore[attr-defined]


def current() -> RankContext:
    """The context of the calling thread: that of the innermost `rank_context`, else the process's."""
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
        timeout_ms: The default of every wait, in milliseconds; 0 is that of the process group, and five minutes where
            there is none.
        signal_channels: Channels of signals and of barriers that each rendezvous gives; 0 is 64.
            The same on all ranks.

    Yields:
        The context.
    """
    context = RankContext(timeout_ms, signal_channels)
    try:
        with context.active():
            yield context
    finally:
        context.close()


def finalize() -> None:
    """Leave all groups of this rank and forget its persistent allocations. Not collective.

    Tensors stay valid until they are dropped. The rank of the process starts anew at its next call;
    one of `rank_context` is closed for good. At the end of a process this happens by itself.
    """
    context = current()
    if _current.get() is None:
        with _default_lock:
            _default.clear()
    context.close()
