"""Groups: named, ordered sets of ranks that share memory, and their collectives."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.core._handle import UINT64_MAX, Handle, c_integer, c_text, c_timeout
from phalanx.core._lib import ffi, lib
from phalanx.core._operand import Operand, operand, resolve_count, resolve_dtype
from phalanx.core._options import options
from phalanx.core.dtypes import Algo, DType, ReduceOp, reduce_op_of
from phalanx.core.errors import (
    InvalidArgumentError,
    PhalanxError,
    check,
    error_from_info,
    new_info,
)
from phalanx.core.store import Store
from phalanx.core.symm import Symm
from phalanx.core.work import Abandoned, Work

if TYPE_CHECKING:
    from phalanx.core.world import World

_NOT_FOUND = -9


class Group:
    """A set of ranks that share memory. Made by `World.create_group` or `World.attach_group`.

    The collectives take addresses (int), `Memory`, or objects with the buffer protocol (numpy
    arrays, bytearrays, memoryviews). For buffers, `count` and `dtype` may be left out: then the
    input fills them. Buffers are checked before anything is sent.

    With `blocking=False` a collective returns a `Work`; its buffers must stay unchanged, and its
    output unread, until `Work.wait`. All ranks must issue the collectives of a group in one order,
    so two threads must not race to issue them.

    While a call waits for peers, other Python threads run. Ctrl-C takes effect when the call
    returns, at the latest at its timeout.

    Attributes:
        world: The world it belongs to.
        name: Its name.
        group_rank: This rank's position in it.
        group_size: Number of ranks.
        ranks: Global ranks, in order.
        id: The same number on all its ranks.
        eager_bytes: A collective whose input has at most this many bytes has taken all of its
            input when the call that starts it returns.
    """

    def __init__(self, world: "World", pointer: Any, store: Store | None = None) -> None:
        # First of all the handle, so that the pointer cannot leak; it learns the name later.
        owners = (world._handle,) if store is None else (world._handle, store._handle)
        self._handle = Handle(pointer, lib.phx_group_release, "this group", owners)
        self._abandoned = Abandoned()
        info = self._info()
        self.world = world
        self.name: str = ffi.string(info.name).decode("utf-8", "replace")
        self._handle.what = f"group {self.name!r}"
        self.group_rank = int(info.group_rank)
        self.group_size = int(info.group_size)
        self.ranks: tuple[int, ...] = tuple(info.ranks[0 : self.group_size])
        self.id = int(info.id)
        self.eager_bytes = int(info.eager_bytes)

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
        """Collectives that this rank has issued."""
        return int(self._info().sequence)

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

    def barrier(self, timeout_ms: int = 0) -> None:
        """Wait until every rank of the group has come here. Collective.

        Args:
            timeout_ms: How long, in milliseconds; 0 is the world's default.

        Raises:
            WaitTimeoutError: Ranks did not come; the text names them.
        """
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

    def all_reduce(
        self,
        source: Any,
        out: Any,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        op: ReduceOp | int | str = ReduceOp.SUM,
        *,
        algo: Algo | int | str = Algo.AUTO,
        timeout_ms: int = 0,
        scale: float = 1.0,
        blocking: bool = True,
    ) -> Work | None:
        """Reduce element by element over all ranks; every rank gets the same bits. Collective.

        Args:
            source: `count` elements.
            out: `count` elements; may be the source.
            count: Elements.
            dtype: Their type.
            op: The reduction.
            algo: The same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            scale: Of "premul_sum", the same on all ranks.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        given, taken = operand(source, "source", False), operand(out, "out", True)
        kind = resolve_dtype(dtype, (given, taken))
        n = resolve_count(count, kind.itemsize, (("source", given, 1), ("out", taken, 1)))
        arguments = (given.pointer, taken.pointer, n, kind, reduce_op_of(op))
        made = options(algo, timeout_ms, scale)
        return self._issue(lib.phx_all_reduce, arguments, made, (given, taken), blocking)

    def all_gather(
        self,
        source: Any,
        out: Any,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        *,
        algo: Algo | int | str = Algo.AUTO,
        timeout_ms: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """Concatenate the inputs of all ranks in group rank order. Collective.

        Args:
            source: `count` elements.
            out: group_size * `count` elements.
            count: Elements of one rank.
            dtype: Their type.
            algo: The same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        given, taken = operand(source, "source", False), operand(out, "out", True)
        kind = resolve_dtype(dtype, (given, taken))
        sides = (("source", given, 1), ("out", taken, self.group_size))
        n = resolve_count(count, kind.itemsize, sides)
        arguments = (given.pointer, taken.pointer, n, kind)
        made = options(algo, timeout_ms, 1.0)
        return self._issue(lib.phx_all_gather, arguments, made, (given, taken), blocking)

    def reduce_scatter(
        self,
        source: Any,
        out: Any,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        op: ReduceOp | int | str = ReduceOp.SUM,
        *,
        algo: Algo | int | str = Algo.AUTO,
        timeout_ms: int = 0,
        scale: float = 1.0,
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
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            scale: Of "premul_sum", the same on all ranks.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        given, taken = operand(source, "source", False), operand(out, "out", True)
        kind = resolve_dtype(dtype, (given, taken))
        sides = (("source", given, self.group_size), ("out", taken, 1))
        n = resolve_count(count, kind.itemsize, sides)
        arguments = (given.pointer, taken.pointer, n, kind, reduce_op_of(op))
        made = options(algo, timeout_ms, scale)
        return self._issue(lib.phx_reduce_scatter, arguments, made, (given, taken), blocking)

    def all_to_all(
        self,
        source: Any,
        out: Any,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        *,
        algo: Algo | int | str = Algo.AUTO,
        timeout_ms: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """Send block r of the input to group rank r, and get one block from each. Collective.

        Args:
            source: group_size * `count` elements.
            out: Likewise; block r comes from group rank r.
            count: Elements of one block.
            dtype: Their type.
            algo: The same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        given, taken = operand(source, "source", False), operand(out, "out", True)
        kind = resolve_dtype(dtype, (given, taken))
        sides = (("source", given, self.group_size), ("out", taken, self.group_size))
        n = resolve_count(count, kind.itemsize, sides)
        arguments = (given.pointer, taken.pointer, n, kind)
        made = options(algo, timeout_ms, 1.0)
        return self._issue(lib.phx_all_to_all, arguments, made, (given, taken), blocking)

    def all_to_all_v(
        self,
        source: Any,
        source_counts: Sequence[int],
        out: Any,
        out_counts: Sequence[int],
        dtype: DType | int | str | None = None,
        *,
        algo: Algo | int | str = Algo.AUTO,
        timeout_ms: int = 0,
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
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        given, taken = operand(source, "source", False), operand(out, "out", True)
        kind = resolve_dtype(dtype, (given, taken))
        sent = self._counts(source_counts, "source_counts", given, "source", kind)
        received = self._counts(out_counts, "out_counts", taken, "out", kind)
        arguments = (given.pointer, sent, taken.pointer, received, kind)
        made = options(algo, timeout_ms, 1.0)
        keep = (given, taken)
        return self._issue(lib.phx_all_to_all_v, arguments, made, keep, blocking, sent, received)

    def broadcast(
        self,
        buffer: Any,
        count: int | None = None,
        dtype: DType | int | str | None = None,
        root_group_rank: int = 0,
        *,
        algo: Algo | int | str = Algo.AUTO,
        timeout_ms: int = 0,
        blocking: bool = True,
    ) -> Work | None:
        """Copy the buffer of one rank into those of all others. Collective.

        Args:
            buffer: `count` elements; read on the root, written on the others.
            count: Elements.
            dtype: Their type.
            root_group_rank: Whose buffer it is.
            algo: The same on all ranks.
            timeout_ms: Of start and wait each, in milliseconds; 0 is the world's default.
            blocking: False to return a Work.

        Returns:
            None, or a Work when not blocking.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.
        """
        root = c_integer(root_group_rank, "root_group_rank", 0, self.group_size - 1)
        given = operand(buffer, "buffer", writable=root != self.group_rank)
        kind = resolve_dtype(dtype, (given,))
        n = resolve_count(count, kind.itemsize, (("buffer", given, 1),))
        arguments = (given.pointer, n, kind, root)
        made = options(algo, timeout_ms, 1.0)
        return self._issue(lib.phx_broadcast, arguments, made, (given,), blocking)

    def _counts(self, counts: Sequence[int], name: str, side: Operand, side_name: str, dtype: DType) -> Any:
        if len(counts) != self.group_size:
            raise InvalidArgumentError(
                f"{name} has {len(counts)} entries; the group {self.name!r} needs {self.group_size}, one for each rank"
            )
        checked = [c_integer(n, f"{name}[{i}]", 0, UINT64_MAX) for i, n in enumerate(counts)]
        total = sum(checked) * dtype.itemsize
        if total > UINT64_MAX or (side.nbytes is not None and total > side.nbytes):
            raise InvalidArgumentError(
                f"{name} adds up to {total} bytes, but {side_name} has {side.nbytes}; give smaller "
                "counts or a longer buffer"
            )
        return ffi.new("size_t[]", checked)

    def _issue(
        self,
        function: Callable[..., int],
        arguments: tuple[Any, ...],
        made: Any,
        operands: tuple[Operand, ...],
        blocking: bool,
        *also_keep: object,
    ) -> Work | None:
        whole = (self._handle.pointer, *arguments, made)
        return issue(function, whole, self._handle, self._abandoned, operands, also_keep, blocking)

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.group_rank} of {self.group_size})"


def issue(
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    owner: Handle,
    abandoned: Abandoned,
    operands: tuple[Operand, ...],
    also_keep: tuple[object, ...],
    blocking: bool,
) -> Work | None:
    """Call a collective of the core, and make a Work of it unless it blocks."""
    abandoned.sweep()
    if blocking:
        check(function(*arguments, ffi.NULL))
        return None
    out = ffi.new("phx_work **")
    check(function(*arguments, out))
    keep = tuple(each.keep for each in operands if each.keep is not None) + also_keep
    return Work(out[0], f"a work of {owner.what}", owner, keep, abandoned.add)
