"""The calls of a group: its collectives and messages."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Unpack, overload

from phalanx.core._blocks import is_list, resolve_blocks
from phalanx.core._call import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    CALL_OPTIONS,
    GATHER,
    MESSAGE_OPTIONS,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    AnyCall,
    AnyMessage,
    Blocking,
    BlockingMessage,
    CollectiveSpec,
    MessageOptions,
    Nonblocking,
    NonblockingMessage,
    Operand,
    c_counts,
    c_options,
    c_root,
    call_async,
    operand,
    resolve,
    resolve_dtype,
    resolve_one,
)
from phalanx.core._handle import UINT32_MAX, Handle, c_integer
from phalanx.core._lib import ffi, lib, new_struct
from phalanx.core.dtypes import ANY_RANK, DTypeLike, ReduceOp, ReduceOpLike, reduce_op_of
from phalanx.core.errors import InvalidArgumentError, check
from phalanx.core.memory import Device, Memory, WorldOfMemory, device_of
from phalanx.core.message import Message
from phalanx.core.store import Store
from phalanx.core.uncopied import Uncopied
from phalanx.core.work import OrphanedWorks, Work

REDUCTION_ORDERS = ("hosts", "ranks")  # PHX_REDUCTION_ORDER_HOSTS and PHX_REDUCTION_ORDER_RANKS, less 1


class WorldOfGroup(WorldOfMemory, Protocol):
    """What a group knows of its `World`, which is made of groups and so cannot be named here."""

    def alloc(
        self, size: int, *, alloc_id: int | None = None, scope: str | None = None, device: Device = ("cpu", 0)
    ) -> Memory:
        """`World.alloc`."""

    def dump(self) -> str:
        """`World.dump`."""

    def abort(self, reason: str) -> None:
        """`World.abort`."""

    def finalize(self) -> None:
        """`World.finalize`."""


class GroupCalls(Uncopied):
    """The part of a `Group` that moves data. What is made of groups (`Symm`, `Coalesced`) builds on it."""

    def __init__(self, world: WorldOfGroup, pointer: Any, store: Store | None = None) -> None:
        # First of all the handle, so that the pointer cannot leak; it learns the name later.
        owners = (world._handle,) if store is None else (world._handle, store._handle)
        self._handle = Handle(pointer, lib.phx_group_release, "this group", owners)
        self._orphans = OrphanedWorks(self._handle)
        info = self._info()
        self.world = world
        self.name: str = ffi.string(info.name).decode("utf-8", "replace")
        self._handle.what = f"group {self.name!r}"
        self.group_rank = int(info.group_rank)
        self.group_size = int(info.group_size)
        self.ranks: tuple[int, ...] = tuple(info.ranks[0 : self.group_size])
        self.id = int(info.id)
        self.channels = int(info.channels)
        self.hosts = int(info.hosts)
        self.reduction_order = REDUCTION_ORDERS[info.reduction_order - 1]

    def _info(self) -> Any:
        info = new_struct("phx_group_info")
        check(lib.phx_group_get_info(self._handle.pointer, info))
        return info

    @property
    def pointer(self) -> Any:
        """The phx_group pointer, for calls through `lib` and the torch ops."""
        return self._handle.pointer

    def barrier(self, timeout_ms: int = 0, *, device: Device | None = None, stream: int = 0) -> None:
        """Wait until every rank of the group has come here. Collective.

        Args:
            timeout_ms: How long, in milliseconds; 0 is the world's default.
            device: None for the host. With a GPU, such as ("cuda", 0), it is a barrier of streams: this returns, and
                what precedes it on any rank's stream is done when what follows it on another's begins.
            stream: The stream of the GPU: a CUstream as an integer; 0 is the default stream.

        Raises:
            WaitTimeoutError: Ranks did not come; the text names them.

        Example:
            >>> group.barrier()
        """
        options = ffi.NULL
        if timeout_ms != 0 or device is not None or stream != 0:
            options = c_options({"timeout_ms": timeout_ms, "device": device, "stream": stream})
        check(lib.phx_barrier(self._handle.pointer, options, ffi.NULL))

    # ---- collectives that reduce ----------------------------------------------------------------

    @overload
    def all_reduce(
        self,
        source: Any,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def all_reduce(
        self,
        source: Any,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def all_reduce(
        self,
        source: Any,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def all_reduce(
        self,
        source: Any,
        out: Any = None,
        count: int | None = None,
        dtype: DTypeLike = None,
        op: ReduceOpLike = ReduceOp.SUM,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """Reduce element by element over all ranks; every rank gets the same bits. Collective.

        Args:
            source: `count` elements.
            out: `count` elements; may be the source. None is the source: in place.
            count: Elements.
            dtype: Their type.
            op: The reduction.
            options: `blocking=False` to return a Work at once, and those of `CallOptions`.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.

        Example:
            >>> x = array("f", [rank + 1, 0.5])
            >>> group.all_reduce(x)
            >>> x
            array('f', [3.0, 1.0])
        """
        target = source if out is None else out
        return self._collective(ALL_REDUCE, source, target, count, dtype, (reduce_op_of(op),), options)

    @overload
    def reduce_scatter(
        self,
        source: Any,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def reduce_scatter(
        self,
        source: Any,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self,
        source: Any,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def reduce_scatter(
        self,
        source: Any,
        out: Any,
        count: int | None = None,
        dtype: DTypeLike = None,
        op: ReduceOpLike = ReduceOp.SUM,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """Reduce over all ranks and give block r of the result to group rank r. Collective.

        Args:
            source: group_size * `count` elements; or a list of buffers, one for each rank, which may differ in length.
            out: `count` elements.
            count: Elements of one block; None with a list.
            dtype, op, options: As for `all_reduce`.

        Raises:
            As `all_reduce`.

        Example:
            >>> out = array("i", [0])
            >>> group.reduce_scatter(array("i", [1, 2]), out)
            >>> out  # on rank 1
            array('i', [4])
        """
        return self._collective(REDUCE_SCATTER, source, out, count, dtype, (reduce_op_of(op),), options)

    @overload
    def reduce_scatter_v(
        self,
        source: Any,
        out: Any,
        counts: Sequence[int],
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def reduce_scatter_v(
        self,
        source: Any,
        out: Any,
        counts: Sequence[int],
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def reduce_scatter_v(
        self,
        source: Any,
        out: Any,
        counts: Sequence[int],
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def reduce_scatter_v(
        self,
        source: Any,
        out: Any,
        counts: Sequence[int],
        dtype: DTypeLike = None,
        op: ReduceOpLike = ReduceOp.SUM,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """`reduce_scatter` with blocks of different lengths. Collective.

        Args:
            source: The blocks for all ranks, one after another.
            out: `counts[group_rank]` elements.
            counts: Elements that go to each group rank; the same list on all ranks.
            dtype, op, options: As for `all_reduce`.

        Raises:
            As `all_reduce`.

        Example:
            >>> out = array("i", [0] * (rank + 1))
            >>> group.reduce_scatter_v(array("i", [1, 2, 3]), out, [1, 2])
            >>> out  # on rank 1
            array('i', [4, 6])
        """
        source_side, out_side = operand(source, "source", False), operand(out, "out", True)
        kind = resolve_dtype(dtype, (source_side, out_side))
        listed = c_counts(counts, "counts", self, kind, ("source", source_side, -1), ("out", out_side, self.group_rank))
        arguments = (source_side.pointer, out_side.pointer, listed, kind, reduce_op_of(op))
        return self._call(lib.phx_reduce_scatter_v, arguments, (source_side, out_side), options)

    @overload
    def reduce(
        self,
        source: Any,
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
        source: Any,
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
        source: Any,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        op: ReduceOpLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def reduce(
        self,
        source: Any,
        out: Any = None,
        count: int | None = None,
        dtype: DTypeLike = None,
        op: ReduceOpLike = ReduceOp.SUM,
        root_group_rank: int = 0,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """`all_reduce` of which only the root gets the result. Collective.

        Args:
            source: `count` elements.
            out: `count` elements on the root, where it may be the source; not looked at elsewhere.
            root_group_rank: The rank that gets the result.
            count, dtype, op, options: As for `all_reduce`.

        Raises:
            As `all_reduce`.

        Example:
            >>> x = array("i", [rank + 1])
            >>> group.reduce(x, x, op="max")
            >>> x  # on rank 0
            array('i', [2])
        """
        root = c_root(root_group_rank, self)
        return self._collective(REDUCE, source, out, count, dtype, (reduce_op_of(op), root), options, root)

    # ---- collectives that move ------------------------------------------------------------------

    @overload
    def all_gather(
        self, source: Any, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_gather(
        self, source: Any, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[Nonblocking]
    ) -> Work: ...
    @overload
    def all_gather(
        self, source: Any, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[AnyCall]
    ) -> Work | None: ...
    def all_gather(
        self, source: Any, out: Any, count: int | None = None, dtype: DTypeLike = None, **options: Unpack[AnyCall]
    ) -> Work | None:
        """Concatenate the inputs of all ranks in group rank order. Collective.

        Args:
            source: `count` elements.
            out: group_size * `count` elements; or a list of buffers, one for each rank, which may differ in length.
            count: Elements of one rank; None with a list.
            dtype, options: As for `all_reduce`.

        Raises:
            As `all_reduce`.

        Example:
            >>> out = array("i", [0, 0])
            >>> group.all_gather(array("i", [rank + 5]), out)
            >>> out
            array('i', [5, 6])
        """
        return self._collective(ALL_GATHER, source, out, count, dtype, (), options)

    @overload
    def all_gather_v(
        self, source: Any, out: Any, counts: Sequence[int], dtype: DTypeLike = ..., **options: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_gather_v(
        self, source: Any, out: Any, counts: Sequence[int], dtype: DTypeLike = ..., **options: Unpack[Nonblocking]
    ) -> Work: ...
    @overload
    def all_gather_v(
        self, source: Any, out: Any, counts: Sequence[int], dtype: DTypeLike = ..., **options: Unpack[AnyCall]
    ) -> Work | None: ...
    def all_gather_v(
        self, source: Any, out: Any, counts: Sequence[int], dtype: DTypeLike = None, **options: Unpack[AnyCall]
    ) -> Work | None:
        """`all_gather` with blocks of different lengths. Collective.

        Args:
            source: `counts[group_rank]` elements.
            out: The blocks of all ranks, one after another.
            counts: Elements that come from each group rank; the same list on all ranks.
            dtype, options: As for `all_reduce`.

        Raises:
            As `all_reduce`.

        Example:
            >>> out = array("i", [0, 0, 0])
            >>> group.all_gather_v(array("i", [rank + 5] * (rank + 1)), out, [1, 2])
            >>> out
            array('i', [5, 6, 6])
        """
        source_side, out_side = operand(source, "source", False), operand(out, "out", True)
        kind = resolve_dtype(dtype, (source_side, out_side))
        listed = c_counts(counts, "counts", self, kind, ("source", source_side, self.group_rank), ("out", out_side, -1))
        arguments = (source_side.pointer, out_side.pointer, listed, kind)
        return self._call(lib.phx_all_gather_v, arguments, (source_side, out_side), options)

    @overload
    def all_to_all(
        self, source: Any, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_to_all(
        self, source: Any, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[Nonblocking]
    ) -> Work: ...
    @overload
    def all_to_all(
        self, source: Any, out: Any, count: int | None = ..., dtype: DTypeLike = ..., **options: Unpack[AnyCall]
    ) -> Work | None: ...
    def all_to_all(
        self, source: Any, out: Any, count: int | None = None, dtype: DTypeLike = None, **options: Unpack[AnyCall]
    ) -> Work | None:
        """Send block r of the input to group rank r, and get one block from each. Collective.

        Args:
            source: group_size * `count` elements.
            out: group_size * `count` elements; block r comes from group rank r. Or both are lists of buffers, one for
                each rank, which may differ in length.
            count: Elements of one block; None with lists.
            dtype, options: As for `all_reduce`.

        Raises:
            As `all_reduce`.

        Example:
            >>> out = array("i", [0, 0])
            >>> group.all_to_all(array("i", [10 * rank, 10 * rank + 1]), out)
            >>> out  # on rank 1
            array('i', [1, 11])
        """
        return self._collective(ALL_TO_ALL, source, out, count, dtype, (), options)

    @overload
    def all_to_all_v(
        self,
        source: Any,
        source_counts: Sequence[int],
        out: Any,
        out_counts: Sequence[int],
        dtype: DTypeLike = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def all_to_all_v(
        self,
        source: Any,
        source_counts: Sequence[int],
        out: Any,
        out_counts: Sequence[int],
        dtype: DTypeLike = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def all_to_all_v(
        self,
        source: Any,
        source_counts: Sequence[int],
        out: Any,
        out_counts: Sequence[int],
        dtype: DTypeLike = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def all_to_all_v(
        self,
        source: Any,
        source_counts: Sequence[int],
        out: Any,
        out_counts: Sequence[int],
        dtype: DTypeLike = None,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """`all_to_all` with blocks of different lengths. Collective.

        Args:
            source: Blocks one after another, one for each group rank.
            source_counts: Elements of each; entry j must equal `out_counts[this rank]` on rank j.
            out: Blocks one after another, one from each group rank.
            out_counts: Elements of each.
            dtype, options: As for `all_reduce`.

        Raises:
            As `all_reduce`.

        Example:
            >>> out = array("i", [0] * 2 * (rank + 1))
            >>> group.all_to_all_v(array("i", [5, 6, 7]), [1, 2], out, [rank + 1] * 2)
            >>> out  # on rank 1
            array('i', [6, 7, 6, 7])
        """
        source_side, out_side = operand(source, "source", False), operand(out, "out", True)
        kind = resolve_dtype(dtype, (source_side, out_side))
        sent = c_counts(source_counts, "source_counts", self, kind, ("source", source_side, -1))
        received = c_counts(out_counts, "out_counts", self, kind, ("out", out_side, -1))
        arguments = (source_side.pointer, sent, out_side.pointer, received, kind)
        return self._call(lib.phx_all_to_all_v, arguments, (source_side, out_side), options)

    @overload
    def broadcast(
        self,
        buffer: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def broadcast(
        self,
        buffer: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def broadcast(
        self,
        buffer: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def broadcast(
        self,
        buffer: Any,
        count: int | None = None,
        dtype: DTypeLike = None,
        root_group_rank: int = 0,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """Copy the buffer of one rank into those of all others. Collective.

        Args:
            buffer: `count` elements; read on the root, written on the others.
            root_group_rank: The rank whose buffer it is.
            count, dtype, options: As for `all_reduce`.

        Raises:
            As `all_reduce`.

        Example:
            >>> x = array("i", [rank])
            >>> group.broadcast(x, root_group_rank=1)
            >>> x
            array('i', [1])
        """
        root = c_root(root_group_rank, self)
        side, n, kind = resolve_one(buffer, "buffer", root != self.group_rank, count, dtype)
        return self._call(lib.phx_broadcast, (side.pointer, n, kind, root), (side,), options)

    @overload
    def gather(
        self,
        source: Any,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def gather(
        self,
        source: Any,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def gather(
        self,
        source: Any,
        out: Any = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def gather(
        self,
        source: Any,
        out: Any = None,
        count: int | None = None,
        dtype: DTypeLike = None,
        root_group_rank: int = 0,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """`all_gather` of which only the root gets the result. Collective.

        Args:
            source: `count` elements.
            out: group_size * `count` elements on the root, or a list of buffers, one for each rank; not looked at
                elsewhere.
            count: Elements of one rank; None with a list.
            root_group_rank: The rank that gets the result.
            dtype, options: As for `all_reduce`.

        Raises:
            As `all_reduce`.

        Example:
            >>> out = array("i", [0, 0])
            >>> group.gather(array("i", [rank + 5]), out)
            >>> out  # on rank 0
            array('i', [5, 6])
        """
        root = c_root(root_group_rank, self)
        return self._collective(GATHER, source, out, count, dtype, (root,), options, root)

    @overload
    def scatter(
        self,
        source: Any,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Blocking],
    ) -> None: ...
    @overload
    def scatter(
        self,
        source: Any,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[Nonblocking],
    ) -> Work: ...
    @overload
    def scatter(
        self,
        source: Any,
        out: Any,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        root_group_rank: int = ...,
        **options: Unpack[AnyCall],
    ) -> Work | None: ...
    def scatter(
        self,
        source: Any,
        out: Any,
        count: int | None = None,
        dtype: DTypeLike = None,
        root_group_rank: int = 0,
        **options: Unpack[AnyCall],
    ) -> Work | None:
        """Give block r of the root's input to group rank r. Collective.

        Args:
            source: group_size * `count` elements on the root, or a list of buffers, one for each rank; not looked at
                elsewhere, where it may be None.
            out: `count` elements.
            count: Elements of one block; None with a list.
            root_group_rank: The rank whose blocks they are.
            dtype, options: As for `all_reduce`.

        Raises:
            As `all_reduce`.

        Example:
            >>> out = array("i", [0])
            >>> group.scatter(array("i", [5, 6]), out)
            >>> out  # on rank 1
            array('i', [6])
        """
        root = c_root(root_group_rank, self)
        return self._collective(SCATTER, source, out, count, dtype, (root,), options, root)

    # ---- messages -------------------------------------------------------------------------------

    @overload
    def send(
        self,
        source: Any,
        peer_group_rank: int,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        *,
        tag: int = ...,
        **options: Unpack[BlockingMessage],
    ) -> None: ...
    @overload
    def send(
        self,
        source: Any,
        peer_group_rank: int,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        *,
        tag: int = ...,
        **options: Unpack[NonblockingMessage],
    ) -> Work: ...
    @overload
    def send(
        self,
        source: Any,
        peer_group_rank: int,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        *,
        tag: int = ...,
        **options: Unpack[AnyMessage],
    ) -> Work | None: ...
    def send(
        self,
        source: Any,
        peer_group_rank: int,
        count: int | None = None,
        dtype: DTypeLike = None,
        *,
        tag: int = 0,
        **options: Unpack[AnyMessage],
    ) -> Work | None:
        """Send a message to one rank. Not collective.

        It meets the oldest receive there that names this rank (or `ANY_RANK`) and the tag. Messages to one rank with
        one tag arrive in the order sent. On a GPU they meet in the order of the calls, whatever their tags, which must
        be the same on both sides.

        Args:
            source: `count` elements. When a blocking send returns they may be changed, received or not.
            peer_group_rank: The receiver; may be this rank.
            count: Elements; the receiver must expect as many.
            dtype: Their type, the same there.
            tag: 0 to 2**32 - 1.
            options: `blocking=False` to return a Work at once, and those of `MessageOptions`.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.

        Example:
            >>> group.send(array("i", [rank]), 1 - rank)
            >>> group.recv(array("i", [0]), 1 - rank)  # on rank 1
            0
        """
        side, n, kind = resolve_one(source, "source", False, count, dtype)
        number = c_integer(tag, "tag", 0, UINT32_MAX)
        peer = c_integer(peer_group_rank, "peer_group_rank", 0, self.group_size - 1)
        arguments = (side.pointer, n, kind, peer, number)
        return self._call(lib.phx_send, arguments, (side,), options, MESSAGE_OPTIONS)

    @overload
    def recv(
        self,
        out: Any,
        peer_group_rank: int = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        *,
        tag: int = ...,
        **options: Unpack[BlockingMessage],
    ) -> int: ...
    @overload
    def recv(
        self,
        out: Any,
        peer_group_rank: int = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        *,
        tag: int = ...,
        **options: Unpack[NonblockingMessage],
    ) -> Work: ...
    @overload
    def recv(
        self,
        out: Any,
        peer_group_rank: int = ...,
        count: int | None = ...,
        dtype: DTypeLike = ...,
        *,
        tag: int = ...,
        **options: Unpack[AnyMessage],
    ) -> Work | int: ...
    def recv(
        self,
        out: Any,
        peer_group_rank: int = ANY_RANK,
        count: int | None = None,
        dtype: DTypeLike = None,
        *,
        tag: int = 0,
        **options: Unpack[AnyMessage],
    ) -> Work | int:
        """Receive a message. Not collective.

        Args:
            out: `count` elements.
            peer_group_rank: The sender, or `ANY_RANK`, which there is only on the host.
            count: Elements; as many as were sent.
            dtype: Their type, the same there.
            tag: The tag of the send.
            options: As for `send`.

        Returns:
            The sender's group rank; or, when not blocking, a Work, whose `source` says it.

        Raises:
            As `send`.

        Example:
            >>> out = array("i", [0])
            >>> work = group.recv(out, 1 - rank, blocking=False)
            >>> group.send(array("i", [rank + 5]), 1 - rank)
            >>> work.wait()
            >>> out  # on rank 1
            array('i', [5])
        """
        side, n, kind = resolve_one(out, "out", True, count, dtype)
        number = c_integer(tag, "tag", 0, UINT32_MAX)
        peer = c_integer(peer_group_rank, "peer_group_rank", ANY_RANK, self.group_size - 1)
        arguments, device = (side.pointer, n, kind, peer, number), options.get("device")
        named = peer != ANY_RANK or not (device is None or device_of(device)[0] == "cpu")
        blocking = options.get("blocking", True)
        options["blocking"] = blocking and named
        work = self._call(lib.phx_recv, arguments, (side,), options, MESSAGE_OPTIONS)
        if work is None:
            return peer
        if not blocking:
            return work
        work.wait(options.get("timeout_ms", 0))
        return work.source()

    def messages(self, messages: Iterable[Message], **options: Unpack[MessageOptions]) -> None:
        """Send and receive several messages at once, so that their order does not matter. Not collective.

        Messages between two ranks in one direction keep their order.

        Args:
            messages: Made by the methods of `Message`. May be empty. On a GPU at most 96, to and from 32 ranks.
            options: See `MessageOptions`.

        Raises:
            InvalidArgumentError: An argument is wrong; the text names the message. Nothing was sent.
            UnsupportedError: There are too many of them for a GPU.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.

        Example:
            >>> out = array("i", [0])
            >>> group.messages([Message.recv(out, 1 - rank), Message.send(array("i", [rank + 5]), 1 - rank)])
            >>> out  # on rank 1
            array('i', [5])
        """
        rows: list[tuple[Any, ...]] = []
        operands: list[Operand] = []
        for index, message in enumerate(messages):
            if not isinstance(message, Message):
                raise InvalidArgumentError(
                    f"message {index} is {message!r}; make it with a method of phalanx.core.Message"
                )
            try:
                name, lowest = ("source", 0) if message.sends else ("out", ANY_RANK)
                side, n, kind = resolve_one(message.buffer, name, not message.sends, message.count, message.dtype)
                tag = c_integer(message.tag, "tag", 0, UINT32_MAX)
                peer = c_integer(message.peer_group_rank, "peer_group_rank", lowest, self.group_size - 1)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"message {index} ({message.operation}): {error}") from None
            operands.append(side)
            number = lib.PHX_MESSAGE_SEND if message.sends else lib.PHX_MESSAGE_RECV
            rows.append((ffi.sizeof("phx_message"), number, side.pointer, n, kind, peer, tag, 0))
        listed = ffi.new("phx_message[]", rows)
        made = c_options(options, MESSAGE_OPTIONS)
        check(lib.phx_messages(self._handle.pointer, listed, len(rows), made))

    # ---- how calls are made ---------------------------------------------------------------------

    def _collective(
        self,
        spec: CollectiveSpec,
        source: Any,
        out: Any,
        count: int | None,
        dtype: DTypeLike,
        more: tuple[int, ...],
        options: AnyCall,
        root: int | None = None,
    ) -> Work | None:
        if (spec.out_blocks and is_list(out)) or (spec.source_blocks and is_list(source)):
            listed = resolve_blocks(spec, self, source, out, count, dtype, root)
            n = () if root is None else (listed.n,)
            arguments = (listed.source, listed.out, *n, listed.dtype, *more)
            assert spec.listed is not None
            return self._call(spec.listed, arguments, listed.operands, options)
        sides = resolve(spec, self, source, out, count, dtype, root)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype, *more)
        return self._call(spec.function, arguments, (sides.source, sides.out), options)

    def _call(
        self,
        function: Callable[..., int],
        arguments: tuple[Any, ...],
        operands: tuple[Operand, ...],
        options: AnyCall | AnyMessage,
        known: frozenset[str] = CALL_OPTIONS,
    ) -> Work | None:
        whole = (self._handle.pointer, *arguments)
        return call_async(function, whole, self._handle, self._orphans, operands, options, known)
