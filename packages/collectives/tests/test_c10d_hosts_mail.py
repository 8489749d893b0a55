"""Messages of process groups on several hosts, with both ends in one process."""

import contextlib
import socket
import threading

import pytest

from phalanx.collectives.c10d._hosts_frames import _HEAD, CREDIT_BYTES, LETTER_BYTES, Kind
from phalanx.collectives.c10d._hosts_mail import Mail
from phalanx.core import ANY_RANK, MismatchError, PeerDeadError, RevokedError, WaitTimeoutError

LIMIT_MS = 20_000
OVER = r"timed out after 50 ms \(the timeout of the group\)"


class End:
    """One rank's mail. Its failures are collected."""

    def __init__(self, connections, position, ranks):
        self.failures, self.failed = [], threading.Event()
        self.mail = Mail(connections, "g", ranks, position, self.note)
        self.mail.start()

    def note(self, error, known):
        self.failures.append((error, known))
        self.mail.fail(error)
        self.failed.set()

    def failure(self):
        assert self.failed.wait(20)
        return self.failures[0]

    def send(self, to, data, tag=0, about="bytes"):
        return self.mail.send("send", to, tag, about, memoryview(data), None, LIMIT_MS)

    def receive(self, source, size, tag=0, about="bytes"):
        into = bytearray(size)
        return self.mail.receive("recv", source, tag, about, memoryview(into), None, LIMIT_MS), into


def pair():
    ends = socket.socketpair()
    for each in ends:
        each.setblocking(False)
    return ends


@pytest.fixture
def three():
    """The ranks 10, 11 and 12."""
    made = {(a, b): pair() for a in range(3) for b in range(a)}
    ends = []
    for me in range(3):
        own = {b: made[me, b][0] for b in range(me)} | {a: made[a, me][1] for a in range(me + 1, 3)}
        ends.append(End(own, me, [10, 11, 12]))
    yield ends
    for each in ends:
        each.mail.close()


@pytest.fixture
def stranger():
    """Rank 10, and a connection on which its only peer may say anything."""
    ends = pair()
    end = End({1: ends[0]}, 0, [10, 11])
    ends[1].setblocking(True)
    yield end, ends[1]
    end.mail.close()
    ends[1].close()


def head(kind, tag=0, number=0, size=0, about=b""):
    return _HEAD.pack(kind, tag, number, size, about)


def test_messages_meet_by_sender_and_tag_in_the_order_sent(three):
    a, b, c = three
    for i, size in enumerate((3, LETTER_BYTES + 1, 0, LETTER_BYTES, 1 << 20)):
        a.send(1, bytes([i]) * size, tag=7)
        a.send(1, bytes([10 + i]) * size, tag=8)
    c.send(1, b"from c!", tag=7)
    receive, into = b.receive(2, 7, tag=7)
    receive.wait(LIMIT_MS)
    assert into == b"from c!" and receive.source() == 2
    for tag, first in ((8, 10), (7, 0)):
        for i, size in enumerate((3, LETTER_BYTES + 1, 0, LETTER_BYTES, 1 << 20)):
            receive, into = b.receive(0, size, tag=tag)
            receive.wait(LIMIT_MS)
            assert into == bytes([first + i]) * size


def test_a_receive_from_anybody_takes_what_comes_first_and_a_rank_may_write_to_itself(three):
    a, b, c = three
    receives = [b.receive(ANY_RANK, 2) for _ in range(3)]
    a.send(1, b"aa")
    receives[0][0].wait(LIMIT_MS)
    c.send(1, b"cc")
    receives[1][0].wait(LIMIT_MS)
    b.send(1, b"bb")
    receives[2][0].wait(LIMIT_MS)
    assert [(receive.source(), bytes(into)) for receive, into in receives] == [(0, b"aa"), (2, b"cc"), (1, b"bb")]


def test_a_large_message_waits_for_its_receive_and_a_small_one_does_not(three):
    a, b, _ = three
    small, large = a.send(1, b"x"), a.send(1, bytes(LETTER_BYTES + 1), tag=1)
    small.wait(LIMIT_MS)
    assert not large.test()
    with pytest.raises(WaitTimeoutError, match=rf"send on group 'g': {OVER}: rank 10 still waits until rank 11 rec"):
        large.wait(50)
    again = a.send(1, b"y" * (LETTER_BYTES + 1), tag=1)  # the one that was given up is not delivered
    late, _ = b.receive(0, LETTER_BYTES + 1, tag=1)
    with pytest.raises(WaitTimeoutError, match=rf"recv on group 'g': {OVER}: rank 11 still waits for a message from"):
        late.wait(50)
    receive, into = b.receive(0, LETTER_BYTES + 1, tag=1)
    receive.wait(LIMIT_MS)
    again.wait(LIMIT_MS)
    assert into == b"y" * (LETTER_BYTES + 1)
    assert not a.failures and not b.failures  # the group is as good as before


def test_small_messages_beyond_the_credit_wait_for_their_receives_and_keep_their_order(three):
    a, b, _ = three
    size, count = 50_000, 300
    works = [a.send(1, i.to_bytes(4, "little") * (size // 4), tag=i % 3) for i in range(count)]
    last = a.send(1, b"last", tag=9)
    receive, into = b.receive(0, 4, tag=9)  # overtakes all others
    receive.wait(LIMIT_MS)
    assert into == b"last"
    works[0].wait(LIMIT_MS)
    assert not works[-1].test()
    kept = sum(len(letter.data) for letter in b.mail._letters if letter.data is not None)
    assert size < kept <= CREDIT_BYTES
    for tag in (2, 0, 1):
        for i in range(tag, count, 3):
            receive, into = b.receive(0, size, tag=tag)
            receive.wait(LIMIT_MS)
            assert into == i.to_bytes(4, "little") * (size // 4)
    for work in [*works, last]:
        work.wait(LIMIT_MS)
    again = a.send(1, bytes(100))  # there is credit again
    again.wait(LIMIT_MS)


def test_more_messages_than_may_be_offered_wait_at_their_sender(three, monkeypatch):
    for module in ("_hosts_mail", "_hosts_frames"):
        monkeypatch.setattr(f"phalanx.collectives.c10d.{module}.OFFERS", 10)
    a, b, _ = three
    size = LETTER_BYTES + 1
    works = [a.send(1, bytes([i]) * size, tag=1) for i in range(50)]
    small = a.send(1, b"x", tag=1)
    with pytest.raises(WaitTimeoutError):
        works[40].wait(20)
    for i in [*range(40), *range(41, 50)]:
        receive, into = b.receive(0, size, tag=1)
        receive.wait(LIMIT_MS)
        assert into == bytes([i]) * size
    receive, into = b.receive(0, 1, tag=1)
    receive.wait(LIMIT_MS)
    small.wait(LIMIT_MS)
    assert into == b"x" and not a.failures and not b.failures


@pytest.mark.parametrize(("kind", "size"), [(Kind.LETTER, 60_000), (Kind.OFFER, 6)])
def test_a_peer_that_sends_more_than_it_may_is_cut_off(stranger, monkeypatch, kind, size):
    monkeypatch.setattr("phalanx.collectives.c10d._hosts_frames.OFFERS", 100)
    end, other = stranger
    other.settimeout(2)  # who is cut off may be heard no more, and then has no room to write
    frame = head(kind, 3, 1, size) + bytes(size if kind == Kind.LETTER else 0)
    with contextlib.suppress(OSError):
        for _ in range(101):
            other.sendall(frame)
    error, _ = end.failure()
    assert "it sent more than it may before receives ask for it" in str(error)


def test_both_ends_learn_that_they_disagree(three):
    a, b, c = three
    a.send(1, bytes(12), about="float32, 3")
    receive, _ = b.receive(0, 12, about="int32, 3")
    with pytest.raises(MismatchError, match=r"rank 10 sent float32, 3 \(12 bytes\) while rank 11 expects int32, 3"):
        receive.wait(LIMIT_MS)
    error, known = b.failure()
    assert isinstance(error, MismatchError) and not known
    b.mail.give_up(str(error))
    for each in (a, c):
        error, known = each.failure()
        assert isinstance(error, RevokedError) and known and "rank 11 gave up: recv on group" in str(error)
    with pytest.raises(RevokedError, match="revoked by an earlier failure: rank 11 gave up"):
        a.send(2, b"x")


def test_a_rank_that_leaves_in_good_order_is_missed_only_by_who_waits_for_it(three):
    a, b, c = three
    a.send(1, b"last")
    waits, _ = c.receive(0, 4)
    anybody, into = c.receive(ANY_RANK, 4)
    a.mail.close()
    with pytest.raises(PeerDeadError, match="recv on group 'g': rank 10 has left the group"):
        waits.wait(LIMIT_MS)
    receive, last = b.receive(0, 4)
    receive.wait(LIMIT_MS)
    assert last == b"last"
    b.send(2, b"here")
    anybody.wait(LIMIT_MS)
    assert into == b"here"
    with pytest.raises(PeerDeadError, match="rank 10 has left"):
        b.send(0, b"x").wait(LIMIT_MS)
    b.mail.close()
    with pytest.raises(PeerDeadError, match="all other ranks have left the group"):
        c.receive(ANY_RANK, 4)[0].wait(LIMIT_MS)
    assert not a.failures and not b.failures and not c.failures


def test_a_rank_that_ends_without_a_word_is_dead(stranger):
    end, other = stranger
    receive, _ = end.receive(1, 4)
    other.close()
    with pytest.raises(PeerDeadError, match="the connection with rank 11 has ended"):
        receive.wait(LIMIT_MS)
    error, known = end.failure()
    assert isinstance(error, PeerDeadError) and error.peer == 11 and not known
    assert "Its process has died, or its host or the network is gone" in str(error)


def send_for_ever(end):
    while True:
        end.send(1, bytes(100)).wait(LIMIT_MS)


def test_what_was_said_is_read_though_nothing_can_be_sent_any_more(stranger):
    end, other = stranger
    other.sendall(head(Kind.GAVE_UP, size=7) + b"no more")
    other.shutdown(socket.SHUT_RDWR)
    other.close()
    with pytest.raises((PeerDeadError, RevokedError)):
        send_for_ever(end)
    error, known = end.failure()
    assert known and "rank 11 gave up: no more" in str(error)


@pytest.mark.parametrize(
    "said",
    [
        bytes(255 - i % 64 for i in range(_HEAD.size)),
        head(99),
        head(Kind.LETTER, size=LETTER_BYTES + 1),
        head(Kind.LETTER, size=(1 << 64) - 1),
        head(Kind.DATA, number=5, size=10),
        head(Kind.GAVE_UP, size=1 << 40),
    ],
)
def test_a_peer_that_says_nonsense_ends_the_group_and_takes_no_memory(stranger, said):
    end, other = stranger
    other.sendall(said)
    error, _ = end.failure()
    assert isinstance(error, PeerDeadError) and "rank 11" in str(error)


def test_frames_may_come_in_pieces_and_wants_that_nobody_can_meet_are_passed_over(stranger):
    end, other = stranger
    other.sendall(head(Kind.WANT, number=77))
    frames = head(Kind.LETTER, 3, 0, 5, b"bytes") + b"hello" + head(Kind.OFFER, 4, 9, 6, b"bytes")
    for byte in frames:
        other.sendall(bytes([byte]))
    small, into = end.receive(1, 5, tag=3)
    small.wait(LIMIT_MS)
    large, more = end.receive(1, 6, tag=4)
    assert other.recv(_HEAD.size, socket.MSG_WAITALL) == head(Kind.WANT, number=9)
    other.sendall(head(Kind.DATA, number=9, size=6) + b"world!")
    large.wait(LIMIT_MS)
    assert (into, more) == (b"hello", b"world!")
    assert not end.failures
