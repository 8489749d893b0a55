"""Which transfers of GPUs the ranks of a group on several hosts make: told by its messages, which carry no data."""

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch

from phalanx.collectives._hosts.stream import Trade
from phalanx.collectives.c10d._hosts_mail import Mail
from phalanx.collectives.c10d._hosts_pending import Pending
from phalanx.core import PhalanxError, WaitTimeoutError
from phalanx.core.timeouts import milliseconds, timed_out


class MailWords:
    """What a Carrier asks of a Bridge (see Words in _hosts/carrier.py), between all ranks of a group.

    Args:
        mail: The messages of the group, which outlive this.
        name: Of the group, for errors.
        ranks: Its global ranks, in order.
        position: Of this rank.
        timeout: Of every wait.

    Attributes:
        is_broken: False: who has closed a connection is told by the mail.
    """

    is_broken = False

    def __init__(self, mail: Mail, name: str, ranks: Sequence[int], position: int, timeout: timedelta) -> None:
        self._mail = mail
        self._name = name
        self._ranks = ranks
        self._position = position
        self._timeout = timeout
        self._lock = threading.Lock()
        self._failure: PhalanxError | None = None

    def announce(
        self, call: str, number: int, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]
    ) -> Trade:
        """As Bridge.announce, of ranks; both ends must say the same dtype and number of bytes."""
        word = Trade(call, number)
        for rank, tensor in incoming.items():
            self._expect(word, rank, -number, f"{call}, {tensor.nbytes} bytes #{number}")
        for rank, tensor in outgoing.items():
            self._say(word, rank, -number, f"{call}, {tensor.nbytes} bytes #{number}")
        return word

    def exchange(self, word: Trade, rank: int, tag: int, about: str) -> None:
        """Say something to a rank that says the same.

        Args:
            word: Has the rank in `to_come` until it has said it.
            rank: Its position.
            tag: Negative, and of this alone.
            about: What is said.
        """
        self._expect(word, rank, tag, about)
        self._say(word, rank, tag, about)

    def _say(self, word: Trade, rank: int, tag: int, about: str) -> None:
        self._mail.send(word.call, rank, tag, about, memoryview(b""), None, self._limit_ms)

    def _expect(self, word: Trade, rank: int, tag: int, about: str) -> None:
        with self._lock:
            word.to_come.add(rank)

        def ended(heard: Pending) -> None:
            with self._lock:
                if heard.error is None:
                    word.to_come.discard(rank)
                else:
                    self._failure = self._failure or heard.error

        into = memoryview(bytearray())
        self._mail.receive(word.call, rank, tag, about, into, None, self._limit_ms).then(ended)

    @property
    def _limit_ms(self) -> int:
        return milliseconds(self._timeout)

    def look(self, call: str) -> None:
        """Raise what has gone wrong with any of them."""
        if self._failure is not None:
            raise self._failure

    def finish(self, trade: Trade) -> None:
        """For transfers of the CPU, of which there are none here: streams wait for those of GPUs."""
        raise AssertionError(f"{trade.call} on group '{self._name}': streams wait for transfers of GPUs, not the host")

    def late(self, trade: Trade) -> WaitTimeoutError:
        """The error of a transfer of which ranks have not said anything."""
        with self._lock:
            late = [self._ranks[each] for each in sorted(trade.to_come)]
        me = self._ranks[self._position]
        return WaitTimeoutError(
            f"{trade.call} on group '{self._name}': {timed_out(self._limit_ms)}: rank {me} still waits for rank(s) "
            f"{', '.join(str(each) for each in late)} on another host to call it",
            rank=me,
            peer=late[0] if late else -1,
            operation=trade.call.partition("(")[0],
            group=self._name,
        )

    def set_timeout(self, timeout: timedelta) -> None:
        """Of later waits."""
        self._timeout = timeout

    def give_up(self, error: PhalanxError) -> None:
        """The group tells the others."""

    def close(self) -> None:
        """The messages belong to the group."""
