"""The handle of a rendezvous: the blocks of all ranks, and their signals."""

import mmap
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from phalanx.core import InvalidArgumentError, PhalanxError, Symm, ffi
from phalanx.symm_mem import _cuda
from phalanx.symm_mem._process_group import RankGroup
from phalanx.symm_mem._signal_pad import get_signal_pad_size, set_signal_pad_size
from phalanx.symm_mem._state import Slot


class _HandleType(type):
    """Gives the class a `signal_pad_size`, that of later rendezvous; each handle has its own."""

    @property
    def signal_pad_size(cls) -> int:
        """As `get_signal_pad_size` and `set_signal_pad_size`."""
        return get_signal_pad_size()

    @signal_pad_size.setter
    def signal_pad_size(cls, size: int) -> None:
        set_signal_pad_size(size)


class SymmetricMemory(metaclass=_HandleType):
    """An allocation as every rank of a group sees it. Made by `rendezvous`.

    Names and meaning are those of torch's `_SymmetricMemory`. Ranks are positions in the group. The mappings live until
    the handle and all tensors of `get_buffer` and `get_signal_pad` are gone, also if the tensor is gone before.

    Signals are counted: `put_signal` never blocks, and n waits take n signals. The writes of a rank before `put_signal`
    or `barrier` are visible to the other side after the matching wait. Timeouts are in milliseconds; 0 is the
    default of the rank context, or else of the process group, or five minutes. After a timeout the handle is unchanged,
    and the call may be repeated.

    With memory of a GPU, all calls put work on torch's current stream and return: signals and barriers order streams.
    An error on the stream (a rank that does not signal within the timeout, or dies) ends the kernel that waits, and is
    raised by the next call on the group; later work on the stream uses unspecified data, and the group is unusable
    afterwards.
    Calls from several streams that use the same words keep their order: the later stream waits for the earlier one.
    Buffers of peers are for the stream that is current when they are made.

    The class also has the static methods of torch's class, which are functions of this package: set_group_info,
    empty_strided_p2p, rendezvous, is_symm_mem_tensor, get_backend, set_backend, get_mempool_allocator,
    has_multicast_support, stream_write_value32 and memset32. The `signal_pad_size` of the class itself is that of later
    rendezvous: see `set_signal_pad_size`. `_SymmetricMemory` is another name of this class.

    Attributes:
        rank: This rank's position in the group.
        world_size: Number of ranks of the group.
        group_name: Name of the group.
        device: The device of the blocks.
        offset: Bytes from the start of the block to the start of the tensor given to `rendezvous`.
        buffer_size: Bytes of each rank's block.
        signal_pad_size: Bytes of each rank's signal pad.
        signal_channels: Number of channels.
        symm: The handle of the core, with the collectives on symmetric memory.

    Example:
        >>> tensor = empty(2).fill_(rank)
        >>> handle = rendezvous(tensor, group)
        >>> handle.barrier()
        >>> handle.get_buffer(1, tensor.shape, tensor.dtype)
        tensor([1., 1.])
    """

    # Functions of this package, assigned in __init__.py.
    set_group_info: ClassVar[Callable[..., None]]
    empty_strided_p2p: ClassVar[Callable[..., torch.Tensor]]
    rendezvous: ClassVar[Callable[..., "SymmetricMemory"]]
    is_symm_mem_tensor: ClassVar[Callable[[torch.Tensor], bool]]
    set_backend: ClassVar[Callable[[str], None]]
    get_backend: ClassVar[Callable[[torch.device | str], str | None]]
    get_mempool_allocator: ClassVar[Callable[..., Any]]

    def __init__(
        self, group: RankGroup, symm: Symm, device: tuple[str, int], offset: int, order: _cuda.StreamOrder
    ) -> None:
        self._group = group
        self._order = order
        self.symm = symm
        self.rank = symm.group_rank
        self.world_size = symm.group_size
        self.group_name = group.name
        self._on_host = device[0] == "cpu"
        self.device = torch.device(device[0]) if self._on_host else torch.device(*device)
        self.offset = offset
        self.buffer_size = symm.size
        self.signal_pad_size = symm.signal_pad_bytes
        self.signal_channels = symm.signal_channels
        # By rank: on the host a view of the memory, on a GPU its address.
        self._buffers: dict[int, Any] = {}
        self._signal_pads: dict[int, Any] = {}

    # ---- memory of all ranks --------------------------------------------------------------------

    @property
    def buffer_ptrs(self) -> list[int]:
        """Address, in this process, of the block of each rank."""
        return self.symm.buffer_ptrs

    @property
    def signal_pad_ptrs(self) -> list[int]:
        """Address, in this process, of the signal pad of each rank.

        Word [r * symm.pad_stride + channel] of a pad is written only by rank r, holds a count that only
        grows (modulo 2^32), and starts at zero. Use a channel either by hand or through `put_signal`
        and `wait_signal`, not both.
        """
        return self.symm.signal_pad_ptrs

    @property
    def buffer_ptrs_dev(self) -> int:
        """Address of an array of world_size pointers, those of `buffer_ptrs`, that the device can read."""
        return self.symm.buffer_ptrs_device

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Address of an array of world_size pointers, those of `signal_pad_ptrs`, that the device can read."""
        return self.symm.signal_pad_ptrs_device

    @property
    def multicast_ptr(self) -> int:
        """An address for the blocks of all ranks at once, if the GPUs and their switch support multicast; else 0."""
        if self._on_host:
            return 0
        return int(ffi.cast("uintptr_t", ffi.cast("phx_team *", self.symm.team).multicast))

    @property
    def team(self) -> int:
        """Address of a `phx_team`, for kernels in C: see `phalanx/device.h`. It lives as long as this handle."""
        return self.symm.team

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """The memory of a rank as an ordinary contiguous tensor, without a copy. Not collective.

        Args:
            rank: The owner of the block.
            sizes: The shape.
            dtype: The dtype, which need not be that of the tensor given to `rendezvous`.
            storage_offset: Elements of `dtype` from the start of the block. The start of a view is at
                its `storage_offset()`.

        Returns:
            A tensor; what is written to it is in the rank's memory.

        Raises:
            InvalidArgumentError: There is no such rank, or the tensor would not fit into the block.
        """
        start = _start("get_buffer", dtype, storage_offset)
        return self._tensor("get_buffer", self._buffers, rank, sizes, dtype, start)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The counterpart, on a rank, of the tensor given to `rendezvous`. Not collective.

        Args:
            peer: The owner of the block.
            sizes: The shape.
            dtype: The dtype of the elements.

        Returns:
            As `get_buffer`, but it starts where the tensor given to `rendezvous` starts in its block.

        Raises:
            InvalidArgumentError: As `get_buffer`.
        """
        _start("get_remote_tensor", dtype, 0)
        if self.offset % dtype.itemsize:
            raise InvalidArgumentError(
                f"get_remote_tensor: the tensor starts at byte {self.offset}, which is not a multiple of the "
                f"{dtype.itemsize} bytes of {dtype}; use a dtype of fewer bytes"
            )
        return self._tensor("get_remote_tensor", self._buffers, peer, sizes, dtype, self.offset)

    def get_gathered(self, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """The same part of all ranks' memory as one tensor: an all_gather without a copy.

        The pages of the blocks are mapped once more, one rank's after another's. Writes of a rank to its block appear
        there: read them after a barrier. Not collective. Torch has no such function.

        Args:
            sizes: The shape of one rank's part. Its bytes must be whole pages (4096 bytes on x86-64).
            dtype: The dtype of the elements.
            storage_offset: Elements of `dtype` from the start of the block to the part, whole pages too.

        Returns:
            A contiguous tensor of shape ``[world_size * sizes[0], *sizes[1:]]``, for a part of at least one dim.

        Raises:
            InvalidArgumentError: The part is not made of whole pages, or would not fit into the block.
            UnsupportedError: The blocks are not in host memory, or not in pages that can be mapped twice.
        """
        start = _start("get_gathered", dtype, storage_offset)
        if not sizes or not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise InvalidArgumentError(f"get_gathered: sizes is {sizes!r}; give a shape of at least one dim")
        nbytes = prod(sizes) * dtype.itemsize
        if start % mmap.PAGESIZE or nbytes % mmap.PAGESIZE or start + nbytes > self.buffer_size:
            raise InvalidArgumentError(
                f"get_gathered: {list(sizes)} elements of {dtype} are the bytes {start} to {start + nbytes} of the "
                f"block, which has {self.buffer_size}; they must be inside, and whole pages of {mmap.PAGESIZE} bytes"
            )
        shape = (self.world_size * sizes[0], *sizes[1:])
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.frombuffer(self.symm.gathered(start, nbytes), dtype=dtype).view(shape)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None, storage_offset: int = 0
    ) -> torch.Tensor:
        """The signal pad of a rank as a tensor, without a copy. Not collective. See `signal_pad_ptrs` for its layout.

        Args:
            rank: The owner of the pad.
            sizes: The shape; empty for one dim that reaches to the end of the pad.
            dtype: None is torch.uint32.
            storage_offset: Elements of `dtype` from the start of the pad.

        Raises:
            InvalidArgumentError: There is no such rank, or the tensor would not fit into the pad.
        """
        kind = torch.uint32 if dtype is None else dtype
        start = _start("get_signal_pad", kind, storage_offset)
        shape = sizes if len(sizes) else (max(self.signal_pad_size - start, 0) // kind.itemsize,)
        return self._tensor("get_signal_pad", self._signal_pads, rank, shape, kind, start)

    def _tensor(
        self, operation: str, known: dict[int, Any], rank: int, sizes: Sequence[int], dtype: torch.dtype, start: int
    ) -> torch.Tensor:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise InvalidArgumentError(
                f"{operation}: rank is {rank!r}; the ranks of group {self.group_name!r} are 0 to {self.world_size - 1}"
            )
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise InvalidArgumentError(f"{operation}: sizes is {sizes!r}; give a shape, such as (4, 2)")
        pads = known is self._signal_pads
        nbytes, end = self.signal_pad_size if pads else self.buffer_size, start + prod(sizes) * dtype.itemsize
        if end > nbytes:
            raise InvalidArgumentError(
                f"{operation}: {list(sizes)} elements of {dtype} from byte {start} on need {end} bytes; the "
                f"{'signal pad' if pads else 'block'} of rank {rank} in group {self.group_name!r} has {nbytes}"
            )
        if end == start:  # torch refuses empty buffers, and there is nothing to share
            return torch.empty(tuple(sizes), dtype=dtype, device=self.device)
        memory = known.get(rank)
        if self._on_host:
            if memory is None:
                memory = known[rank] = self.symm.signal_pad(rank) if pads else self.symm.buffer(rank)
            return torch.frombuffer(memory, dtype=dtype, count=prod(sizes), offset=start).view(tuple(sizes))
        if memory is None:
            memory = known[rank] = (self.symm.signal_pad_ptrs if pads else self.symm.buffer_ptrs)[rank]
        owner = _cuda.StreamGuardedRef(self.symm, self.device)
        storage = _cuda.storage_at(memory + start, end - start, self.device, owner)
        return _cuda.tensor_of(storage, dtype, tuple(sizes))

    def stream(self) -> int:
        """The stream for a collective of `symm`: torch's current one, ordered after earlier calls. 0 on CPU."""
        return 0 if self._on_host else self._order.next(self.device, "collective")

    def _signals(self, *use: Hashable) -> int | None:
        """The stream for a signal or barrier; None on CPU."""
        return None if self._on_host else self._order.next(self.device, use)

    # ---- signals --------------------------------------------------------------------------------

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Send one signal to a rank. Never blocks. Not collective.

        Args:
            dst_rank: The receiver.
            channel: A channel below `signal_channels`; channels are independent.
            timeout_ms: Ignored; torch has it.

        Raises:
            InvalidArgumentError: There is no such rank or channel.
            RevokedError: The group failed before.
        """
        try:
            self.symm.put_signal(dst_rank, channel, stream=self._signals("put", dst_rank, channel))
        except PhalanxError as error:
            self._group.with_global_ranks(error)
            raise

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for one signal of a rank. Not collective.

        Args:
            src_rank: The sender.
            channel: A channel below `signal_channels`.
            timeout_ms: The timeout in milliseconds.

        Raises:
            WaitTimeoutError: It did not come; the text names the sender. No signal was taken.
            PeerDeadError: The sender died.
            InvalidArgumentError: There is no such rank or channel.
        """
        try:
            self.symm.wait_signal(src_rank, channel, timeout_ms, stream=self._signals("wait", src_rank, channel))
        except PhalanxError as error:
            self._group.with_global_ranks(error)
            raise

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait until every rank has come to this barrier. Collective.

        Args:
            channel: A channel below `signal_channels`; independent of other channels and of the signals.
            timeout_ms: The timeout in milliseconds.

        Raises:
            WaitTimeoutError: The text names a rank that did not come. A repeated call continues the same barrier.
            PeerDeadError: A rank died.
            InvalidArgumentError: There is no such channel.
        """
        try:
            self.symm.barrier(channel, timeout_ms, stream=self._signals("barrier", channel))
        except PhalanxError as error:
            self._group.with_global_ranks(error)
            raise

    has_multicast_support = staticmethod(_cuda.has_multicast_support)

    @staticmethod
    def stream_write_value32(input: torch.Tensor, offset: int, val: int) -> torch.Tensor:  # noqa: A002 - torch's name
        """Write a word, ordered with the other work of this rank. Not collective.

        Args:
            input: A contiguous tensor with elements of 32 bits, such as that of `get_signal_pad`.
            offset: Index of the word.
            val: The value, -2^31 to 2^32 - 1.

        Returns:
            The tensor.

        Raises:
            InvalidArgumentError: An argument is wrong.
        """
        written: torch.Tensor = torch.ops.phalanx.stream_write_value32_(input, offset, val)
        return written

    @staticmethod
    def memset32(input: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:  # noqa: A002
        """Write several words with one value, as `stream_write_value32`. Not collective.

        Args:
            input, offset, val: As in `stream_write_value32`; `offset` is the first word.
            count: The number of words.

        Returns:
            `input`.

        Raises:
            InvalidArgumentError: As in `stream_write_value32`.
        """
        written: torch.Tensor = torch.ops.phalanx.memset32_(input, offset, val, count)
        return written

    def __repr__(self) -> str:
        return (
            f"SymmetricMemory(rank {self.rank} of {self.world_size} in group {self.group_name!r}, "
            f"{self.buffer_size} bytes on {self.device}, offset {self.offset})"
        )


class Handles:
    """The handles of one allocation.

    Attributes:
        by_place: The handles, by group and byte offset.
        orders: The order of their work on streams, by group.
    """

    def __init__(self) -> None:
        self.by_place: dict[tuple[RankGroup, int], SymmetricMemory] = {}
        self.orders: dict[RankGroup, _cuda.StreamOrder] = {}


HANDLES: Slot[Handles] = Slot(Handles)  # of an allocation
# All handles of a rank context. They are changed and iterated under its lock.
LIVE_HANDLES: Slot[WeakSet[SymmetricMemory]] = Slot(WeakSet)


def get(dst: torch.Tensor, hdl: SymmetricMemory, peer: int, offset: int = 0) -> None:
    """Copy from the memory of a rank into a tensor. Not collective.

    As `torch.distributed._symmetric_memory.get`. What the peer wrote is there after a barrier, or after a signal that
    it sent.

    Args:
        dst: A contiguous tensor on the device of the handle. Its number of elements is how much is copied.
        hdl: A handle of `rendezvous`.
        peer: The owner's position in the group.
        offset: Elements of the dtype of `dst` from the start of the peer's counterpart of the tensor given to
            `rendezvous`.

    Raises:
        InvalidArgumentError: There is no such rank, the elements are not all in its block, or an argument is of the
            wrong kind.

    Example:
        >>> shared, copy = empty(4).fill_(rank), torch.empty(2)
        >>> handle = rendezvous(shared, group)
        >>> handle.barrier()
        >>> get(copy, handle, 1, offset=2)
        >>> copy
        tensor([1., 1.])
    """
    _check_handle("get", hdl)
    if not isinstance(dst, torch.Tensor) or dst.device != hdl.device or not dst.is_contiguous():
        given = f"on {dst.device} with strides {dst.stride()}" if isinstance(dst, torch.Tensor) else repr(dst)
        raise InvalidArgumentError(f"get: dst is {given}; give a contiguous tensor on {hdl.device}")
    if not isinstance(offset, int) or offset < 0:
        raise InvalidArgumentError(f"get: offset is {offset!r}; give a number of elements, at least 0")
    if hdl.offset % dst.element_size():
        raise InvalidArgumentError(
            f"get: the tensor starts at byte {hdl.offset}, which is no multiple of the {dst.element_size()} bytes of "
            f"{dst.dtype}; use a dtype that fits"
        )
    start = hdl.offset // dst.element_size() + offset
    dst.detach().copy_(hdl.get_buffer(peer, dst.shape, dst.dtype, start))


def put_signal(src: torch.Tensor, hdl: SymmetricMemory, peer: int) -> None:
    """Copy a tensor into the memory of a rank, then send that rank a signal. Never blocks. Not collective.

    As `torch.distributed._symmetric_memory.put_signal`. The signal is sent on channel 0 of the handle;
    `SymmetricMemory.wait_signal` receives it, too.

    Args:
        src: The tensor, of any strides, on the device of the handle. It is copied, contiguous and in its dtype, to the
            start of the peer's counterpart of the tensor given to `rendezvous`.
        hdl: A handle of `rendezvous`.
        peer: The receiver's position in the group.

    Raises:
        InvalidArgumentError: There is no such rank, `src` does not fit into its block, or an argument is of the wrong
            kind. Nothing was copied.
        RevokedError: The group failed before.

    Example:
        >>> inbox = empty(2)
        >>> handle = rendezvous(inbox, group)
        >>> put_signal(torch.full((2,), rank + 1.0), handle, 1 - rank)
        >>> wait_signal(handle, 1 - rank)
        >>> inbox  # on rank 1
        tensor([1., 1.])
    """
    _check_handle("put_signal", hdl)
    if not isinstance(src, torch.Tensor) or src.device != hdl.device:
        raise InvalidArgumentError(
            f"put_signal: src is {f'on {src.device}' if isinstance(src, torch.Tensor) else repr(src)}; give a tensor "
            f"on {hdl.device}"
        )
    hdl.get_remote_tensor(peer, src.shape, src.dtype).copy_(src.detach())
    hdl.put_signal(peer)


def wait_signal(hdl: SymmetricMemory, peer: int) -> None:
    """Wait for a signal of a rank. The rank's earlier puts are then in this rank's memory. Not collective.

    As `torch.distributed._symmetric_memory.wait_signal`; `SymmetricMemory.wait_signal` takes a channel and a timeout.

    Args:
        hdl: A handle of `rendezvous`.
        peer: The sender's position in the group.

    Raises:
        WaitTimeoutError, PeerDeadError, InvalidArgumentError: As `SymmetricMemory.wait_signal`.

    Example:
        >>> handle = rendezvous(empty(2), group)
        >>> handle.put_signal(1 - rank)
        >>> wait_signal(handle, 1 - rank)
    """
    _check_handle("wait_signal", hdl)
    hdl.wait_signal(peer)


def _start(operation: str, dtype: torch.dtype, storage_offset: int) -> int:
    """The offset of an element in bytes."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"{operation}: dtype is {dtype!r}; give a torch.dtype")
    if not isinstance(storage_offset, int) or storage_offset < 0:
        raise InvalidArgumentError(
            f"{operation}: storage_offset is {storage_offset!r}; give the number of elements from the start"
        )
    return storage_offset * dtype.itemsize


def _check_handle(operation: str, handle: SymmetricMemory) -> None:
    if not isinstance(handle, SymmetricMemory):
        raise InvalidArgumentError(
            f"{operation}: hdl is a {type(handle).__name__}; give a SymmetricMemory, the result of rendezvous"
        )
