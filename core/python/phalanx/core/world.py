"""Worlds: one rank's context."""

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from phalanx.core import _ucx, interrupts
from phalanx.core._call import operand
from phalanx.core._group_calls import REDUCTION_ORDERS
from phalanx.core._handle import (
    INT32_MAX,
    INT64_MAX,
    UINT32_MAX,
    UINT64_MAX,
    Handle,
    c_integer,
    c_optional_text,
    c_text,
    c_timeout,
    create,
)
from phalanx.core._lib import ffi, lib, new_struct
from phalanx.core.errors import InvalidArgumentError, PhalanxError, check, found
from phalanx.core.group import Group
from phalanx.core.memory import Device, Memory, MemoryCount, MemoryInfo, c_device, device_of, info_from_c
from phalanx.core.store import as_store
from phalanx.core.uncopied import Uncopied


class World(Uncopied):
    """One rank's context. Several may live in one process, each on its own threads.

    It publishes the rank in the store; peers are met when the first group is made. It can be used
    as a context manager, which finalizes it. A world that is alive at interpreter exit is
    finalized then.

    A world does not survive a fork: in the child, each call raises UnsupportedError.

    Args:
        rank: This rank, 0 to size - 1.
        size: Number of ranks.
        store: Where the ranks meet: a Store, or an object with the methods of
            torch.distributed.Store. May be left out when size is 1.
        timeout_ms: The default of every wait, in milliseconds; 0 is five minutes.
        host_id: Ranks of different host ids count as ranks of different hosts, whatever the kernel says. None takes the
            environment variable PHALANX_HOST_ID, and without it detects the host.
        staging_bytes: Bytes of one slot of the area through which collectives on ordinary memory move;
            0 is the default.
        signal_channels: Channels of signals of each symmetric allocation; 0 is the default, 64.
        channels: Channels of every group: sequences of collectives that are independent of each other, so that each
            thread can have one; 0 is the default, 4. The same on all ranks.
        recorder_entries: How many collectives of each channel the flight recorder keeps, rounded up to 256, 512,
            1024, ...; the same on all ranks. None takes the environment variable PHALANX_RECORDER_ENTRIES, and without
            it 256.
        progress: Whether what was started moves on also while this rank computes: the world's thread then looks after
            it every millisecond. Without it only calls that wait, and `Work.test`, do that. None takes the environment
            variable PHALANX_PROGRESS, 0 or 1, and without it False.
        job: Prefix of all keys in the store; None is "phalanx".

    Raises:
        InvalidArgumentError: An argument is wrong.

    Example:
        >>> with World(0, 1) as alone:
        ...     alone.create_group("all", [0])
        Group('all', rank 0 of 1)
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any = None,
        *,
        timeout_ms: int = 0,
        host_id: int | None = None,
        staging_bytes: int = 0,
        signal_channels: int = 0,
        channels: int = 0,
        recorder_entries: int | None = None,
        progress: bool | None = None,
        job: str | None = None,
    ) -> None:
        interrupts.install(ffi, lib)  # where another thread has imported this package
        _ucx.use_wheel()
        self._store = None if store is None else as_store(store)
        params = new_struct("phx_world_params")
        params.flags = lib.PHX_WORLD_PROGRESS * _or_environment(progress, "progress", "PHALANX_PROGRESS", 1)
        params.rank = c_integer(rank, "rank", -INT32_MAX, INT32_MAX)
        params.size = c_integer(size, "size", -INT32_MAX, INT32_MAX)
        params.store = ffi.NULL if self._store is None else self._store.pointer
        params.timeout_ms = c_timeout(timeout_ms)
        params.host_id = _or_environment(host_id, "host_id", "PHALANX_HOST_ID", UINT64_MAX)
        params.staging_bytes = c_integer(staging_bytes, "staging_bytes", 0, UINT64_MAX)
        params.signal_channels = c_integer(signal_channels, "signal_channels", 0, UINT32_MAX)
        params.channels = c_integer(channels, "channels", 0, UINT32_MAX)
        params.recorder_entries = _or_environment(
            recorder_entries, "recorder_entries", "PHALANX_RECORDER_ENTRIES", UINT32_MAX
        )
        name = None if job is None else ffi.new("char[]", c_text(job, "job"))
        params.job = ffi.NULL if name is None else name
        pointer = create("phx_world *", lib.phx_world_create, params)
        owners = () if self._store is None else (self._store._handle,)
        self._handle = Handle(pointer, lib.phx_world_release, f"the world of rank {rank}", owners)
        _live.add(self)

    @property
    def pointer(self) -> Any:
        """The phx_world pointer, for calls through `lib` and the torch ops."""
        return self._handle.pointer

    @property
    def rank(self) -> int:
        """This rank."""
        return int(lib.phx_world_rank(self._handle.pointer))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(lib.phx_world_size(self._handle.pointer))

    @property
    def host_id(self) -> int:
        """Ranks of equal host id share memory."""
        return int(lib.phx_world_host_id(self._handle.pointer))

    def set_timeout(self, timeout_ms: int) -> None:
        """Set the default of every wait.

        Args:
            timeout_ms: In milliseconds; 0 is the built-in default of five minutes.

        Example:
            >>> world.set_timeout(30_000)
        """
        check(lib.phx_world_set_timeout(self._handle.pointer, c_timeout(timeout_ms)))

    # ---- groups ---------------------------------------------------------------------------------

    def create_group(
        self, name: str, ranks: Sequence[int], timeout_ms: int = 0, *, reduction_order: str | None = None
    ) -> Group:
        """Make a group of ranks of this world. Collective among `ranks`.

        Args:
            name: May be used again; then it is a new group. The n-th call of each rank belongs with the n-th of the
                others: one that fails on a rank fails on all, also on those that come later.
            ranks: Global ranks in order; this one among them.
            timeout_ms: How long to wait for the others, in milliseconds; 0 is the world's default.
            reduction_order: In which order a group on several hosts adds up: "hosts", the ranks of each host and then
                their results; or "ranks", all ranks in their order, which gives the bits of one host for more bytes
                between hosts. The same on all ranks. None takes the environment variable PHALANX_REDUCTION_ORDER, and
                without it "hosts". Groups that are made of this one take it over.

        Raises:
            InvalidArgumentError: This rank is not among `ranks`, or one is there twice.
            MismatchError: Ranks gave different orders; the text names two of them. Raised on every rank.
            UnsupportedError: The ranks are on several hosts, and one of them has no UCX; the text says what to install.
                Raised on every rank.
            WaitTimeoutError: Ranks did not come; the text names them.

        Example:
            >>> world.create_group("both", [0, 1]).ranks
            (0, 1)
        """
        members = [c_integer(rank, "a rank", -INT32_MAX, INT32_MAX) for rank in ranks]
        whose = (self._handle.pointer, c_text(name, "name"), ffi.new("int32_t[]", members), len(members))
        how = (_group_options(reduction_order), c_timeout(timeout_ms))
        return Group(self, create("phx_group *", lib.phx_group_create_with_options, *whose, *how))

    def attach_group(
        self,
        name: str,
        group_rank: int,
        group_size: int,
        store: Any,
        timeout_ms: int = 0,
        *,
        reduction_order: str | None = None,
    ) -> Group:
        """Make a group that need not be part of this world. Collective among its participants.

        Args:
            name: Under which the participants meet.
            group_rank: This participant, 0 to group_size - 1.
            group_size: Number of participants.
            store: Through which they meet: a Store, or an object with the methods of
                torch.distributed.Store.
            timeout_ms: How long to wait for the others, in milliseconds; 0 is the world's default.
            reduction_order: As for `create_group`.

        Raises:
            MismatchError, UnsupportedError: As for `create_group`.
            WaitTimeoutError: Participants did not come; the text names them.

        Example:
            >>> world.attach_group("pair", rank, 2, FileStore("pair"))  # on rank 1
            Group('pair', rank 1 of 2)
        """
        shared = as_store(store)
        rank = c_integer(group_rank, "group_rank", -INT32_MAX, INT32_MAX)
        size = c_integer(group_size, "group_size", -INT32_MAX, INT32_MAX)
        whose = (self._handle.pointer, c_text(name, "name"), rank, size, shared.pointer)
        how = (_group_options(reduction_order), c_timeout(timeout_ms))
        return Group(self, create("phx_group *", lib.phx_group_attach_with_options, *whose, *how), shared)

    # ---- memory ---------------------------------------------------------------------------------

    def alloc(
        self, size: int, *, alloc_id: int | None = None, scope: str | None = None, device: Device = ("cpu", 0)
    ) -> Memory:
        """Allocate zeroed memory that ranks can share. Not collective.

        With an alloc id the block is persistent: when its Memory and all views of it are gone it
        is kept, and the next call with the same id returns the same address, its bytes untouched.

        Args:
            size: Bytes; 0 is allowed.
            alloc_id: A number that stands for the block, or None for one that is freed.
            scope: Group name that the alloc id is meant in; None is a scope of its own.
            device: Such as "cpu" or ("cuda", 1).

        Raises:
            InUseError: The block of this alloc id is still alive.
            MismatchError: The block of this alloc id has another size; the text gives both.
            OutOfMemoryError: There is not enough memory.

        Example:
            >>> list(world.alloc(4).buffer())
            [0, 0, 0, 0]
        """
        length, place = c_integer(size, "size", 0, INT64_MAX), device_of(device)
        if alloc_id is None and scope is not None:
            raise InvalidArgumentError("scope is given without alloc_id; give both, or neither")
        what = (self._handle.pointer, c_device(place), length)
        if alloc_id is None:
            pointer = create("void *", lib.phx_mem_alloc, *what)
        else:
            number = c_integer(alloc_id, "alloc_id", 0, UINT64_MAX)
            pointer = create("void *", lib.phx_mem_alloc_persistent, *what, c_optional_text(scope, "scope"), number)
        return Memory(self, pointer, length, place, alloc_id, scope)

    def drop(self, alloc_id: int, *, scope: str | None = None, device: Device = ("cpu", 0)) -> None:
        """Free a persistent block for good. Not collective.

        Args:
            alloc_id, scope, device: As it was allocated.

        Raises:
            InUseError: It is alive.
            NotFoundError: The block does not exist.

        Example:
            >>> block = world.alloc(64, alloc_id=7)
            >>> del block  # its memory stays
            >>> world.drop(7)
        """
        number = c_integer(alloc_id, "alloc_id", 0, UINT64_MAX)
        place = c_device(device_of(device))
        check(lib.phx_mem_drop(self._handle.pointer, place, c_optional_text(scope, "scope"), number))

    def find(self, address: Any) -> MemoryInfo | None:
        """The block that an address lies in, or None. Not collective.

        Args:
            address: Any address; a Memory or an object with the buffer protocol stands for its
                first byte.

        Example:
            >>> world.find(memory).size, world.find(bytearray(8))
            (4096, None)
        """
        info = new_struct("phx_mem_info")
        pointer = operand(address, "address", writable=False).pointer
        return info_from_c(info) if found(lib.phx_mem_find(self._handle.pointer, pointer, info)) else None

    def mem_count(self) -> MemoryCount:
        """Number and bytes of the blocks, idle persistent ones included. Not collective.

        Example:
            >>> with World(0, 1) as alone:
            ...     block = alone.alloc(64)
            ...     alone.mem_count()
            MemoryCount(blocks=1, size_bytes=64)
        """
        blocks, size_bytes = ffi.new("size_t *"), ffi.new("size_t *")
        check(lib.phx_mem_count(self._handle.pointer, blocks, size_bytes))
        return MemoryCount(int(blocks[0]), int(size_bytes[0]))

    def export_fabric(self, address: Any) -> bytes:
        """A block in memory of a GPU as bytes, for a process on this host or another. Not collective.

        The other GPU must be in the same NVLink domain, and the process in the same IMEX channel. Whoever has the bytes
        can map the block with `import_fabric`; they are of use until it is freed.

        Args:
            address: Any address in a block of this world; a Memory stands for its first byte.

        Returns:
            96 bytes.

        Raises:
            NotFoundError: It lies in no live block.
            UnsupportedError: The block is not in memory of a GPU, or the GPU or its driver gives no such handles; the
                text says why.
        """
        handle = ffi.new("char[]", lib.PHX_FABRIC_HANDLE_BYTES)
        pointer = operand(address, "address", writable=False).pointer
        check(lib.phx_mem_export_fabric(self._handle.pointer, pointer, handle))
        return bytes(ffi.buffer(handle))

    def import_fabric(self, handle: bytes, device: Device = ("cuda", 0)) -> Memory:
        """Map a block of another process by what `export_fabric` gave there. Not collective.

        Args:
            handle: These bytes.
            device: The GPU of this rank that will use it.

        Returns:
            The block; it is unmapped when the Memory is gone. It has no signals, and cannot be offered to a rendezvous.

        Raises:
            InvalidArgumentError: `handle` was not made by `export_fabric`.
            UnsupportedError: That GPU or its driver has no such handles; the text says why.
            DeviceError: The driver does not map it; for one, because the block has been freed.
        """
        if not isinstance(handle, bytes):
            raise InvalidArgumentError(f"handle is a {type(handle).__name__}; give the bytes of export_fabric")
        place, world = device_of(device), self._handle.pointer
        what = (c_device(place), ffi.from_buffer(handle), len(handle))
        pointer, info = create("void *", lib.phx_mem_import_fabric, world, *what), new_struct("phx_mem_info")
        check(lib.phx_mem_find(world, pointer, info))
        return Memory(self, pointer, int(info.size), place)

    # ---- life -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what is known to have gone wrong. Never blocks. Not collective.

        Raises:
            PeerDeadError: A peer died; the first one found.
            RevokedError: A group was revoked.

        Example:
            >>> world.check()
        """
        check(lib.phx_world_check(self._handle.pointer))

    def check_peer(self, rank: int) -> None:
        """Raise if a rank that this one has met, in any group of the world, has died or left. Never blocks.

        Args:
            rank: A rank of the world.

        Raises:
            PeerDeadError: It has; the text names it and its process.

        Example:
            >>> world.check_peer(1 - rank)
        """
        check(lib.phx_world_check_peer(self._handle.pointer, c_integer(rank, "rank", -INT32_MAX, INT32_MAX)))

    def dump(self) -> str:
        """The flight recorder as JSON: the last collectives of all ranks of this world's groups, dead ones included.

        Not collective; also while other threads are in calls. `phalanx trace` reads it. With the environment variable
        PHALANX_DUMP, each failure of a group writes one into that folder.

        Example:
            >>> json.loads(world.dump())["rank"]  # on rank 1
            1
        """
        size = ffi.new("size_t *")
        capacity = 1 << 16
        while True:
            text = ffi.new("char[]", capacity)
            check(lib.phx_world_dump(self._handle.pointer, text, capacity, size))
            if size[0] < capacity:
                return bytes(ffi.buffer(text, size[0])).decode("utf-8", "replace")
            capacity = int(size[0]) * 2

    def abort(self, reason: str) -> None:
        """Revoke every group of this world, on all their ranks. Not collective.

        Calls that wait, in any thread, end at once. The world itself stays: `Group.shrink` gives new groups.

        Args:
            reason: Named by the RevokedError that all get.

        Example:
            >>> with World(0, 1) as alone:
            ...     one = alone.create_group("one", [0])
            ...     alone.abort("no more data")
            ...     one.state
            'failed'
        """
        check(lib.phx_world_abort(self._handle.pointer, c_text(reason, "reason")))

    def finalize(self) -> None:
        """Leave: tell the peers, close every connection, end the monitor thread. Not collective.

        Groups of this world are unusable afterwards. Memory stays valid until it is freed. A second
        call does nothing, and so does a call in a forked child of the process that made the world.

        Example:
            >>> alone = World(0, 1)
            >>> alone.finalize()
        """
        if self._handle.alive():
            check(lib.phx_world_finalize(self._handle.pointer))
        _live.discard(self)

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finalize()

    def __repr__(self) -> str:
        if not self._handle.alive():
            return "World(of a parent process)"
        return f"World(rank {self.rank} of {self.size})"


def _group_options(reduction_order: str | None) -> Any:
    if reduction_order not in (None, *REDUCTION_ORDERS):
        raise InvalidArgumentError(f"reduction_order is {reduction_order!r}; expected 'hosts', 'ranks' or None")
    options = new_struct("phx_group_options")
    if reduction_order is not None:
        options.reduction_order = REDUCTION_ORDERS.index(reduction_order) + 1
    return options


def _or_environment(wish: int | None, what: str, variable: str, high: int) -> int:
    if wish is not None:
        return c_integer(wish, what, 0, high)
    text = os.environ.get(variable, "").strip() or "0"
    try:
        number = int(text, 0)
    except ValueError:
        raise InvalidArgumentError(
            f"the environment variable {variable} is {text!r}; set it to a number, or unset it"
        ) from None
    return c_integer(number, variable, 0, high)


# Worlds to finalize at exit, while their threads and Python's can still meet.
_live: weakref.WeakSet[World] = weakref.WeakSet()


def abort_after_error() -> bool:
    """Tell the peers why, if this process is about to end because of an exception. For functions of `atexit`.

    Every group of every world of the process fails on all its ranks, with the exception as the reason. Otherwise the
    peers would learn only that this rank has left.

    Returns:
        Whether it is.
    """
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # in an interactive session it may be long ago
        return False
    what = " ".join(f"{type(error).__name__}: {error}".split())
    for world in list(_live):
        with contextlib.suppress(PhalanxError):
            world.abort(f"its program ended with {what[:400]}")
    return True


@atexit.register
def _finalize_all() -> None:
    abort_after_error()
    for world in list(_live):
        with contextlib.suppress(PhalanxError):
            world.finalize()
