"""Symmetric memory: one allocation as seen by every rank of a group."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

from phalanx.core._call import (
    ABSENT,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    GATHER,
    IN_BLOCKS,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SYMM_OPTIONS,
    AnyCall,
    Blocking,
    CollectiveSpec,
    Nonblocking,
    Operand,
    c_counts,
    c_root,
    c_stream,
    call_async,
    operand,
    resolve,
    resolve_count,
    resolve_dtype,
)
from phalanx.core._group_calls import GroupCalls
from phalanx.core._handle import INT32_MAX, UINT32_MAX, UINT64_MAX, Handle, c_integer, c_timeout, create, view
from phalanx.core._lib import ffi, lib, new_struct
from phalanx.core.dtypes import DType, DTypeLike, ReduceOp, ReduceOpLike, reduce_op_of
from phalanx.core.errors import UnsupportedError, check, raise_last
from phalanx.core.uncopied import Uncopied
from phalanx.core.work import Work

_CPU = 1


class Symm(Uncopied):
    """The blocks of all ranks of a group, mapped here. Made by `Group.rendezvous`.

    Two handles of the same mapping compare equal. The mappings live until the last handle and the
    last view are gone.

    Attributes:
        group: The group whose ranks gave the blocks.
        group_rank: This rank's position in it.
        group_size: Number of ranks.
        size: Bytes of one block, the same on all ranks.
        signal_channels: Number of independent channels of signals and of barriers.
        signal_pad_bytes: Bytes of one rank's signal pad: group_size * pad_stride words.
        pad_stride: Words of a pad from those of one writer to those of the next.

    Example:
        >>> memory = world.alloc(4096)
        >>> symm = group.rendezvous(memory)
        >>> own = memory.buffer().cast("i")  # the block of this rank
    """

    def __init__(self, group: GroupCalls, pointer: Any) -> None:
        # The handle of the group, not the Group: views do not need its Python side.
        what = f"a block of group {group.name!r}"
        self._handle = Handle(pointer, lib.phx_symm_release, what, (group._handle,))
        info = new_struct("phx_symm_info")
        check(lib.phx_symm_get_info(pointer, info))
        self.group = group
        self.group_rank = int(info.group_rank)
        self.group_size = int(info.group_size)
        self.size = int(info.size)
        self.signal_channels = int(info.signal_channels)
        self.signal_pad_bytes = int(info.signal_pad_bytes)
        self.pad_stride = int(info.pad_stride)
        self._base = int(ffi.cast("uintptr_t", info.base))
        self._device_type = int(info.device.type)
        self._team: Any = None

    @property
    def pointer(self) -> Any:
        """The phx_symm pointer, for calls through `lib` and the torch ops."""
        return self._handle.pointer

    # ---- memory of all ranks --------------------------------------------------------------------

    @property
    def buffer_ptrs(self) -> list[int]:
        """Address, here, of the block of each rank."""
        return [self._mapped(lib.phx_symm_buffer, rank) for rank in range(self.group_size)]

    @property
    def signal_pad_ptrs(self) -> list[int]:
        """Address, here, of the signal pad of each rank."""
        return [self._mapped(lib.phx_symm_signal_pad, rank) for rank in range(self.group_size)]

    @property
    def buffer_ptrs_device(self) -> int:
        """Address of an array of the block addresses that the device can read."""
        return self._array("buffers")

    @property
    def signal_pad_ptrs_device(self) -> int:
        """Address of an array of the signal pad addresses that the device can read."""
        return self._array("pads")

    @property
    def team(self) -> int:
        """Address of a phx_team of phalanx/device.h, for kernels in C: what they need to use the memory of all ranks.

        It lives as long as this object.
        """
        return int(ffi.cast("uintptr_t", self._known_team()))

    def buffer(self, group_rank: int) -> memoryview:
        """The block of a rank as writable bytes. The mapping stays while the view is alive.

        Args:
            group_rank: The rank whose block it is.

        Raises:
            InvalidArgumentError: The rank is not in the group.
            UnsupportedError: The blocks are not in host memory.

        Example:
            >>> own[9] = rank + 5
            >>> symm.barrier()
            >>> symm.buffer(1).cast("i")[9]
            6
        """
        return self._view(lib.phx_symm_buffer, group_rank, self.size)

    def signal_pad(self, group_rank: int) -> memoryview:
        """The signal pad of a rank as writable bytes: unsigned 32-bit words.

        Word [r * pad_stride + channel] is written only by group rank r, holds a count that only
        grows (modulo 2^32), and starts at zero. Use a channel either by hand or through
        `put_signal` and `wait_signal`, not both.

        Args:
            group_rank: The rank whose pad it is.

        Raises:
            InvalidArgumentError: The rank is not in the group.
            UnsupportedError: The pads are not in host memory.

        Example:
            >>> symm.signal_pad(rank).nbytes == symm.signal_pad_bytes
            True
        """
        return self._view(lib.phx_symm_signal_pad, group_rank, self.signal_pad_bytes)

    def gathered(self, offset: int, size: int) -> memoryview:
        """The same part of every rank's block once more, one after another by group rank, as one range. Not collective.

        Nothing is copied: what a rank writes to its block is there. A rank that reads the range after a barrier has
        gathered without moving anything; `all_gather` with this range as `out` is such a barrier. To make a range costs
        about as much as to touch its pages; the last few of a handle stay for the next use of the same part.

        Args:
            offset: Where the part starts in every block, in bytes; a multiple of the page size (`mmap.PAGESIZE`).
            size: Bytes of the part; also a multiple of it, and not 0. It may end behind the block, with its last page.

        Returns:
            group_size * size writable bytes. The mapping stays while the view is alive.

        Raises:
            InvalidArgumentError: No whole pages, or outside of the block.
            UnsupportedError: The blocks are not in host memory, or not in pages that can be mapped twice.

        Example:
            >>> whole = symm.gathered(0, mmap.PAGESIZE).cast("i")
            >>> own[8] = rank + 5
            >>> symm.barrier()
            >>> whole[8], whole[mmap.PAGESIZE // 4 + 8]
            (5, 6)
        """
        start, length = c_integer(offset, "offset", 0, UINT64_MAX), c_integer(size, "size", 0, UINT64_MAX)
        symm = self._handle.pointer
        pointer = create("void *", lib.phx_symm_map_gathered, symm, start, length)
        what = f"a gathered range of group {self.group.name!r}"
        handle = Handle(pointer, lambda range_: lib.phx_symm_unmap_gathered(symm, range_), what, (self._handle,))
        return view(int(ffi.cast("uintptr_t", pointer)), self.group_size * length, handle)

    def _mapped(self, function: Callable[..., Any], group_rank: int) -> int:
        rank = c_integer(group_rank, "group_rank", 0, self.group_size - 1)
        pointer = function(self._handle.pointer, rank)
        if pointer == ffi.NULL:
            raise_last()
        return int(ffi.cast("uintptr_t", pointer))

    def _known_team(self) -> Any:
        pointer = self._handle.pointer
        if self._team is None:
            team = new_struct("phx_team")
            check(lib.phx_symm_get_team(pointer, team))
            self._team = team
        return self._team

    def _array(self, member: str) -> int:
        return int(ffi.cast("uintptr_t", getattr(self._known_team(), member)))

    def _view(self, function: Callable[..., Any], group_rank: int, size: int) -> memoryview:
        address = self._mapped(function, group_rank)
        if self._device_type != _CPU:
            raise UnsupportedError("device memory cannot be viewed as bytes on the host; use the addresses")
        return view(address, size, self._handle)

    # ---- signals --------------------------------------------------------------------------------

    def put_signal(self, group_rank: int, channel: int = 0, *, stream: int | None = None) -> None:
        """Send one signal to a rank. Never blocks. Not collective.

        What this rank wrote before is visible to the receiver after its `wait_signal`.

        Args:
            group_rank: The receiver.
            channel: Below `signal_channels`; channels do not disturb each other.
            stream: For blocks on a GPU: a CUstream as an integer, after whose work the signal is sent, to a wait on a
                stream. None sends it now, to a wait on the host.

        Example:
            >>> symm.put_signal(1 - rank)
            >>> symm.wait_signal(1 - rank)
        """
        number = c_integer(channel, "channel", 0, UINT32_MAX)
        rank = c_integer(group_rank, "group_rank", -INT32_MAX, INT32_MAX)
        if stream is None:
            check(lib.phx_symm_put_signal(self._handle.pointer, rank, number))
        else:
            check(lib.phx_symm_enqueue_put_signal(self._handle.pointer, rank, number, c_stream(stream)))

    def wait_signal(self, group_rank: int, channel: int = 0, timeout_ms: int = 0, *, stream: int | None = None) -> None:
        """Wait for one signal of a rank. Not collective.

        Args:
            group_rank: The sender.
            channel: Below `signal_channels`.
            timeout_ms: How long, in milliseconds; 0 is the world's default.
            stream: For blocks on a GPU: a CUstream as an integer, whose next work waits for the signal. This returns,
                and what goes wrong is raised by the next call on the group.

        Raises:
            WaitTimeoutError: It did not come; no signal was taken, so the wait may be repeated.
            PeerDeadError: The sender died.

        Example:
            >>> symm.put_signal(1 - rank, channel=3)
            >>> symm.wait_signal(1 - rank, channel=3, timeout_ms=10_000)
        """
        number = c_integer(channel, "channel", 0, UINT32_MAX)
        rank = c_integer(group_rank, "group_rank", -INT32_MAX, INT32_MAX)
        arguments = (self._handle.pointer, rank, number, c_timeout(timeout_ms))
        if stream is None:
            check(lib.phx_symm_wait_signal(*arguments))
        else:
            check(lib.phx_symm_enqueue_wait_signal(*arguments, c_stream(stream)))

    def barrier(self, channel: int = 0, timeout_ms: int = 0, *, stream: int | None = None) -> None:
        """Wait until every rank has come to this barrier. Collective.

        Args:
            channel: Below `signal_channels`; independent of other channels and of the signals.
            timeout_ms: How long, in milliseconds; 0 is the world's default.
            stream: As in `wait_signal`.

        Raises:
            WaitTimeoutError: Ranks did not come. A repeated call goes on with the same barrier.

        Example:
            >>> symm.barrier()
        """
        arguments = (self._handle.pointer, c_integer(channel, "channel", 0, UINT32_MAX), c_timeout(timeout_ms))
        if stream is None:
            check(lib.phx_symm_barrier(*arguments))
        else:
            check(lib.phx_symm_enqueue_barrier(*arguments, c_stream(stream)))

    # ---- collectives ----------------------------------------------------------------------------

    @overload
    def all_reduce(
        self,
        offset: int,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def all_reduce(
        self,
        offset: int,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def all_reduce(
        self,
        offset: int,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def all_reduce(
        self,
        offset: int,
        out: Any = None,
        count: int | None = None,
        dtype: DTypeLike = None,
        op: ReduceOpLike = ReduceOp.SUM,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """`Group.all_reduce` with the input in the blocks: no copy into staging. Collective.

        Args:
            offset: Where the input starts in every rank's block, in bytes; the same on all.
            out: `count` elements; ordinary memory, or this rank's own block at the same offset. None is that block:
                in place; then count and dtype are needed.
            count, dtype, op: As in `Group.all_reduce`.
            options: `blocking=False` to return a Work at once, and those of `CallOptions` but `device`.

        Raises:
            As `Group.all_reduce`.

        Example:
            >>> own[0] = rank + 1
            >>> symm.all_reduce(0, count=1, dtype="int32")
            >>> own[0]
            3
        """
        if out is None:
            start = c_integer(offset, "offset", 0, self.size)
            own = ffi.cast("void *", self._base + start)
            out_side, kind = Operand(own, None, None, None), resolve_dtype(dtype, ())
            arguments = (start, own, resolve_count(count, kind.itemsize, ()), kind, reduce_op_of(op))
            return self._call(lib.phx_symm_all_reduce, arguments, out_side, options)
        return self._collective(ALL_REDUCE, offset, out, count, dtype, (reduce_op_of(op),), options)

    @overload
    def all_gather(
        self, offset: int, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_gather(
        self, offset: int, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[Nonblocking]
    ) -> Work: ...
    @overload
    def all_gather(
        self, offset: int, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[AnyCall]
    ) -> Work | None: ...
    def all_gather(
        self, offset: int, out: Any, count: int | None = None, dtype: DTypeLike = None, **options: Unpack[AnyCall]
    ) -> Work | None:
        """`Group.all_gather` with the input in the blocks: no copy into staging. Collective.

        Args:
            out: group_size * `count` elements of ordinary memory.
            count, dtype: As in `Group.all_gather`.
            offset, options: As for `all_reduce`.

        Raises:
            As `Group.all_gather`.

        Example:
            >>> own[0], out = rank + 5, array("i", [0, 0])
            >>> symm.all_gather(0, out)
            >>> out
            array('i', [5, 6])
        """
        return self._collective(ALL_GATHER, offset, out, count, dtype, (), options)

    @overload
    def all_gather_v(
        self, offset: int, out: Any, counts: Sequence[int], dtype: DTypeLike = ..., **options: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_gather_v(
        self, offset: int, out: Any, counts: Sequence[int], dtype: DTypeLike = ..., **options: Unpack[Nonblocking]
    ) -> Work: ...
    @overload
    def all_gather_v(
        self, offset: int, out: Any, counts: Sequence[int], dtype: DTypeLike = ..., **options: Unpack[AnyCall]
    ) -> Work | None: ...
    def all_gather_v(
        self, offset: int, out: Any, counts: Sequence[int], dtype: DTypeLike = None, **options: Unpack[AnyCall]
    ) -> Work | None:
        """`Group.all_gather_v` with the input in the blocks: no copy into staging. Collective.

        Args:
            out: The blocks of all ranks, one after another, in ordinary memory.
            counts, dtype: As in `Group.all_gather_v`.
            offset, options: As for `all_reduce`.

        Raises:
            As `Group.all_gather_v`.

        Example:
            >>> own[0], own[1], out = rank + 5, 9, array("i", [0, 0, 0])
            >>> symm.all_gather_v(0, out, [1, 2])
            >>> out
            array('i', [5, 6, 9])
        """
        start, out_side = c_integer(offset, "offset", 0, UINT64_MAX), operand(out, "out", True)
        kind = resolve_dtype(dtype, (out_side,))
        listed = c_counts(counts, "counts", self, kind, ("out", out_side, -1))
        arguments = (start, out_side.pointer, listed, kind)
        return self._call(lib.phx_symm_all_gather_v, arguments, out_side, options)

    @overload
    def reduce_scatter(
        self,
        offset: int,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def reduce_scatter(
        self,
        offset: int,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self,
        offset: int,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def reduce_scatter(
        self,
        offset: int,
        out: Any,
        count: int | None = None,
        dtype: DTypeLike = None,
        op: ReduceOpLike = ReduceOp.SUM,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """`Group.reduce_scatter` with the input in the blocks: no copy into staging. Collective.

        Args:
            out: `count` elements of ordinary memory.
            count, dtype, op: As in `Group.reduce_scatter`.
            offset, options: As for `all_reduce`.

        Raises:
            As `Group.reduce_scatter`.

        Example:
            >>> own[0], own[1], out = 1, 2, array("i", [0])
            >>> symm.reduce_scatter(0, out)
            >>> out  # on rank 1
            array('i', [4])
        """
        return self._collective(REDUCE_SCATTER, offset, out, count, dtype, (reduce_op_of(op),), options)

    @overload
    def reduce_scatter_v(
        self,
        offset: int,
        out: Any,
        counts: Sequence[int],
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def reduce_scatter_v(
        self,
        offset: int,
        out: Any,
        counts: Sequence[int],
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def reduce_scatter_v(
        self,
        offset: int,
        out: Any,
        counts: Sequence[int],
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def reduce_scatter_v(
        self,
        offset: int,
        out: Any,
        counts: Sequence[int],
        dtype: DTypeLike = None,
        op: ReduceOpLike = ReduceOp.SUM,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """`Group.reduce_scatter_v` with the input in the blocks: no copy into staging. Collective.

        Args:
            out: `counts[group_rank]` elements of ordinary memory.
            counts, dtype, op: As in `Group.reduce_scatter_v`.
            offset, options: As for `all_reduce`.

        Raises:
            As `Group.reduce_scatter_v`.

        Example:
            >>> own[0], own[1], own[2], out = 1, 2, 3, array("i", [0] * (rank + 1))
            >>> symm.reduce_scatter_v(0, out, [1, 2])
            >>> out  # on rank 1
            array('i', [4, 6])
        """
        start, out_side = c_integer(offset, "offset", 0, UINT64_MAX), operand(out, "out", True)
        kind = resolve_dtype(dtype, (out_side,))
        listed = c_counts(counts, "counts", self, kind, ("out", out_side, self.group_rank))
        arguments = (start, out_side.pointer, listed, kind, reduce_op_of(op))
        return self._call(lib.phx_symm_reduce_scatter_v, arguments, out_side, options)

    @overload
    def all_to_all(
        self, offset: int, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_to_all(
        self, offset: int, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[Nonblocking]
    ) -> Work: ...
    @overload
    def all_to_all(
        self, offset: int, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[AnyCall]
    ) -> Work | None: ...
    def all_to_all(
        self, offset: int, out: Any, count: int | None = None, dtype: DTypeLike = None, **options: Unpack[AnyCall]
    ) -> Work | None:
        """`Group.all_to_all` with the input in the blocks: no copy into staging. Collective.

        Args:
            out: group_size * `count` elements of ordinary memory.
            count, dtype: As in `Group.all_to_all`.
            offset, options: As for `all_reduce`.

        Raises:
            As `Group.all_to_all`.

        Example:
            >>> own[0], own[1], out = 10 * rank, 10 * rank + 1, array("i", [0, 0])
            >>> symm.all_to_all(0, out)
            >>> out  # on rank 1
            array('i', [1, 11])
        """
        return self._collective(ALL_TO_ALL, offset, out, count, dtype, (), options)

    @overload
    def all_to_all_v(
        self,
        offset: int,
        source_counts: Sequence[int],
        out: Any,
        out_counts: Sequence[int],
        dtype: DTypeLike = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def all_to_all_v(
        self,
        offset: int,
        source_counts: Sequence[int],
        out: Any,
        out_counts: Sequence[int],
        dtype: DTypeLike = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def all_to_all_v(
        self,
        offset: int,
        source_counts: Sequence[int],
        out: Any,
        out_counts: Sequence[int],
        dtype: DTypeLike = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def all_to_all_v(
        self,
        offset: int,
        source_counts: Sequence[int],
        out: Any,
        out_counts: Sequence[int],
        dtype: DTypeLike = None,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """`Group.all_to_all_v` with the input in the blocks: no copy into staging. Collective.

        Args:
            out: Blocks one after another, one from each group rank, in ordinary memory.
            source_counts, out_counts, dtype: As in `Group.all_to_all_v`.
            offset, options: As for `all_reduce`.

        Raises:
            As `Group.all_to_all_v`.

        Example:
            >>> own[0], own[1], own[2], out = 5, 6, 7, array("i", [0] * 2 * (rank + 1))
            >>> symm.all_to_all_v(0, [1, 2], out, [rank + 1] * 2)
            >>> out  # on rank 1
            array('i', [6, 7, 6, 7])
        """
        start, out_side = c_integer(offset, "offset", 0, UINT64_MAX), operand(out, "out", True)
        kind = resolve_dtype(dtype, (out_side,))
        sent = c_counts(source_counts, "source_counts", self, kind)
        received = c_counts(out_counts, "out_counts", self, kind, ("out", out_side, -1))
        arguments = (start, sent, out_side.pointer, received, kind)
        return self._call(lib.phx_symm_all_to_all_v, arguments, out_side, options)

    @overload
    def broadcast(
        self, offset: int, count: int, dtype: DType | int | str, root_group_rank: int = ..., **options: Unpack[Blocking]
    ) -> None: ...
    @overload
    def broadcast(
        self,
        offset: int,
        count: int,
        dtype: DType | int | str,
        root_group_rank: int = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def broadcast(
        self, offset: int, count: int, dtype: DType | int | str, root_group_rank: int = ..., **options: Unpack[AnyCall]
    ) -> Work | None: ...
    def broadcast(
        self, offset: int, count: int, dtype: DType | int | str, root_group_rank: int = 0, **options: Unpack[AnyCall]
    ) -> Work | None:
        """`Group.broadcast` inside the blocks, in place on every rank. Collective.

        Args:
            offset: Where the elements start in every rank's block, in bytes; the same on all.
            count, dtype, root_group_rank: As in `Group.broadcast`.
            options: As for `all_reduce`.

        Raises:
            As `Group.broadcast`.

        Example:
            >>> own[0] = rank
            >>> symm.broadcast(0, 1, "int32", root_group_rank=1)
            >>> own[0]
            1
        """
        start = c_integer(offset, "offset", 0, UINT64_MAX)
        kind = resolve_dtype(dtype, ())
        arguments = (start, resolve_count(count, kind.itemsize, ()), kind, c_root(root_group_rank, self))
        return self._call(lib.phx_symm_broadcast, arguments, ABSENT, options)

    @overload
    def reduce(
        self,
        offset: int,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def reduce(
        self,
        offset: int,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def reduce(
        self,
        offset: int,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def reduce(
        self,
        offset: int,
        out: Any = None,
        count: int | None = None,
        dtype: DTypeLike = None,
        op: ReduceOpLike = ReduceOp.SUM,
        root_group_rank: int = 0,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """`Group.reduce` with the input in the blocks: no copy into staging. Collective.

        Args:
            out: `count` elements of ordinary memory on the root; not looked at elsewhere, where count and dtype are
                needed.
            count, dtype, op, root_group_rank: As in `Group.reduce`.
            offset, options: As for `all_reduce`.

        Raises:
            As `Group.reduce`.

        Example:
            >>> own[0], out = rank + 1, array("i", [0])
            >>> symm.reduce(0, out, 1, "int32", "max")
            >>> out  # on rank 0
            array('i', [2])
        """
        root = c_root(root_group_rank, self)
        return self._collective(REDUCE, offset, out, count, dtype, (reduce_op_of(op), root), options, root)

    @overload
    def gather(
        self,
        offset: int,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def gather(
        self,
        offset: int,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def gather(
        self,
        offset: int,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def gather(
        self,
        offset: int,
        out: Any = None,
        count: int | None = None,
        dtype: DTypeLike = None,
        root_group_rank: int = 0,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """`Group.gather` with the input in the blocks: no copy into staging. Collective.

        Args:
            out: group_size * `count` elements of ordinary memory on the root; not looked at elsewhere, where count
                and dtype are needed.
            count, dtype, root_group_rank: As in `Group.gather`.
            offset, options: As for `all_reduce`.

        Raises:
            As `Group.gather`.

        Example:
            >>> own[0], out = rank + 5, array("i", [0, 0])
            >>> symm.gather(0, out, 1, "int32")
            >>> out  # on rank 0
            array('i', [5, 6])
        """
        root = c_root(root_group_rank, self)
        return self._collective(GATHER, offset, out, count, dtype, (root,), options, root)

    @overload
    def scatter(
        self,
        offset: int,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def scatter(
        self,
        offset: int,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def scatter(
        self,
        offset: int,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def scatter(
        self,
        offset: int,
        out: Any,
        count: int | None = None,
        dtype: DTypeLike = None,
        root_group_rank: int = 0,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """`Group.scatter` with the input in the root's block: no copy into staging. Collective.

        Args:
            out: `count` elements of ordinary memory.
            count, dtype, root_group_rank: As in `Group.scatter`.
            offset, options: As for `all_reduce`.

        Raises:
            As `Group.scatter`.

        Example:
            >>> own[0], own[1], out = 5, 6, array("i", [0])
            >>> symm.scatter(0, out)
            >>> out  # on rank 1
            array('i', [6])
        """
        root = c_root(root_group_rank, self)
        return self._collective(SCATTER, offset, out, count, dtype, (root,), options, root)

    def _collective(
        self,
        spec: CollectiveSpec,
        offset: int,
        out: Any,
        count: int | None,
        dtype: DTypeLike,
        more: tuple[int, ...],
        options: AnyCall,
        root: int | None = None,
    ) -> Work | None:
        start = c_integer(offset, "offset", 0, UINT64_MAX)  # the core checks whether the input lies inside the block
        sides = resolve(spec, self, IN_BLOCKS, out, count, dtype, root)
        arguments = (start, sides.out.pointer, sides.n, sides.dtype, *more)
        return self._call(spec.symmetric, arguments, sides.out, options)

    def _call(
        self, function: Callable[..., int], arguments: tuple[Any, ...], out_side: Operand, options: AnyCall
    ) -> Work | None:
        whole = (self._handle.pointer, *arguments)
        return call_async(function, whole, self._handle, self.group._orphans, (out_side,), options, SYMM_OPTIONS)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Symm) and bool(self._handle._pointer == other._handle._pointer)

    def __hash__(self) -> int:
        return hash(self._handle._pointer)

    def __repr__(self) -> str:
        return f"Symm({self.size} bytes on {self.group!r})"
