"""Messages between the ranks of a group on several hosts. They meet as those of the core do.

Every rank has a connection with each other one, made after both ends have proved that they read the same store (see
_hosts/connect.py). Whoever sends writes what goes without waiting; one thread writes the rest, and reads everything.
"""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.collectives.c10d._hosts_frames import (
    ABOUT_BYTES,
    CREDIT_BYTES,
    LETTER_BYTES,
    OFFERS,
    Frame,
    Kind,
    Letter,
    Peer,
    letter_cost,
)
from phalanx.collectives.c10d._hosts_pending import Pending, Receive, Send, revoked, told
from phalanx.core import ANY_RANK, MismatchError, PeerDeadError, PhalanxError, RevokedError, WaitTimeoutError
from phalanx.core.timeouts import timed_out

_FLUSH_S = 2.0  # for what was sent, at the end
_FLUSH_FAILED_S = 0.2
_READS = 16  # of one connection before the others have their turn


class Mail:
    """The messages of one rank.

    Args:
        connections: By position in the group, all but this rank's; not blocking. They belong to it.
        name: Of the group, for errors.
        ranks: Its global ranks, in order.
        position: Of this rank.
        failed: Called, in the thread of the mail or of a caller, when the group is of no use any more, with the error,
            and whether the other ranks have been told.
    """

    def __init__(
        self,
        connections: dict[int, socket.socket],
        name: str,
        ranks: Sequence[int],
        position: int,
        failed: Callable[[PhalanxError, bool], None],
    ) -> None:
        self._name = name
        self._ranks = ranks
        self._position = position
        self._failed = failed
        self._lock = threading.Lock()
        self._peers = {each: Peer(each, connection) for each, connection in connections.items()}
        self._posted: list[Receive] = []
        self._letters: list[Letter] = []
        self._offers = 0
        self._over: list[tuple[Pending, PhalanxError | None, int]] = []  # ended, and nobody was told yet
        self._bad: list[tuple[PhalanxError, bool]] = []  # likewise
        self._failure: PhalanxError | None = None
        self._closing: float | None = None  # until when what was sent may go
        self._wake, self._waker = socket.socketpair()
        for each in (self._wake, self._waker):
            each.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="phalanx_mail", daemon=True)

    def start(self) -> None:
        """Once, before all else."""
        self._thread.start()

    # ---- what callers do ----------------------------------------------------------------------------

    def send(self, what: str, to: int, tag: int, about: str, data: memoryview, owner: Any, timeout_ms: int) -> Pending:
        """Start to send.

        Args:
            what: Name of the call.
            to: Position of the receiver, which may be this rank.
            tag: Any number of 64 bits.
            about: What it is, in ASCII; the receiver must say the same. Only the first ABOUT_BYTES count.
            data: Stays as it is until it has ended: when it is received, unless it is small and within the credit.
            owner: Keeps the memory.
            timeout_ms: What it may take.
        """
        about = about[:ABOUT_BYTES]
        made = Send(what, to, data, owner, timeout_ms, self.late)
        with self._lock:
            self._check(what)
            if to == self._position:
                self._deliver(Letter(to, Frame(Kind.LETTER, tag, 0, len(data), about), memoryview(bytes(data))))
                self._end(made)
            elif self._peers[to].gone:
                self._end(made, self._lost(what, to))
            elif self._peers[to].later or not self._begin(self._peers[to], tag, about, made):
                self._peers[to].later.append((tag, about, made))
        self._tell()
        return made

    def receive(
        self, what: str, source: int, tag: int, about: str, into: memoryview, owner: Any, timeout_ms: int
    ) -> Pending:
        """Start to receive.

        Args:
            what: Name of the call.
            source: Position of the sender, or ANY_RANK.
            tag: Of the message.
            about: What it is, in ASCII; the sender must say the same. Only the first ABOUT_BYTES count.
            into: Written until it has ended.
            owner: Keeps the memory.
            timeout_ms: What it may take.
        """
        made = Receive(what, source, tag, about[:ABOUT_BYTES], into, owner, timeout_ms, self.late)
        with self._lock:
            self._check(what)
            letter = next((each for each in self._letters if made.takes(each.source, each.tag)), None)
            if letter is not None:
                self._letters.remove(letter)
                self._hand_over(letter, made)
            elif self._is_gone(source):
                self._end(made, self._lost(what, source))
            else:
                self._posted.append(made)
        self._tell()
        return made

    def late(self, pending: Pending, timeout_ms: int) -> PhalanxError:
        """The error of a message that took too long. It does not happen any more, if it had not begun."""
        with self._lock:
            if isinstance(pending, Receive):
                if pending in self._posted:
                    self._posted.remove(pending)
                source = pending.wanted_from
                doing = "waits for a message from " + (f"rank {self._ranks[source]}" if source >= 0 else "any rank")
            else:
                assert isinstance(pending, Send)
                peer = self._peers[pending.to]
                peer.later = deque(each for each in peer.later if each[2] is not pending)
                offered = peer.offered
                for number in [number for number, each in offered.items() if each is pending]:
                    del offered[number]
                doing = f"waits until rank {self._ranks[pending.to]} receives"
        me = self._ranks[self._position]
        text = f"{pending.what} on group '{self._name}': {timed_out(timeout_ms)}: rank {me} still {doing}"
        return WaitTimeoutError(text, rank=me, operation=pending.what, group=self._name)

    def stop_receiving(self, error: PhalanxError) -> None:
        """End the receives of callers, whose tags are not negative, to which nobody has sent anything."""
        with self._lock:
            for receive in [each for each in self._posted if each.tag >= 0]:
                self._posted.remove(receive)
                self._end(receive, told(receive.what, self._name, error))
        self._tell()

    def give_up(self, reason: str) -> None:
        """Tell all other ranks that the group is of no use any more."""
        with self._lock:
            data = reason.encode()[:LETTER_BYTES]
            for peer in self._peers.values():
                self._post(peer, Frame(Kind.GAVE_UP, size=len(data)), data)
        self._tell()

    def fail(self, error: PhalanxError) -> None:
        """End everything that is under way with an error, and refuse everything that comes."""
        with self._lock:
            self._drop_all(error)
        self._tell()

    def close(self) -> None:
        """Send what is left, say good-bye, and let go of the connections. Not from its own thread."""
        with self._lock:
            if self._closing is not None:
                return
            self._closing = time.monotonic() + (_FLUSH_S if self._failure is None else _FLUSH_FAILED_S)
            for peer in self._peers.values():
                self._post(peer, Frame(Kind.BYE))
            self._stir()
        self._thread.join()
        for each in (self._wake, self._waker, *(peer.connection for peer in self._peers.values())):
            each.close()

    # ---- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        peers = {peer.connection.fileno(): peer for peer in self._peers.values()}
        known: dict[int, int] = {}
        while True:
            with self._lock:
                left = None if self._closing is None else self._closing - time.monotonic()
                wanted = {
                    fd: select.POLLIN | (select.POLLOUT if peer.wants_out else 0)
                    for fd, peer in peers.items()
                    if not peer.gone
                }
            if left is not None and (left <= 0 or not any(events & select.POLLOUT for events in wanted.values())):
                return
            for fd in known.keys() - wanted.keys():
                poll.unregister(fd)
            for fd, events in wanted.items():
                if known.get(fd) != events:
                    poll.register(fd, events)
            known = wanted
            ready = poll.poll(None if left is None else left * 1000)
            with self._lock:
                for fd, events in ready:
                    if fd not in peers:
                        self._wake.recv(4096)
                        continue
                    if events & ~select.POLLOUT:
                        self._read(peers[fd])
                    if events & ~select.POLLIN:
                        self._write(peers[fd])
            self._tell()

    def _tell(self) -> None:
        """Tell who waits what has come to an end. Without the lock."""
        with self._lock:
            over, self._over = self._over, []
            bad, self._bad = self._bad, []
        for pending, error, source in over:
            pending.end(error, source)
        for failure, known in bad:
            self._failed(failure, known)

    # ---- all below is called with the lock ----------------------------------------------------------

    def _check(self, what: str) -> None:
        if self._failure is not None:
            raise revoked(what, self._name, self._failure)

    def _end(self, pending: Pending, error: PhalanxError | None = None, source: int = -1) -> None:
        self._over.append((pending, error, source))

    def _drop_all(self, error: PhalanxError) -> None:
        self._failure = self._failure or error
        under_way: list[Pending] = [*self._posted]
        self._posted.clear()
        self._letters.clear()
        for peer in self._peers.values():
            under_way += peer.drop()
        for each in under_way:
            self._end(each, told(each.what, self._name, error))

    def _break(self, error: PhalanxError, known: bool) -> None:
        """The group is of no use any more, which `_tell` says. At once, so that what comes later is not the cause."""
        if self._failure is None:
            self._drop_all(error)
            self._bad.append((error, known))

    def _post(self, peer: Peer, frame: Frame, data: memoryview | bytes = b"", then: Any = None) -> None:
        if not peer.gone:
            peer.post(frame, data, then)
            self._write(peer)

    def _begin(self, peer: Peer, tag: int, about: str, made: Send) -> bool:
        """Send a small message within the credit, or offer it. False: that rank must first ask for others."""
        size = len(made.data)
        if size <= LETTER_BYTES and peer.charged + letter_cost(size) <= CREDIT_BYTES:
            peer.charged += letter_cost(size)
            self._post(peer, Frame(Kind.LETTER, tag, 0, size, about), bytes(made.data))
            self._end(made)
        elif peer.announced < OFFERS:
            peer.announced += 1
            self._offers += 1
            peer.offered[self._offers] = made
            self._post(peer, Frame(Kind.OFFER, tag, self._offers, size, about))
        else:
            return False
        return True

    def _begin_later(self, peer: Peer) -> None:
        while peer.later and self._begin(peer, *peer.later[0]):
            peer.later.popleft()

    def _write(self, peer: Peer) -> None:
        try:
            for sent in peer.write():
                self._end(sent)
        except OSError:  # what came before that end is still to be read
            for lost in peer.hush():
                self._end(lost, self._lost(lost.what, peer.position))
        if peer.wants_out:
            self._stir()

    def _stir(self) -> None:
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(BlockingIOError):  # it is being stirred
                self._waker.send(b"x")

    def _read(self, peer: Peer) -> None:
        try:
            for _ in range(_READS):
                if peer.gone:
                    return
                head = peer.read()
                if head is not None:
                    peer.begin(head, self._room(peer, head))
                frame = peer.finish()
                if frame is not None:
                    self._arrived(peer, frame, peer.into)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(peer, error)

    def _room(self, peer: Peer, frame: Frame) -> memoryview:
        """Where the data of a frame goes."""
        if frame.kind == Kind.DATA:
            wanted: Receive | None = peer.wanted.get(frame.number)
            if wanted is None or len(wanted.into) != frame.size:
                raise ConnectionError("it sent what nobody had asked for")
            return wanted.into
        if frame.kind in (Kind.LETTER, Kind.OFFER):
            peer.accept(frame)
        if frame.kind not in (Kind.LETTER, Kind.GAVE_UP):
            return memoryview(b"")
        if frame.size > LETTER_BYTES:
            raise ConnectionError(f"it sent {frame.size} bytes that nobody had asked for")
        return memoryview(bytearray(frame.size))

    def _arrived(self, peer: Peer, frame: Frame, data: memoryview) -> None:
        """A frame is here with all its data."""
        if frame.kind == Kind.LETTER:
            self._deliver(Letter(peer.position, frame, data))
        elif frame.kind == Kind.OFFER:
            self._deliver(Letter(peer.position, frame))
        elif frame.kind == Kind.TAKEN:
            peer.charged = max(0, peer.charged - frame.size)
            self._begin_later(peer)
        elif frame.kind == Kind.WANT:
            peer.announced -= 1
            sent: Send | None = peer.offered.pop(frame.number, None)
            if sent is not None:  # it may have been given up
                self._post(peer, Frame(Kind.DATA, 0, frame.number, len(sent.data)), sent.data, sent)
            self._begin_later(peer)
        elif frame.kind == Kind.DATA:
            received: Receive | None = peer.wanted.pop(frame.number, None)
            if received is not None:
                self._end(received, source=peer.position)
        elif frame.kind == Kind.GAVE_UP:
            rank, text = self._ranks[peer.position], bytes(data).decode(errors="replace")
            self._break(RevokedError(f"rank {rank} gave up: {text}", peer=rank, group=self._name), True)
        else:
            self._lose(peer, None)

    def _deliver(self, letter: Letter) -> None:
        """Give a message to who waits for it, or keep it."""
        for posted in self._posted:
            if posted.takes(letter.source, letter.tag):
                self._posted.remove(posted)
                self._hand_over(letter, posted)
                return
        if self._failure is None:
            self._letters.append(letter)

    def _hand_over(self, letter: Letter, receive: Receive) -> None:
        if letter.about != receive.about or letter.size != len(receive.into):
            here, there = self._ranks[self._position], self._ranks[letter.source]
            text = (
                f"{receive.what} on group '{self._name}': rank {there} sent {letter.about} ({letter.size} bytes) while "
                f"rank {here} expects {receive.about} ({len(receive.into)} bytes). Both must say the same."
            )
            error = MismatchError(text, rank=here, peer=there, operation=receive.what, group=self._name)
            self._end(receive, error)
            self._break(error, False)
        elif letter.data is not None:
            receive.into[:] = letter.data
            self._end(receive, source=letter.source)
            if letter.source != self._position:
                credit = self._peers[letter.source].take(letter.size)
                if credit:
                    self._post(self._peers[letter.source], Frame(Kind.TAKEN, size=credit))
        elif self._peers[letter.source].gone:
            self._end(receive, self._lost(receive.what, letter.source))
        else:
            self._peers[letter.source].offers -= 1
            self._peers[letter.source].wanted[letter.number] = receive
            self._post(self._peers[letter.source], Frame(Kind.WANT, number=letter.number))

    def _lose(self, peer: Peer, error: OSError | None) -> None:
        """Nothing comes from a rank any more. Without an error, it has said so."""
        rank = self._ranks[peer.position]
        peer.gone = f"rank {rank} has left the group"
        if error is not None:
            peer.gone = f"the connection with rank {rank} has ended: {error.strerror or error}"
        for each in [*peer.drop(), *peer.hush()]:
            self._end(each, self._lost(each.what, peer.position))
        for receive in [each for each in self._posted if self._is_gone(each.wanted_from)]:
            self._posted.remove(receive)
            self._end(receive, self._lost(receive.what, receive.wanted_from))
        if error is not None and self._closing is None:
            text = f"{peer.gone}. Its process has died, or its host or the network is gone"
            self._break(PeerDeadError(text, peer=rank, group=self._name), False)

    def _lost(self, what: str, position: int) -> PhalanxError:
        """The error of a message with a rank that is gone."""
        peer, why = -1, "all other ranks have left the group"
        if position >= 0:
            peer = self._ranks[position]
            why = self._peers[position].gone or f"the connection with rank {peer} has ended"
        return PeerDeadError(f"{what} on group '{self._name}': {why}", peer=peer, operation=what, group=self._name)

    def _is_gone(self, source: int) -> bool:
        """Whether nothing can come from there any more: a position, or ANY_RANK."""
        if source == ANY_RANK:
            return all(peer.gone for peer in self._peers.values())
        return source != self._position and bool(self._peers[source].gone)
