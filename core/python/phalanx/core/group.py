"""Groups: named, ordered sets of ranks that share memory, and their collectives."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from phalanx.core import _arguments
from phalanx.core._arguments import c_counts, c_root, resolve, resolve_buffer
from phalanx.core._handle import INT32_MAX, UINT32_MAX, UINT64_MAX, Handle, c_integer, c_text, c_timeout
from phalanx.core._issue import issue
from phalanx.core._lib import ffi, lib
from phalanx.core._operand import Operand, operand, resolve_count, resolve_dtype
from phalanx.core._options import c_stream, options
from phalanx.core.coalesced import Call, Coalesced
from phalanx.core.dtypes import ANY_RANK, Algo, DType, ReduceOp, reduce_op_of
from phalanx.core.errors import InvalidArgumentError, PhalanxError, check, error_from_info, new_info
from phalanx.core.memory import Device, c_device, device_of
from phalanx.core.message import Message
from phalanx.core.store import Store
from phalanx.core.symm import Symm
from phalanx.core.tuning import GpuTuning, Tuning, c_gpu_tuning, c_path, c_tuning, get_gpu_tuning, get_tuning
from phalanx.core.work import Abandoned, Work

if TYPE_CHECKING:
    from phalanx.core.world import World

_NOT_FOUND = -9


class Agreement(NamedTuple):
    """What the living ranks of a group agreed on.

    Attributes:
        bits: The bitwise AND of what they gave.
        alive: Those that took part, as group ranks, in order.
    """

    bits: int
    alive: tuple[int, ...]


class Group:
    """A set of ranks that share memory. Made by `World.create_group` or `World.attach_group`.

    The collectives take addresses (int), `Memory`, or objects with the buffer protocol (numpy
    arrays, bytearrays, memoryviews). For buffers, `count` and `dtype` may be left out: then the
    input fills them. Buffers are checked before anything is sent.

    With `blocking=False` a collective returns a `Work` at once, and any number may be in flight; its
    buffers must stay unchanged, and its output unread, until `Work.wait`. All ranks must issue the
    collectives of one channel of a group in one order, so two threads must not race to issue them:
    give each a channel of its own. Channels are independent of each other.

    With `device` the buffers are memory of a GPU, and the call puts its work on a stream: see docs/howto/gpu.md.

    While a call waits for peers, other Python threads run. Ctrl-C takes effect when the call
    returns, at the latest at its timeout.

    Attributes:
        world: The world it belongs to.
        name: Its name.
        group_rank: This rank's position in it.
        group_size: Number of ranks.
        ranks: Global ranks, in order.
        id: The same number on all its ranks.
        channels: How many independent sequences of collectives it has.
    """

    def __init__(self, world: "World", pointer: Any, store: Store | None = None) -> None:
        # First of all the handle, so that the pointer cannot leak; it learns the name later.
        owners = (world._handle,) if store is None else (world._handle, store._handle)
        self._handle = Handle(pointer, lib.phx_group_release, "this group", owners)
        self._abandoned = Abandoned(self._handle)
        info = self._info()
        self.world = world
        self.name: str = ffi.string(info.name).decode("utf-8", "replace")
        self._handle.what = f"group {self.name!r}"
        self.group_rank = int(info.group_rank)
        self.group_size = int(info.group_size)
        self.ranks: tuple[int, ...] = tuple(info.ranks[0 : self.group_size])
        self.id = int(info.id)
        self.channels = int(info.channels)

    def _info(self) -> Any:
        info = ffi.new("phx_group_info *")
        info.struct_size = ffi.sizeof("phx_group_info")
        check(lib.phx_group_get_info(self._handle.pointer, info))
        return info

    @property
    def pointer(self) -> Any:
        """The phx_group pointer, for calls through `lib` and the torch ops."""
        return self._handle.pointer

    @property
    def sequence(self) -> int:
        """Collectives that this rank has issued on channel 0."""
        return int(self._info().sequence)

    @property
    def eager_bytes(self) -> int:
        """A collective whose input has at most this many bytes has taken all of it when its start returns."""
        return int(self._info().eager_bytes)

    @property
    def zero_copies(self) -> int:
        """How many collectives of this rank read all inputs where they lay, in symmetric memory, without a copy."""
        return int(self._info().zero_copies)

    @property
    def state(self) -> str:
        """ "active", or "failed" after an error that put the ranks out of step."""
        return "failed" if self._info().state else "active"

    def error(self) -> PhalanxError | None:
        """The first cause of the group's failure, or None while it is healthy. Never blocks."""
        info = new_info()
        status = lib.phx_group_error(self._handle.pointer, info)
        if status == _NOT_FOUND:
            return None
        check(status)
        return error_from_info(info)

    def revoke(self, reason: str) -> None:
        """Make every later call on the group fail, on every rank. Not collective.

        Args:
            reason: Named by the RevokedError that the ranks get.
        """
        check(lib.phx_group_revoke(self._handle.pointer, c_text(reason, "reason")))

    # ---- groups made of this one ------------------------------------------------------------------

    def split(self, color: int, key: int = 0, name: str | None = None, *, timeout_ms: int = 0) -> "Group | None":
        """Make one group of the ranks that give the same color. Collective. Needs no store.

        As MPI_Comm_split.

        Args:
            color: Of this rank. With a negative one it takes part, but is in no new group.
            key: The new group is ordered by it, and then by rank.
            name: Of the new group; None is the name of this one.
            timeout_ms: In milliseconds; 0 is the world's default.

        Returns:
            The new group, or None for a negative color.

        Raises:
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        out = ffi.new("phx_group **")
        sides = (c_integer(each, what, -INT32_MAX, INT32_MAX) for each, what in ((color, "color"), (key, "key")))
        check(lib.phx_group_split(self._handle.pointer, *sides, _name(name), c_timeout(timeout_ms), out))
        return None if out[0] == ffi.NULL else Group(self.world, out[0])

    def shrink(self, name: str | None = None, *, timeout_ms: int = 0) -> "Group":
        """Make a group of the ranks that are alive. Collective among them, also where the group has failed.

        As MPIX_Comm_shrink of MPI's fault tolerance. A rank that does not call it within half of the time is left
        out as if it were dead. Needs no store.

        Args:
            name: Of the new group; None is the name of this one.
            timeout_ms: In milliseconds; 0 is the world's default.

        Returns:
            The new group: the ranks that took part, in the order that they had.

        Raises:
            RevokedError: This rank came too late, and the others went on without it.
            WaitTimeoutError: The survivors could not make the group in time.
        """
        out = ffi.new("phx_group **")
        check(lib.phx_group_shrink(self._handle.pointer, _name(name), c_timeout(timeout_ms), out))
        return Group(self.world, out[0])

    def agree(self, bits: int = 0, *, timeout_ms: int = 0) -> Agreement:
        """Agree on bits, and on who is alive. Collective among the living, also where the group has failed.

        As MPIX_Comm_agree of MPI's fault tolerance. A rank that does not call it within half of the time is left
        out as if it were dead.

        Args:
            bits: 64 bits.
            timeout_ms: In milliseconds; 0 is the world's default.

        Returns:
            The same on all ranks that took part.

        Raises:
            RevokedError: This rank came too late, and the others went on without it.
        """
        inout = ffi.new("uint64_t *", c_integer(bits, "bits", 0, UINT64_MAX))
        alive = ffi.new("uint8_t[]", self.group_size)
        check(lib.phx_group_agree(self._handle.pointer, inout, alive, c_timeout(timeout_ms)))
        return Agreement(int(inout[0]), tuple(rank for rank in range(self.group_size) if alive[rank]))

    def barrier(self, timeout_ms: int = 0, *, device: Device | None = None, stream: int = 0) -> None:
        """Wait until every rank of the group has come here. Collective.

        Args:
            timeout_ms: How long, in milliseconds; 0 is the world's default.
            device: None for the host. Of a GPU, such as ("cuda", 0), it is a barrier of streams: this returns, and what
                precedes it on any rank's stream is done when what follows it on another's begins.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream.

        Raises:
            WaitTimeoutError: Ranks did not come; the text names them.
        """
        if device is not None and (place := device_of(device))[0] != "cpu":
            made = c_device(place)
            check(lib.phx_group_enqueue_barrier(self._handle.pointer, made, c_timeout(timeout_ms), c_stream(stream)))
            return
        check(lib.phx_group_barrier(self._handle.pointer, c_timeout(timeout_ms)))

    def rendezvous(self, block: Any, timeout_ms: int = 0) -> Symm:
        """Map the blocks of all ranks here. Collective, except for a block that was mapped before.

        Args:
            block: A Memory, or an address inside one; of the same size on all ranks.
            timeout_ms: How long to wait for the others, in milliseconds; 0 is the world's default.

        Returns:
            The handle. For a block that was mapped before it is the same mapping, without
            communication.

        Raises:
            MismatchError: Sizes differ; the text names the odd rank.
            NotFoundError: The address is in no block of this world.
        """
        out = ffi.new("phx_symm **")
        given = operand(block, "block", writable=False)
        check(lib.phx_symm_rendezvous(self._handle.pointer, given.pointer, c_timeout(timeout_ms), out))
        return Symm(self, out[0])

    def find_symm(self, block: Any) -> Symm | None:
        """The handle of a block that was mapped before, or None. Not collective.

        Args:
            block: A Memory, or an address inside one.
        """
        out = ffi.new("phx_symm **")
        given = operand(block, "block", writable=False)
        status = lib.phx_symm_find(self._handle.pointer, given.pointer, out)
        if status == _NOT_FOUND:
            return None
        check(status)
        return Symm(self, out[0])

    # ---- collectives ----------------------------------------------------------------------------

    def all_reduce(
        self,
        source: Any,
        out: Any = None,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        op: ReduceOp | int | str = ReduceOp.SUM,
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        scale: float = 1.0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """Reduce element by element over all ranks; every rank gets the same bits. Collective.

        Args:
            source: `count` elements.
            out: `count` elements; may be the source. None is the source: in place.
            count: Elements.
            dtype: Their type.
            op: The reduction.
            algo: The same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            scale: Of "premul_sum", the same on all ranks.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        sides = resolve(_arguments.ALL_REDUCE, self, source, source if out is None else out, count, dtype)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype, reduce_op_of(op))
        made = options(algo, channel, timeout_ms, scale, stream, device)
        return self._issue(lib.phx_all_reduce, (*arguments, made), (sides.source, sides.out), blocking)

    def all_gather(
        self,
        source: Any,
        out: Any,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """Concatenate the inputs of all ranks in group rank order. Collective.

        Args:
            source: `count` elements.
            out: group_size * `count` elements.
            count: Elements of one rank.
            dtype: Their type.
            algo: The same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        sides = resolve(_arguments.ALL_GATHER, self, source, out, count, dtype)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype)
        made = options(algo, channel, timeout_ms, stream=stream, device=device)
        return self._issue(lib.phx_all_gather, (*arguments, made), (sides.source, sides.out), blocking)

    def all_gather_v(
        self,
        source: Any,
        out: Any,
        counts: Sequence[int],
        dtype: DType | int | str | None = None,
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """`all_gather` with blocks of different lengths. Collective.

        Args:
            source: `counts[group_rank]` elements.
            out: The blocks of all ranks, one after another.
            counts: Elements that come from each group rank; the same list on all ranks.
            dtype: Their type.
            algo: The same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        given, taken = operand(source, "source", False), operand(out, "out", True)
        kind = resolve_dtype(dtype, (given, taken))
        sides = (("source", given, self.group_rank), ("out", taken, -1))
        listed = c_counts(counts, "counts", self, kind, *sides)
        arguments = (
            given.pointer,
            taken.pointer,
            listed,
            kind,
            options(algo, channel, timeout_ms, stream=stream, device=device),
        )
        return self._issue(lib.phx_all_gather_v, arguments, (given, taken), blocking)

    def reduce_scatter(
        self,
        source: Any,
        out: Any,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        op: ReduceOp | int | str = ReduceOp.SUM,
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        scale: float = 1.0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """Reduce over all ranks and give block r of the result to group rank r. Collective.

        Args:
            source: group_size * `count` elements.
            out: `count` elements.
            count: Elements of one block.
            dtype: Their type.
            op: The reduction.
            algo: The same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            scale: Of "premul_sum", the same on all ranks.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        sides = resolve(_arguments.REDUCE_SCATTER, self, source, out, count, dtype)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype, reduce_op_of(op))
        made = options(algo, channel, timeout_ms, scale, stream, device)
        return self._issue(lib.phx_reduce_scatter, (*arguments, made), (sides.source, sides.out), blocking)

    def reduce_scatter_v(
        self,
        source: Any,
        out: Any,
        counts: Sequence[int],
        dtype: DType | int | str | None = None,
        op: ReduceOp | int | str = ReduceOp.SUM,
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        scale: float = 1.0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """`reduce_scatter` with blocks of different lengths. Collective.

        Args:
            source: The blocks for all ranks, one after another.
            out: `counts[group_rank]` elements.
            counts: Elements that go to each group rank; the same list on all ranks.
            dtype: Their type.
            op: The reduction.
            algo: The same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            scale: Of "premul_sum", the same on all ranks.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        given, taken = operand(source, "source", False), operand(out, "out", True)
        kind = resolve_dtype(dtype, (given, taken))
        sides = (("source", given, -1), ("out", taken, self.group_rank))
        listed = c_counts(counts, "counts", self, kind, *sides)
        made = options(algo, channel, timeout_ms, scale, stream, device)
        arguments = (given.pointer, taken.pointer, listed, kind, reduce_op_of(op), made)
        return self._issue(lib.phx_reduce_scatter_v, arguments, (given, taken), blocking)

    def all_to_all(
        self,
        source: Any,
        out: Any,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """Send block r of the input to group rank r, and get one block from each. Collective.

        Args:
            source: group_size * `count` elements.
            out: Likewise; block r comes from group rank r.
            count: Elements of one block.
            dtype: Their type.
            algo: The same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        sides = resolve(_arguments.ALL_TO_ALL, self, source, out, count, dtype)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype)
        made = options(algo, channel, timeout_ms, stream=stream, device=device)
        return self._issue(lib.phx_all_to_all, (*arguments, made), (sides.source, sides.out), blocking)

    def all_to_all_v(
        self,
        source: Any,
        source_counts: Sequence[int],
        out: Any,
        out_counts: Sequence[int],
        dtype: DType | int | str | None = None,
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """`all_to_all` with blocks of different lengths. Collective.

        Args:
            source: Blocks one after another, one for each group rank.
            source_counts: Elements of each; entry j must equal `out_counts[this rank]` on rank j.
            out: Blocks one after another, one from each group rank.
            out_counts: Elements of each.
            dtype: Their type.
            algo: The same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        given, taken = operand(source, "source", False), operand(out, "out", True)
        kind = resolve_dtype(dtype, (given, taken))
        sent = c_counts(source_counts, "source_counts", self, kind, ("source", given, -1))
        received = c_counts(out_counts, "out_counts", self, kind, ("out", taken, -1))
        arguments = (
            given.pointer,
            sent,
            taken.pointer,
            received,
            kind,
            options(algo, channel, timeout_ms, stream=stream, device=device),
        )
        return self._issue(lib.phx_all_to_all_v, arguments, (given, taken), blocking)

    def broadcast(
        self,
        buffer: Any,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        root_group_rank: int = 0,
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """Copy the buffer of one rank into those of all others. Collective.

        Args:
            buffer: `count` elements; read on the root, written on the others.
            count: Elements.
            dtype: Their type.
            root_group_rank: Whose buffer it is.
            algo: The same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        root = c_root(root_group_rank, self)
        given, n, kind = resolve_buffer(self, buffer, count, dtype, root)
        arguments = (given.pointer, n, kind, root, options(algo, channel, timeout_ms, stream=stream, device=device))
        return self._issue(lib.phx_broadcast, arguments, (given,), blocking)

    def reduce(
        self,
        source: Any,
        out: Any = None,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        op: ReduceOp | int | str = ReduceOp.SUM,
        root_group_rank: int = 0,
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        scale: float = 1.0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """`all_reduce` whose result only the root gets. Collective.

        Args:
            source: `count` elements.
            out: `count` elements on the root, where it may be the source; not looked at elsewhere.
            count: Elements.
            dtype: Their type.
            op: The reduction.
            root_group_rank: Who gets the result.
            algo: The same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            scale: Of "premul_sum", the same on all ranks.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        root = c_root(root_group_rank, self)
        sides = resolve(_arguments.REDUCE, self, source, out, count, dtype, root)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype, reduce_op_of(op), root)
        made = options(algo, channel, timeout_ms, scale, stream, device)
        return self._issue(lib.phx_reduce, (*arguments, made), (sides.source, sides.out), blocking)

    def gather(
        self,
        source: Any,
        out: Any = None,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        root_group_rank: int = 0,
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """`all_gather` whose result only the root gets. Collective.

        Args:
            source: `count` elements.
            out: group_size * `count` elements on the root; not looked at elsewhere.
            count: Elements of one rank.
            dtype: Their type.
            root_group_rank: Who gets the result.
            algo: The same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        root = c_root(root_group_rank, self)
        sides = resolve(_arguments.GATHER, self, source, out, count, dtype, root)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype, root)
        made = options(algo, channel, timeout_ms, stream=stream, device=device)
        return self._issue(lib.phx_gather, (*arguments, made), (sides.source, sides.out), blocking)

    def scatter(
        self,
        source: Any,
        out: Any,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        root_group_rank: int = 0,
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """Give block r of the root's input to group rank r. Collective.

        Args:
            source: group_size * `count` elements on the root; not looked at elsewhere, where it may be None.
            out: `count` elements.
            count: Elements of one block.
            dtype: Their type.
            root_group_rank: Whose blocks they are.
            algo: The same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        root = c_root(root_group_rank, self)
        sides = resolve(_arguments.SCATTER, self, source, out, count, dtype, root)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype, root)
        made = options(algo, channel, timeout_ms, stream=stream, device=device)
        return self._issue(lib.phx_scatter, (*arguments, made), (sides.source, sides.out), blocking)

    # ---- several as one -------------------------------------------------------------------------

    def coalesced(
        self,
        calls: Iterable[Call],
        *,
        algo: Algo | int | str = Algo.AUTO,
        channel: int = 0,
        timeout_ms: int = 0,
        scale: float = 1.0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """Run several collectives as one: small ones share rounds, so many cost little more than one. Collective.

        All ranks give the same calls in one order; their dtypes, reductions and roots may differ. No output may
        overlap another output or input. All complete together. For example::

            group.coalesced([Call.all_reduce(a), Call.all_gather(b, c), Call.broadcast(d)])

        Args:
            calls: Made by the methods of `Call`. May be empty.
            algo: Of each of them; the same on all ranks.
            channel: Below `channels`; the same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            scale: Of each "premul_sum", the same on all ranks.
            device: Where the buffers lie; None is the host. On a GPU, such as ("cuda", 0), give addresses or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; the text names the call. Nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        return Coalesced(self, calls).run(
            algo=algo,
            channel=channel,
            timeout_ms=timeout_ms,
            scale=scale,
            device=device,
            stream=stream,
            blocking=blocking,
        )

    def prepare(self, calls: Iterable[Call]) -> Coalesced:
        """Check calls now that shall run as one again and again. Not collective.

        Args:
            calls: As for `coalesced`.

        Returns:
            What they are laid out in. Its `run` does what `coalesced` does.

        Raises:
            InvalidArgumentError: An argument is wrong; the text names the call.
        """
        return Coalesced(self, calls)

    # ---- messages -------------------------------------------------------------------------------

    def send(
        self,
        source: Any,
        peer_group_rank: int,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        *,
        tag: int = 0,
        timeout_ms: int = 0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
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
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            device: Where they lie; None is the host. On a GPU, such as ("cuda", 0), give an address or `Memory`.
            stream: Of a GPU: a CUstream as an integer; 0 is the default stream. The call puts its work on it and
                returns; there is no Work.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        given, n, kind, number = self._message(source, "source", count, dtype, tag)
        peer = c_integer(peer_group_rank, "peer_group_rank", 0, self.group_size - 1)
        more = options(Algo.AUTO, 0, timeout_ms, stream=stream, device=device)
        return self._issue(lib.phx_send, (given.pointer, n, kind, peer, number, more), (given,), blocking)

    @overload
    def recv(
        self,
        out: Any,
        peer_group_rank: int = ...,
        count: int | None = ...,
        dtype: DType | int | str | None = ...,
        *,
        tag: int = ...,
        timeout_ms: int = ...,
        device: Device | None = ...,
        stream: int = ...,
        blocking: Literal[True] = ...,
    ) -> int: ...

    @overload
    def recv(
        self,
        out: Any,
        peer_group_rank: int = ...,
        count: int | None = ...,
        dtype: DType | int | str | None = ...,
        *,
        tag: int = ...,
        timeout_ms: int = ...,
        device: Device | None = ...,
        stream: int = ...,
        blocking: Literal[False],
    ) -> Work: ...

    @overload
    def recv(
        self,
        out: Any,
        peer_group_rank: int = ...,
        count: int | None = ...,
        dtype: DType | int | str | None = ...,
        *,
        tag: int = ...,
        timeout_ms: int = ...,
        device: Device | None = ...,
        stream: int = ...,
        blocking: bool = ...,
    ) -> int | Work: ...

    def recv(
        self,
        out: Any,
        peer_group_rank: int = ANY_RANK,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        *,
        tag: int = 0,
        timeout_ms: int = 0,
        device: Device | None = None,
        stream: int = 0,
        blocking: bool = True,
    ) -> int | Work:
        """Receive a message. Not collective.

        Args:
            out: `count` elements.
            peer_group_rank: The sender, or `ANY_RANK`, which there is only on the host.
            count: Elements; as many as were sent.
            dtype: Their type, the same there.
            tag: That of the send.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            device, stream: As for `send`.
            blocking: False to return a Work.

        Returns:
            The sender's group rank; or, when not blocking, a Work, whose `source` says it.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        taken, n, kind, number = self._message(out, "out", count, dtype, tag)
        peer = c_integer(peer_group_rank, "peer_group_rank", ANY_RANK, self.group_size - 1)
        more = options(Algo.AUTO, 0, timeout_ms, stream=stream, device=device)
        arguments = (taken.pointer, n, kind, peer, number, more)
        on_host = device is None or device_of(device)[0] == "cpu"
        work = self._issue(lib.phx_recv, arguments, (taken,), blocking and not (on_host and peer == ANY_RANK))
        if work is None:
            return peer
        if not blocking:
            return work
        work.wait(timeout_ms)
        return work.source()

    def messages(
        self,
        messages: Iterable[Message],
        *,
        timeout_ms: int = 0,
        device: Device | None = None,
        stream: int = 0,
    ) -> None:
        """Send and receive several messages at once, so that their order does not matter. Not collective.

        Those between two ranks in one direction keep their order. For example::

            group.messages([Message.recv(there, left), Message.send(here, right)])

        Args:
            messages: Made by the methods of `Message`. May be empty. On a GPU at most 96, to and from 32 ranks.
            timeout_ms: In milliseconds; 0 is the world's default.
            device, stream: As for `send`.

        Raises:
            InvalidArgumentError: An argument is wrong; the text names the message. Nothing was sent.
            UnsupportedError: There are too many of them for a GPU.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        rows: list[tuple[Any, ...]] = []
        operands: list[Operand] = []
        for index, each in enumerate(messages):
            if not isinstance(each, Message):
                raise InvalidArgumentError(
                    f"message {index} is {each!r}; make it with a method of phalanx.core.Message"
                )
            try:
                name = "source" if each.sends else "out"
                given, n, kind, tag = self._message(each.buffer, name, each.count, each.dtype, each.tag)
                lowest = 0 if each.sends else ANY_RANK
                peer = c_integer(each.peer_group_rank, "peer_group_rank", lowest, self.group_size - 1)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"message {index} ({each.operation}): {error}") from None
            operands.append(given)
            number = lib.PHX_MESSAGE_SEND if each.sends else lib.PHX_MESSAGE_RECV
            rows.append((ffi.sizeof("phx_message"), number, given.pointer, n, kind, peer, tag, 0))
        listed = ffi.new("phx_message[]", rows)
        more = options(Algo.AUTO, 0, timeout_ms, stream=stream, device=device)
        check(lib.phx_messages(self._handle.pointer, listed, len(rows), more))

    def _message(
        self, buffer: Any, name: str, count: int | None, dtype: DType | int | str | None, tag: int
    ) -> tuple[Operand, int, DType, int]:
        given = operand(buffer, name, writable=name == "out")
        kind = resolve_dtype(dtype, (given,))
        n = resolve_count(count, kind.itemsize, ((name, given, 1),))
        return given, n, kind, c_integer(tag, "tag", 0, UINT32_MAX)

    # ---- tuning ---------------------------------------------------------------------------------

    def get_tuning(self) -> Tuning:
        """The values by which the group chooses its algorithms; those of its group rank 0. Not collective."""
        return get_tuning(self._handle.pointer)

    def set_tuning(self, tuning: Tuning, timeout_ms: int = 0) -> None:
        """Set the values by which the group chooses its algorithms. Collective; those of group rank 0 hold.

        Args:
            tuning: Zero means the built-in value, so `Tuning()` takes all back.
            timeout_ms: How long to wait for the others, in milliseconds; 0 is the world's default.

        Raises:
            InvalidArgumentError: A value is out of range; raised on every rank alike.
        """
        check(lib.phx_group_set_tuning(self._handle.pointer, c_tuning(tuning), c_timeout(timeout_ms)))

    def save_tuning(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the group's values to the table, for later groups of this size on this host. Not collective.

        Args:
            path: Of the table; None is the one that new groups read: $PHALANX_TUNING, else phalanx/tuning in the
                user's cache directory.

        Raises:
            SystemCallError: It cannot be written.
        """
        check(lib.phx_group_save_tuning(self._handle.pointer, c_path(path)))

    def get_gpu_tuning(self) -> GpuTuning:
        """The values by which collectives on GPUs choose their kernels. Not collective.

        Until the first rendezvous of memory of GPUs, or the first collective on it, they are the built-in ones, unless
        others were set; then those of the table, if it has a row for group rank 0's GPU.
        """
        return get_gpu_tuning(self._handle.pointer)

    def set_gpu_tuning(self, tuning: GpuTuning, timeout_ms: int = 0) -> None:
        """Set the values by which collectives on GPUs choose their kernels. Collective; group rank 0's hold.

        Args:
            tuning: Zero means the built-in value, so `GpuTuning()` takes all back.
            timeout_ms: How long to wait for the others, in milliseconds; 0 is the world's default.

        Raises:
            InvalidArgumentError: A value is out of range; raised on every rank alike.
        """
        check(lib.phx_group_set_gpu_tuning(self._handle.pointer, c_gpu_tuning(tuning), c_timeout(timeout_ms)))

    def save_gpu_tuning(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write those values to the table, for later groups of this size on such GPUs. Not collective.

        Args:
            path: As of save_tuning.

        Raises:
            InvalidArgumentError: The ranks have no memory of GPUs in common yet, so it is not known for which GPU.
            SystemCallError: It cannot be written.
        """
        check(lib.phx_group_save_gpu_tuning(self._handle.pointer, c_path(path)))

    # ---------------------------------------------------------------------------------------------

    def _issue(
        self,
        function: Callable[..., int],
        arguments: tuple[Any, ...],
        operands: tuple[Operand, ...],
        blocking: bool,
    ) -> Work | None:
        whole = (self._handle.pointer, *arguments)
        return issue(function, whole, self._handle, self._abandoned, operands, blocking)

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.group_rank} of {self.group_size})"


def _name(name: str | None) -> Any:
    return ffi.NULL if name is None else c_text(name, "name")
