"""One connection of the mail: frames that go out, and frames that come in, in order. Nothing here waits.

A frame is a head of fixed size and data:

    LETTER    a small message (eager): its data comes with it, whether or not a receive waits for it
    TAKEN     receives have taken so many bytes of letters: the credit of their sender grows again
    OFFER     a large one, or one beyond the credit (RTS): its sender keeps the data until it is wanted
    WANT      an offered message has met its receive (CTS)
    DATA      what was wanted
    GAVE_UP   the group has failed for the sender; the data says why
    BYE       the sender lets go of the group; nothing follows
"""

import socket
import struct
from collections import deque
from enum import IntEnum
from typing import Any, NamedTuple

LETTER_BYTES = 64 << 10
CREDIT_BYTES = 4 << 20  # of letters, with their heads, that one rank keeps for another
OFFERS = 1 << 16  # of one rank to another that no receive has met
ABOUT_BYTES = 64
_HEAD = struct.Struct(f"<B7xqQQ{ABOUT_BYTES}s")
_AT_ONCE = 16  # buffers for one call of the kernel


def letter_cost(size: int) -> int:
    """What a letter uses of its sender's credit."""
    return size + _HEAD.size


class Kind(IntEnum):
    LETTER = 1
    OFFER = 2
    WANT = 3
    DATA = 4
    GAVE_UP = 5
    BYE = 6
    TAKEN = 7


class Frame(NamedTuple):
    """The head of a frame.

    Attributes:
        kind: What it is.
        tag: Of a message.
        number: Of an offer, among those of its sender.
        size: Bytes of the message.
        about: What the message is.
    """

    kind: Kind
    tag: int = 0
    number: int = 0
    size: int = 0
    about: str = ""


class Letter:
    """A message that has come, or was offered.

    Args:
        source: Its sender.
        frame: What that one says of it.
        data: Its bytes; None for an offer.
    """

    def __init__(self, source: int, frame: Frame, data: memoryview | None = None) -> None:
        self.source, self.data = source, data
        self.tag, self.about, self.number, self.size = frame.tag, frame.about, frame.number, frame.size


class Peer:
    """The connection with one other rank.

    Args:
        position: Of that rank in the group.
        connection: Not blocking. Belongs to who made this.

    Attributes:
        gone: Why nothing comes from there any more; "" while something may.
        offered: Own messages that wait until they are wanted, by number.
        wanted: Messages of that rank that were asked for, by number.
        later: Own messages that wait until that rank has asked for others, in order.
        charged: Bytes of letters to that rank that it has not said it has taken.
        announced: Offers to that rank that it has not asked for.
        held: Bytes of letters of that rank that it does not know to be taken.
        taken: As many of these are.
        offers: Offers of that rank that no receive has met.
    """

    def __init__(self, position: int, connection: socket.socket) -> None:
        self.position = position
        self.connection = connection
        self.gone = ""
        self.offered: dict[int, Any] = {}
        self.wanted: dict[int, Any] = {}
        self.later: deque[tuple[int, str, Any]] = deque()
        self.charged = self.announced = 0
        self.held = self.taken = self.offers = 0
        self._out: deque[tuple[memoryview, Any]] = deque()
        self._head = bytearray(_HEAD.size)
        self._got = 0  # bytes of the head, and then of the data, that have come
        self.frame: Frame | None = None  # whose data is coming
        self.into = memoryview(b"")

    @property
    def wants_out(self) -> bool:
        return bool(self._out) and not self.gone

    def accept(self, frame: Frame) -> None:
        """Count a message of that rank.

        Raises:
            ConnectionError: It sent more than it may before receives ask for it.
        """
        self.offers += frame.kind == Kind.OFFER
        self.held += letter_cost(frame.size) if frame.kind == Kind.LETTER else 0
        if self.held > CREDIT_BYTES or self.offers > OFFERS:
            raise ConnectionError("it sent more than it may before receives ask for it")

    def take(self, size: int) -> int:
        """A receive has taken a letter of that rank. Returns how much credit is to be given back now: often 0."""
        self.taken += letter_cost(size)
        if self.taken < CREDIT_BYTES // 4:
            return 0
        given, self.taken = self.taken, 0
        self.held -= given
        return given

    def post(self, frame: Frame, data: memoryview | bytes = b"", then: Any = None) -> None:
        """Let a frame go out after what was posted before.

        Args:
            frame: Its head.
            data: Stays as it is until it is out.
            then: What `write` returns then.
        """
        head = _HEAD.pack(frame.kind, frame.tag, frame.number, frame.size, frame.about.encode())
        self._out.append((memoryview(head), None if len(data) else then))
        if len(data):
            self._out.append((memoryview(data), then))

    def write(self) -> list[Any]:
        """Send what goes without waiting.

        Returns:
            What was to come `then`, of what is out.

        Raises:
            OSError: The connection has ended.
        """
        done = []
        while self._out:
            try:
                sent = self.connection.sendmsg([data for data, _ in list(self._out)[:_AT_ONCE]])
            except BlockingIOError:
                break
            while self._out and sent >= len(self._out[0][0]):
                data, then = self._out.popleft()
                sent -= len(data)
                if then is not None:
                    done.append(then)
            if sent:
                data, then = self._out[0]
                self._out[0] = data[sent:], then
        return done

    def read(self) -> Frame | None:
        """Receive what has come, up to the end of a head or of its data.

        Returns:
            The head when it has just come: `begin` is to be called. None: nothing new is known.

        Raises:
            OSError: The connection has ended, or what came is no frame.
            BlockingIOError: There is nothing more now.
        """
        target = memoryview(self._head) if self.frame is None else self.into
        if self._got < len(target):
            count = self.connection.recv_into(target[self._got :])
            if count == 0:
                raise ConnectionResetError("it was closed there")
            self._got += count
        if self.frame is not None or self._got < _HEAD.size:
            return None
        kind, tag, number, size, about = _HEAD.unpack(self._head)
        if kind not in Kind._value2member_map_:
            raise ConnectionError("what came is no message")
        return Frame(Kind(kind), tag, number, size, about.rstrip(b"\0").decode(errors="replace"))

    def begin(self, frame: Frame, into: memoryview) -> None:
        """Say where the data of the frame goes whose head has come."""
        self.frame, self.into, self._got = frame, into, 0

    def finish(self) -> Frame | None:
        """The frame that is here with all its data, once."""
        frame = self.frame
        if frame is None or self._got < len(self.into):
            return None
        self.frame, self._got = None, 0
        return frame

    def drop(self) -> list[Any]:
        """What is under way with that rank. It is left alone from now on, but for what is on its way already."""
        under_way = [
            *self.offered.values(),
            *self.wanted.values(),
            *(made for _, _, made in self.later),
            *(then for _, then in self._out if then is not None),
        ]
        self.offered.clear()
        self.wanted.clear()
        self.later.clear()
        return under_way

    def hush(self) -> list[Any]:
        """Nothing can be sent any more: drop what was to go out."""
        lost = [then for _, then in self._out if then is not None]
        self._out.clear()
        return lost
