"""Messages between GPUs on several hosts, as a backend of torch carries them: those begun together go together.

A backend such as NCCL puts its sends and receives on a stream one after another, where two that wait for each other
wait for ever, but for those that it gets as one. So a message that is begun is told to the other end, and goes when
somebody waits for it or asks about it, or at the next call for a GPU, with all that were begun until then: what
torch.distributed.batch_isend_irecv promises, which does not tell a group in Python where a batch ends.

On a stream beside the callers': nothing but a wait for the message makes their streams wait.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from phalanx.collectives._hosts.carrier import Carrier, Load, Parcel
from phalanx.collectives._hosts.stream import Trade
from phalanx.collectives._streams import Mark
from phalanx.collectives.c10d._hosts_words import MailWords
from phalanx.collectives.c10d._python_tensors import Buffers

_TAGS = 1 << 62  # below it are those of exchanges; all are negative


class Message:
    """A message that was begun. It has the calls of a Mark, for the place where it has ended.

    Args:
        parcel: What goes or comes.
        is_sent: Which of both.
        word: What the other end was told, and answers.
        buffers: What it belongs to; finished when it has come.
        send_off: Lets it go.
    """

    def __init__(
        self, parcel: Parcel, is_sent: bool, word: Trade, buffers: Buffers, send_off: Callable[[], None]
    ) -> None:
        self.parcel, self.is_sent, self.word, self.buffers = parcel, is_sent, word, buffers
        self.before = Mark(parcel.tensor.device)
        self.after: Mark | None = None
        self._send_off = send_off

    @property
    def stream(self) -> Any:
        """The stream on which it ends."""
        return self._ended().stream

    def wait(self) -> None:
        """Let the current stream wait until it has ended. The host goes on."""
        self._ended().wait()

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self._ended().synchronize()

    def query(self) -> bool:
        """Whether it has ended. Never blocks."""
        return self._ended().query()

    def _ended(self) -> Mark:
        if self.after is None:
            self._send_off()
        if self.after is None:  # it went with others that failed, or they with it
            self.after = self.before
        return self.after


class FarMessages:
    """Those of one rank with ranks on other hosts.

    Args:
        carrier: Between all ranks of the group.
        words: Its words.
        position: Of this rank.
    """

    def __init__(self, carrier: Carrier, words: MailWords, position: int) -> None:
        self.carrier = carrier
        self._words = words
        self._position = position
        self._counts: Counter[tuple[int, bool]] = Counter()
        self._waiting: list[Message] = []
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    @property
    def are_waiting(self) -> bool:
        """Whether some were begun that have not gone."""
        return bool(self._waiting)

    def add(
        self, is_sent: bool, peer: int, tag: int, tensor: torch.Tensor, buffers: Buffers, send_off: Callable[[], None]
    ) -> Message:
        """Begin one: after what the current stream has to do. Those of two ranks come as they go, whatever their tags.

        Args:
            is_sent: Or received.
            peer: The other end.
            tag: Alike at both ends.
            tensor: What goes or comes, contiguous.
            buffers: What it belongs to.
            send_off: As of Message.

        Raises:
            PhalanxError: The group has failed.
        """
        self._counts[peer, is_sent] += 1
        number = self._counts[peer, is_sent]
        word = Trade("send" if is_sent else "recv", number)
        kind = str(tensor.dtype).removeprefix("torch.")
        upwards = (self._position < peer) == is_sent
        about = f"message {number} of GPUs({kind}, {tensor.numel()}, tag {tag})"
        self._words.exchange(word, peer, -(_TAGS + 2 * number + upwards), about)
        made = Message(Parcel(peer, tensor, number & 0x7FFFFFFF), is_sent, word, buffers, send_off)
        with self._lock:
            self._waiting.append(made)
        return made

    def send_off(self) -> None:
        """Let all go that were begun, those of one GPU as one.

        Raises:
            PhalanxError: As for Carrier.finish.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for device in dict.fromkeys(each.parcel.tensor.device for each in waiting):
            self._go(device, [each for each in waiting if each.parcel.tensor.device == device])

    def _go(self, device: torch.device, some: list[Message]) -> None:
        beside = self._streams.get(device)
        if beside is None:
            make: Any = torch.cuda.Stream  # without types
            beside = self._streams[device] = make(device)
        words = [each.word for each in some]
        load = Load(" and ".join(sorted({word.call for word in words})), words[0].number)
        load.word = _All(load.call, load.number, words)
        with torch.cuda.device(device), torch.cuda.stream(beside):
            for each in some:
                each.before.wait()
                each.buffers.used_on(beside)
            self._words.look(load.call)
            outgoing, incoming = ([each.parcel for each in some if each.is_sent == sent] for sent in (True, False))
            self.carrier.start(load, outgoing, incoming)
            self.carrier.finish(load)
            for each in some:
                each.buffers.finish()
            after = Mark(device)
        for each in some:
            each.after = after


class _All(Trade):
    """The words of several messages as one."""

    def __init__(self, call: str, number: int, words: list[Trade]) -> None:
        super().__init__(call, number)
        self._words = words

    @property
    def is_done(self) -> bool:
        for word in self._words:
            self.to_come = set(word.to_come)
            if not word.is_done:
                return False
        return True
