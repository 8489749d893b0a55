"""One connection to a rank on another host: frames that go out, and frames that come in, in order.

A frame is a head of fixed size (the number of the trade, the bytes of data that follow, which call it belongs to) and
data. Nothing here waits.
"""

import contextlib
import socket
import struct
from collections import deque

_HEAD = struct.Struct("<QQ1008s")
_AT_ONCE = 16  # buffers for one call of the kernel


class Trade:
    """What is to cross for one step of a call.

    Attributes:
        call: The call, alike on all ranks that make it.
        number: Of the trade among those of the group, alike on all ranks.
        to_come: Hosts whose data is not all here.
        to_go: Hosts to which not all data has gone.
    """

    def __init__(self, call: str, number: int) -> None:
        self.call = call
        self.number = number
        self.to_come: set[int] = set()
        self.to_go: set[int] = set()

    @property
    def is_done(self) -> bool:
        return not self.to_come and not self.to_go


class OtherCall(Exception):
    """What came is not of the trade that was to come.

    Attributes:
        text: What the other end said in place of it.
        expected: The call of the trade that was to come; "" if none was.
    """

    def __init__(self, text: str, expected: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.expected = expected


class Stream:
    """Frames to and from one host.

    Args:
        connection: Not blocking. Belongs to the stream.
        host: Of the other end.
    """

    def __init__(self, connection: socket.socket, host: int) -> None:
        self.connection = connection
        self.host = host
        self._out: deque[tuple[memoryview, Trade | None]] = deque()
        self._in: deque[tuple[memoryview, Trade]] = deque()
        self._head = bytearray(_HEAD.size)
        self._got = 0  # bytes of the frame that is coming in

    @property
    def wants_out(self) -> bool:
        return bool(self._out)

    @property
    def wants_in(self) -> bool:
        return bool(self._in)

    def post(self, trade: Trade, data: memoryview) -> None:
        """Let data go out after what was posted before. It must stay as it is until the trade has it out of `to_go`."""
        trade.to_go.add(self.host)
        head = memoryview(_HEAD.pack(trade.number, len(data), trade.call.encode()))
        if data:
            self._out += [(head, None), (data, trade)]
        else:
            self._out.append((head, trade))

    def say(self, text: str) -> None:
        """Let a head without data go out."""
        self._out.append((memoryview(_HEAD.pack(0, 0, text.encode())), None))

    def expect(self, trade: Trade, data: memoryview) -> None:
        """Let what comes in after what was expected before go to `data`."""
        trade.to_come.add(self.host)
        self._in.append((data, trade))

    def send(self) -> None:
        """Send what can go without waiting.

        Raises:
            OSError: The connection has ended.
        """
        while self._out:
            buffers = [data for data, _ in list(self._out)[:_AT_ONCE]]
            try:
                sent = self.connection.sendmsg(buffers)
            except BlockingIOError:
                return
            while sent > 0:
                data, trade = self._out[0]
                if sent < len(data):
                    self._out[0] = data[sent:], trade
                    break
                sent -= len(data)
                self._out.popleft()
                if trade is not None:
                    trade.to_go.discard(self.host)

    def receive(self) -> None:
        """Receive what has come and is expected.

        Raises:
            OSError: The connection has ended.
            OtherCall: Something else has come.
        """
        while self._in:
            data, trade = self._in[0]
            before, buffers = self._got, []
            if before < _HEAD.size:
                buffers.append(memoryview(self._head)[before:])
            if len(data):
                buffers.append(data[max(0, before - _HEAD.size) :])
            try:
                count = self.connection.recvmsg_into(buffers)[0]
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionResetError("it was closed there")
            self._got += count
            if before < _HEAD.size <= self._got:
                self._check(trade, len(data))
            if self._got == _HEAD.size + len(data):
                self._in.popleft()
                self._got = 0
                trade.to_come.discard(self.host)

    def read_last_words(self) -> None:
        """Of a connection that has ended: what had come before that.

        Raises:
            OtherCall: There was something.
        """
        with contextlib.suppress(OSError):
            self.receive()
            while not self._in and self._got < _HEAD.size:
                count = self.connection.recv_into(memoryview(self._head)[self._got :])
                if count == 0:
                    return
                self._got += count
        if not self._in and self._got >= _HEAD.size:
            raise OtherCall(self._said())

    def _said(self) -> str:
        text: bytes = _HEAD.unpack(self._head)[2]
        return text.rstrip(b"\0").decode(errors="replace")

    def _check(self, trade: Trade, size: int) -> None:
        number, theirs, _ = _HEAD.unpack(self._head)
        said = self._said()
        if said != trade.call:
            raise OtherCall(said, trade.call)
        if number != trade.number or theirs != size:
            text = f"{said} with {theirs} bytes as its transfer {number} instead of {size} as {trade.number}"
            raise OtherCall(text, trade.call)
