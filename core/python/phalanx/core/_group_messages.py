"""The messages of a Group: between two of its ranks."""

from collections.abc import Iterable
from typing import Any, Literal, overload

from phalanx.core._group_base import GroupBase
from phalanx.core._handle import UINT32_MAX, c_integer
from phalanx.core._lib import ffi, lib
from phalanx.core._operand import Operand, operand, resolve_count, resolve_dtype
from phalanx.core._options import options
from phalanx.core.dtypes import ANY_RANK, Algo, DType
from phalanx.core.errors import InvalidArgumentError, check
from phalanx.core.memory import Device, device_of
from phalanx.core.message import Message
from phalanx.core.work import Work


class Messages(GroupBase):
    """send, recv, and several of them as one."""

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
