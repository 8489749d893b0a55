"""The collectives of a Group that move elements and leave them as they are."""

from collections.abc import Sequence
from typing import Any

from phalanx.core import _arguments
from phalanx.core._arguments import c_counts, c_root, resolve, resolve_buffer
from phalanx.core._blocks import is_list, resolve_blocks
from phalanx.core._group_base import GroupBase
from phalanx.core._lib import lib
from phalanx.core._operand import operand, resolve_dtype
from phalanx.core._options import options
from phalanx.core.dtypes import Algo, DType
from phalanx.core.memory import Device
from phalanx.core.work import Work


class Moves(GroupBase):
    """all_gather, all_to_all, broadcast, gather and scatter."""

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
            out: group_size * `count` elements; or a list of buffers, one for each rank, which may differ in length.
            count: Elements of one rank; None with a list.
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
        made = options(algo, channel, timeout_ms, stream=stream, device=device)
        if is_list(out):
            listed = resolve_blocks(_arguments.ALL_GATHER, self, source, out, count, dtype)
            given = (listed.source, listed.out, listed.dtype, made)
            return self._issue(lib.phx_all_gather_blocks, given, listed.operands, blocking)
        sides = resolve(_arguments.ALL_GATHER, self, source, out, count, dtype)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype)
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
            out: Likewise; block r comes from group rank r. Or both are lists of buffers, one for each rank, which may
                differ in length.
            count: Elements of one block; None with lists.
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
        made = options(algo, channel, timeout_ms, stream=stream, device=device)
        if is_list(source) or is_list(out):
            listed = resolve_blocks(_arguments.ALL_TO_ALL, self, source, out, count, dtype)
            given = (listed.source, listed.out, listed.dtype, made)
            return self._issue(lib.phx_all_to_all_blocks, given, listed.operands, blocking)
        sides = resolve(_arguments.ALL_TO_ALL, self, source, out, count, dtype)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype)
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
            out: group_size * `count` elements on the root, or a list of buffers, one for each rank; not looked at
                elsewhere.
            count: Elements of one rank; None with a list.
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
        made = options(algo, channel, timeout_ms, stream=stream, device=device)
        if is_list(out):
            listed = resolve_blocks(_arguments.GATHER, self, source, out, count, dtype, root)
            given = (listed.source, listed.out, listed.n, listed.dtype, root, made)
            return self._issue(lib.phx_gather_blocks, given, listed.operands, blocking)
        sides = resolve(_arguments.GATHER, self, source, out, count, dtype, root)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype, root)
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
            source: group_size * `count` elements on the root, or a list of buffers, one for each rank; not looked at
                elsewhere, where it may be None.
            out: `count` elements.
            count: Elements of one block; None with a list.
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
        made = options(algo, channel, timeout_ms, stream=stream, device=device)
        if is_list(source):
            listed = resolve_blocks(_arguments.SCATTER, self, source, out, count, dtype, root)
            given = (listed.source, listed.out, listed.n, listed.dtype, root, made)
            return self._issue(lib.phx_scatter_blocks, given, listed.operands, blocking)
        sides = resolve(_arguments.SCATTER, self, source, out, count, dtype, root)
        arguments = (sides.source.pointer, sides.out.pointer, sides.n, sides.dtype, root)
        return self._issue(lib.phx_scatter, (*arguments, made), (sides.source, sides.out), blocking)
