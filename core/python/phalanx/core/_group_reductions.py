"""The collectives of a Group that reduce."""

from collections.abc import Sequence
from typing import Any

from phalanx.core import _arguments
from phalanx.core._arguments import c_counts, c_root, resolve
from phalanx.core._blocks import is_list, resolve_blocks
from phalanx.core._group_base import GroupBase
from phalanx.core._lib import lib
from phalanx.core._operand import operand, resolve_dtype
from phalanx.core._options import options
from phalanx.core.dtypes import Algo, DType, ReduceOp, reduce_op_of
from phalanx.core.memory import Device
from phalanx.core.work import Work


class Reductions(GroupBase):
    """all_reduce, reduce_scatter and reduce."""

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
            source: group_size * `count` elements; or a list of buffers, one for each rank, which may differ in length.
            out: `count` elements.
            count: Elements of one block; None with a list.
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
        made = options(algo, channel, timeout_ms, scale, stream, device)
        if is_list(source):
            listed = resolve_blocks(_arguments.REDUCE_SCATTER, self, source, out, count, dtype)
            given = (listed.source, listed.out, listed.dtype, reduce_op_of(op), made)
            return self._issue(lib.phx_reduce_scatter_blocks, given, listed.operands, blocking)
        sides = resolve(_arguments.REDUCE_SCATTER, self, source, out, count, dtype)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype, reduce_op_of(op))
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
