"""A member that writes records into the rings of messages that no sender writes, and numbers that no reader writes."""

import struct
from pathlib import Path

import pytest

import wire
from liar import LIAR, TIMEOUT_MS, Liar, group_with_liar, honest_rank, raised
from ranks import run_ranks

GUARD = b"\xa5" * 4096
HALF_RING = wire.RING_BYTES // 2


def receive(rank, world_size, records, source, tag):
    """Every honest rank waits for ten bytes, and is told what it is told. Returns how that fails."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            for victim in range(world_size):
                if victim != LIAR:
                    for record, flag in records:
                        liar.segments[victim].send(LIAR, record, flag)
            liar.await_others()
            return None
    memory = bytearray(GUARD + bytes(10) + GUARD)
    out = memoryview(memory)[len(GUARD) : -len(GUARD)]
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        told = raised(lambda: group.recv(out, source, tag=tag, dtype="uint8"))
        assert memory[: len(GUARD)] == memory[-len(GUARD) :] == GUARD
        return told


def record(bytes_=10, tag=7, dtype=wire.UINT8, count=10, offset=0, kind=wire.EAGER):
    return wire.RECORD.pack(0, bytes_, tag, dtype, kind, count, offset) + b"x" * 64


BROKEN = "the memory shared with rank 1 (pid "


@pytest.mark.parametrize(
    ("lie", "flag"),
    [
        (record(), 12345),
        (record(bytes_=1 << 20), 1),
        (record(bytes_=(1 << 32) - 1), 1),
        (record(bytes_=HALF_RING), 1),
        (record(bytes_=11), 1),
        (record(bytes_=0), 1),
        (record(offset=1), 1),
        (record(offset=1 << 63), 1),
        (record(dtype=99), 1),
        (record(dtype=-1), 1),
        (record(count=(1 << 64) - 1), 1),
        (record(dtype=wire.FLOAT32, count=1 << 62), 1),
        (record(count=wire.RING_BYTES + 1), 1),
        (record(tag=8, count=1 << 50), 1),
        (record(kind=0), 1),
        (record(kind=9), 1),
        (record(kind=wire.RTS, count=1 << 30, offset=wire.RING_BYTES + 1), 1),
        (record(kind=wire.RTS, count=1 << 30, offset=1 << 63), 1),
        (record(kind=wire.RTS, count=5, offset=6, bytes_=1), 1),
        (record(kind=wire.RTS, count=1 << 30, offset=4), 1),
        (record(kind=wire.CTS, tag=0, bytes_=0), 1),
        (record(kind=wire.DATA, tag=0), 1),
        (record(kind=wire.DATA, tag=(1 << 32) - 1), 1),
    ],
    ids=[
        "another place",
        "longer than a piece",
        "longer than anything",
        "half a ring",
        "longer than its message",
        "nothing of a message",
        "another offset",
        "a huge offset",
        "unknown dtype",
        "a negative dtype",
        "a huge count",
        "a count that overflows",
        "too large to be eager",
        "huge and eager and not asked for",
        "no kind",
        "an unknown kind",
        "more eager data than may be",
        "a huge amount of eager data",
        "more eager data than the message has",
        "more data than announced",
        "a CTS for nothing",
        "data of nothing",
        "data of a message to come",
    ],
)
def test_a_record_that_cannot_be_fails_the_group(lie, flag):
    for error, peer, text in run_ranks(receive, 3, [(lie, flag)], LIAR, 7)[::2]:
        assert (error, peer) == ("InternalError", LIAR), text
        assert BROKEN in text and "is broken" in text


@pytest.mark.parametrize("count", [1 << 20, 1 << 40])
def test_a_message_that_does_not_fit_its_receive_is_a_mismatch(count):
    lie = record(bytes_=64, count=count, offset=64, kind=wire.RTS)
    for error, peer, text in run_ranks(receive, 3, [(lie, 1)], LIAR, 7)[::2]:
        assert (error, peer) == ("MismatchError", LIAR)
        assert f"called send(uint8, {count}, tag 7)" in text and "called recv(uint8, 10, tag 7)" in text


def test_a_message_that_nobody_asked_for_costs_nothing_however_huge_it_says_it_is():
    huge = record(bytes_=0, tag=8, count=(1 << 63) - 1, kind=wire.RTS)[:64]
    for told in run_ranks(receive_two, 3, huge, record())[::2]:
        assert told == ("nothing", -1, "it raised nothing")


def flood(rank, world_size, kind, bytes_):
    """The liar sends on and on what nobody asks for, without credit. Returns how that ends, and what it costs."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            segment = liar.segments[0]
            data = wire.RECORD.pack(0, bytes_, 8, wire.UINT8, kind, bytes_, 0) + bytes(bytes_)
            lines = (len(data) + wire.LINE - 1) // wire.LINE
            ring, start = segment.ring(LIAR), segment.ring(LIAR) + wire.LINE
            for place in range(0, 200_000 * lines, lines):
                room = wire.RING_BYTES // wire.LINE - 2 * lines
                while place - segment.words[ring // 4] > room:  # until the victim has taken more
                    if liar.said(0):
                        return None
                at = start + place * wire.LINE % wire.RING_BYTES
                after = start + (place + lines) * wire.LINE % wire.RING_BYTES
                segment.words[after // 4] = 0
                segment.write(at + 4, data[4:])
                segment.words[at // 4] = place << 1 & 0xFFFFFFFF | 1
                segment.words[segment.area() // 4] += 1
            liar.await_others()
            return None
    out = bytearray(10)
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        before = private_kib()
        told = raised(lambda: group.recv(out, 2 - rank if rank else LIAR, tag=7, dtype="uint8"))
        return told, private_kib() - before


def private_kib():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


@pytest.mark.parametrize(("kind", "bytes_"), [(wire.EAGER, 0), (wire.EAGER, 4064), (wire.RTS, 0)])
def test_a_rank_that_sends_more_than_it_may_fails_the_group_before_it_costs_memory(kind, bytes_):
    (error, peer, text), kib = run_ranks(flood, 3, kind, bytes_)[0]
    assert (error, peer) == ("InternalError", LIAR), text
    assert BROKEN in text and "more than it may before receives ask for it" in text
    assert kib < 24 << 10


def test_a_second_record_that_does_not_go_on_fails_the_group():
    first = record(bytes_=4)
    second = wire.RECORD.pack(0, 10, 0, 0, wire.DATA, 0, 4)  # ten more, of which six would fit
    start = bytes(4) + first[4:64]
    for error, peer, text in run_ranks(receive_two, 3, start, second)[::2]:
        assert (error, peer) == ("InternalError", LIAR)
        assert BROKEN in text and "does not continue its message" in text


def receive_two(rank, world_size, first, second):
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            for victim in (0, 2):
                segment = liar.segments[victim]
                place = segment.ring(LIAR) + 2 * wire.LINE  # the next line of the ring
                segment.write(
                    place, struct.pack("<I", 1 << 1 | 1) + second[4 : wire.LINE]
                )  # the line after it is empty
                segment.send(LIAR, first)
            liar.await_others()
            return None
    memory = bytearray(GUARD + bytes(10) + GUARD)
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        out = memoryview(memory)[len(GUARD) : -len(GUARD)]
        told = raised(lambda: group.recv(out, LIAR, tag=7, dtype="uint8"))
        assert memory[: len(GUARD)] == memory[-len(GUARD) :] == GUARD
        return told


def send(rank, world_size, taken):
    """Every honest rank sends more than fits into the liar's ring, which says that it has read `taken` lines."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            own = liar.segments[LIAR]
            for sender in (0, 2):
                own.words[own.ring(sender) // 4] = taken
                senders = liar.segments[sender]
                senders.words[senders.area() // 4] += 1  # it may sleep already: wakes it, as a reader that makes room
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        return raised(lambda: group.send(bytes(4 * wire.RING_BYTES), LIAR, dtype="uint8", timeout_ms=TIMEOUT_MS))


@pytest.mark.parametrize("taken", [1 << 20, 1 << 31, (1 << 32) - 1])
def test_a_reader_that_says_it_read_more_than_was_sent_fails_the_group(taken):
    for error, peer, text in run_ranks(send, 3, taken)[::2]:
        assert (error, peer) == ("InternalError", LIAR)
        assert BROKEN in text and "it says it read, or gave back, more than was sent" in text
