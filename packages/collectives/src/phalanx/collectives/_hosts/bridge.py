"""Bytes between the ranks of one lane, one on each host.

Nothing but bytes crosses: what reductions make of them is computed on every host from the same bytes in the same order,
so all ranks get the same bits. Everything happens in the thread that calls: there is no other one to wake.
"""

import contextlib
import ctypes
import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from phalanx.collectives._hosts.connect import connect
from phalanx.collectives._hosts.stream import OtherCall, Stream, Trade
from phalanx.core import MismatchError, PeerDeadError, PhalanxError, RevokedError, WaitTimeoutError
from phalanx.core.timeouts import milliseconds, timed_out

_ByHost = dict[int, torch.Tensor]
_NOTHING = torch.empty(0, dtype=torch.uint8)
_GAVE_UP = "!"  # begins what is sent in place of a call
_TELL_S = 0.2
_LONGEST_POLL_S = 86400.0  # poll() takes 24 days at most
_LINGER_S = 0.1  # what came and was not read ends a connection with a reset, which overtakes what was sent
_ERRORS: dict[str, type[PhalanxError]] = {
    each.__name__: each for each in (MismatchError, PeerDeadError, RevokedError, WaitTimeoutError)
}


class Bridge:
    """The connections of one lane.

    Args:
        store: A torch Store that all its ranks share, and nobody else.
        host: Of this rank.
        ranks: The global ranks of the lane, by host.
        timeout: Of the meeting, and of every wait.
        group: Name of the group, for errors.

    Attributes:
        is_broken: Whether a connection has ended without a word of its reason.

    Raises:
        PhalanxError: The ranks could not connect.
    """

    def __init__(self, store: Any, host: int, ranks: Sequence[int], timeout: timedelta, group: str) -> None:
        self._host = host
        self._ranks = ranks
        self._timeout = timeout
        self._group = group
        self.is_broken = False
        self._told = False
        self._closed = False
        self._using = threading.RLock()  # by whoever sends and receives
        made = connect(store, host, ranks, timeout, group)
        self._streams = {other: Stream(made[other], other) for other in sorted(made)}

    def begin(self, call: str, number: int, outgoing: _ByHost, incoming: _ByHost) -> Trade:
        """Begin to send to some hosts and to receive from some. With it goes which call it belongs to.

        Args:
            call: The collective, alike on all ranks that make the same call.
            number: Of the trade among those of the group, alike on all ranks.
            outgoing: By host, contiguous; left as they are until it is finished.
            incoming: By host, contiguous; written until it is finished.

        Raises:
            PhalanxError: As for `finish`.
        """
        trade = Trade(call, number)
        with self._using:
            for host, tensor in incoming.items():
                self._streams[host].expect(trade, _bytes_of(tensor))
            for host, tensor in outgoing.items():
                self._streams[host].post(trade, _bytes_of(tensor))
                self._step(trade.call, self._streams[host], Stream.send)
        return trade

    def announce(self, call: str, number: int, outgoing: _ByHost, incoming: _ByHost) -> Trade:
        """As `begin`, for data that others carry: only which call it belongs to crosses, both ways.

        Raises:
            PhalanxError: As for `finish`.
        """
        hosts = dict.fromkeys(sorted({*outgoing, *incoming}), _NOTHING)
        return self.begin(call, number, hosts, hosts)

    def finish(self, trade: Trade) -> None:
        """Wait until a trade is done.

        Raises:
            WaitTimeoutError, PeerDeadError, MismatchError: It did not happen within the timeout, or cannot any more.
                The bridge is of no use after it, but to `give_up` and to be closed.
        """
        self._pump(trade.call, lambda: trade.is_done, time.monotonic() + self._timeout.total_seconds())
        if not trade.is_done:
            raise self.late(trade)

    def look(self, call: str) -> None:
        """Send and receive what can be without waiting. For trades that nobody finishes.

        Args:
            call: What the caller does, for errors that belong to no trade.

        Raises:
            PeerDeadError, MismatchError: As for `finish`.
        """
        with self._using:
            if self._closed:
                raise self._was_closed(call)
            for stream in self._streams.values():
                self._step(call, stream, Stream.send)
                self._step(call, stream, Stream.receive)

    def _pump(self, call: str, is_done: Callable[[], bool], until: float) -> None:
        with self._using:
            while not is_done():
                poll = select.poll()
                by_fd = {}
                for stream in self._streams.values():
                    wanted = stream.wants_in * select.POLLIN | stream.wants_out * select.POLLOUT
                    if wanted and not self._closed:
                        by_fd[stream.connection.fileno()] = stream
                        poll.register(stream.connection, wanted)
                if not by_fd:
                    raise self._was_closed(call)
                left = until - time.monotonic()
                for fd, events in poll.poll(min(max(left, 0), _LONGEST_POLL_S) * 1000):
                    if events & ~select.POLLOUT:
                        self._step(call, by_fd[fd], Stream.receive)
                    if events & ~select.POLLIN:
                        self._step(call, by_fd[fd], Stream.send)
                if left <= 0:
                    return

    def _step(self, call: str, stream: Stream, step: Callable[[Stream], None]) -> None:
        try:
            try:
                step(stream)
            except OSError:
                stream.read_last_words()
                raise
        except OtherCall as other:
            error = self._other(other.expected or call, stream.host, other.text)
            if isinstance(error, MismatchError):  # so that the other side sees it too
                self._told = True
                self._flush()
            raise error from None
        except OSError as error:
            if self._closed:
                raise self._was_closed(call) from None
            self.is_broken = True
            raise self._ended(call, stream.host, error) from None

    def _flush(self) -> None:
        until = time.monotonic() + _TELL_S
        for stream in self._streams.values():
            with contextlib.suppress(OSError):
                while stream.wants_out and _await([stream.connection], select.POLLOUT, until):
                    stream.send()

    def set_timeout(self, timeout: timedelta) -> None:
        """Of every later wait."""
        self._timeout = timeout

    def give_up(self, error: PhalanxError) -> None:
        """Tell the other hosts an error in place of the next trade, which they are in or will come to."""
        with self._using:
            if self._closed:
                return
            self._told = True
            for stream in self._streams.values():
                stream.say(f"{_GAVE_UP}{type(error).__name__}:{error}")
            self._flush()

    # ---- what goes wrong ---------------------------------------------------------------------------------------------

    def _other(self, call: str, host: int, theirs: str) -> PhalanxError:
        """The error of a rank that said something else than this call."""
        me, peer = self._ranks[self._host], self._ranks[host]
        if theirs.startswith(_GAVE_UP):
            kind, _, text = theirs.removeprefix(_GAVE_UP).partition(":")
            return _ERRORS.get(kind, RevokedError)(
                f"{call} on group '{self._group}': rank {peer} on another host gave up: {text}",
                **self._known(call, host),
            )
        return MismatchError(
            f"{call} on group '{self._group}': rank {peer} on another host called {theirs} while rank {me} called "
            f"{call}. Every rank of a group must call the same collectives in the same order with the same dtype and "
            "count.",
            **self._known(call, host),
        )

    def late(self, trade: Trade) -> WaitTimeoutError:
        """The error of a trade that is not done in time."""
        late = sorted(trade.to_come or trade.to_go)
        names = ", ".join(str(self._ranks[host]) for host in late)
        return WaitTimeoutError(
            f"{trade.call} on group '{self._group}': {timed_out(milliseconds(self._timeout))}: rank "
            f"{self._ranks[self._host]} still waits for rank(s) {names} on another host. Look at that host and at the "
            "network between the two.",
            **self._known(trade.call, late[0]),
        )

    def _ended(self, call: str, host: int, error: OSError) -> PhalanxError:
        text = error.strerror or str(error)
        if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
            text += ". That host or the network is gone"
        peer = self._ranks[host]
        return PeerDeadError(
            f"{call} on group '{self._group}': the connection to rank {peer} on another host has ended: {text}",
            **self._known(call, host),
        )

    def _was_closed(self, call: str) -> PhalanxError:
        return PeerDeadError(f"{call} on group '{self._group}': the connections between the hosts were closed")

    def _known(self, call: str, host: int) -> dict[str, Any]:
        operation = call.partition("(")[0]
        return {
            "rank": self._ranks[self._host],
            "peer": self._ranks[host],
            "operation": operation,
            "group": self._group,
        }

    def close(self) -> None:
        """Let go of the connections: whoever waits, here or at the other end, is told. From any thread."""
        if self._closed:
            return
        self._closed = True
        connections = [stream.connection for stream in self._streams.values()]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR if self._told else socket.SHUT_RDWR)
        with self._using:
            if self._told:
                _drain(connections, time.monotonic() + _LINGER_S)
            for connection in connections:
                connection.close()


def _drain(connections: list[socket.socket], until: float) -> None:
    """Read until the other ends close too."""
    left = {connection.fileno(): connection for connection in connections}
    while left and (ready := _await(list(left.values()), select.POLLIN, until)):
        for fd in ready:
            try:
                more = left[fd].recv(1 << 16)
            except OSError:
                more = b""
            if not more:
                del left[fd]


def _await(connections: list[socket.socket], event: int, until: float) -> list[int]:
    """The descriptors of the connections at which it happened; none: it is too late."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, event)
    return [fd for fd, _ in poll.poll(max(until - time.monotonic(), 0) * 1000)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which lives as long."""
    assert tensor.is_contiguous()
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    memory: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")
