"""A rank with a proper connection that sends what no rank sends: garbage, floods, revocations, goodbyes."""

import contextlib
import os
import random
import resource

import pytest

import wire
from liar import (
    BYSTANDER,
    LIAR,
    VICTIM,
    WAIT_SECONDS,
    Liar,
    count_descriptors,
    group_with_liar,
    honest_rank,
    raised,
    until,
)
from phalanx.core import FileStore
from ranks import run_ranks, scratch

QUEUE = 4096  # messages of one peer that may wait unasked: core/src/world/monitor.cpp
HONEST = (VICTIM, BYSTANDER)


def connected(rank, world_size, lie, args):
    """What a barrier of each rank comes to after the lie: the error, or None. The liar has None."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            lie(liar, *args)
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        return raised(group.barrier)


def attack(lie, *args):
    return run_ranks(connected, 3, lie, args)[::2]


def everybody(liar, data):
    for rank in HONEST:
        wire.send(liar.links[rank], data)


# ---- what ends the connection


def send_garbage(liar, seed):
    rng = random.Random(seed)
    size = rng.choice([1, wire.ENVELOPE.size - 1, wire.ENVELOPE.size, 100, wire.MAX_PAYLOAD, 2000, 60000])
    everybody(liar, rng.randbytes(size))


@pytest.mark.parametrize("seed", range(8))
def test_garbage_after_a_proper_handshake_ends_the_connection(seed):
    for error, peer, text in attack(send_garbage, seed):
        assert (error, peer) == ("PeerDeadError", LIAR)
        assert "rank 1 (pid " in text and "closed its connection" in text


def send_nothing(liar):
    everybody(liar, b"")


def test_an_empty_message_ends_the_connection():
    for error, peer, _ in attack(send_nothing):
        assert (error, peer) == ("PeerDeadError", LIAR)


def flood(liar, payload_bytes):
    for rank in HONEST:
        if all(liar.tell(rank, bytes(payload_bytes), (), 1000 + ordinal) for ordinal in range(10 * QUEUE)):
            raise AssertionError(f"rank {rank} took {10 * QUEUE} messages that it had not asked for")


@pytest.mark.parametrize("payload_bytes", [0, wire.MAX_PAYLOAD])
def test_messages_that_nobody_asked_for_are_bounded(payload_bytes):
    for error, peer, _ in attack(flood, payload_bytes):
        assert (error, peer) == ("PeerDeadError", LIAR)


def flood_with_descriptors(liar):
    for rank in HONEST:
        for ordinal in range(QUEUE):
            if not liar.tell(rank, b"", (liar.fds[0],) * wire.MAX_FDS, ordinal, group_id=1):
                break


def descriptors_left(rank, world_size):
    """How many more descriptors each honest rank holds once the connection to the liar has ended."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            flood_with_descriptors(liar)
            liar.store.set("flooded", b"")
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        before = count_descriptors()
        error, peer, _ = raised(group.barrier)
        assert (error, peer) == ("PeerDeadError", LIAR)
        FileStore(scratch() / "store").wait(["flooded"], WAIT_SECONDS * 1000)  # the other one may say that it is dead
        with contextlib.suppress(TimeoutError):
            until(lambda: count_descriptors() <= before, "what it was sent is closed", seconds=3)
        return count_descriptors() - before


def test_descriptors_that_nobody_asked_for_do_not_use_up_those_of_the_process():
    victim, _, bystander = run_ranks(descriptors_left, 3)
    assert victim <= 0 and bystander <= 0


def say_goodbye(liar):
    for rank in HONEST:
        liar.tell(rank, b"", kind=wire.GOODBYE)


def test_who_says_goodbye_has_left():
    for error, peer, text in attack(say_goodbye):
        assert (error, peer) == ("PeerDeadError", LIAR)
        assert "has left" in text


# ---- what is passed over


def barrier(liar):
    liar.segments[LIAR].publish(1, wire.CALL.pack(wire.BARRIER, 0, 0, 0, -1, 0, 0))
    for rank in HONEST:
        liar.await_epoch(rank, 1)


def passed_over(rank, world_size, kind, payload_bytes, count, group_id):
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            for to in HONEST:
                for number in range(count):
                    changes = {"kind": kind} if group_id is None else {"kind": kind, "group_id": group_id + number}
                    liar.tell(to, os.urandom(payload_bytes), **changes)
            barrier(liar)
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        group_with_liar(world).barrier()
    return "passed"


@pytest.mark.parametrize(
    ("kind", "payload_bytes", "count", "group_id"),
    [
        (wire.REVOKE, 0, 1, None),
        (wire.REVOKE, wire.ERROR.size - 1, 1, None),
        (wire.REVOKE, wire.ERROR.size + 1, 1, None),
        (wire.REVOKE, wire.ERROR.size, 3000, 1),
        (99, 0, 3000, None),
        (99, wire.MAX_PAYLOAD, 1, None),
    ],
    ids=["empty revocation", "short one", "long one", "revocations of other groups", "unknown kind", "with payload"],
)
def test_what_says_nothing_to_anybody_is_passed_over(kind, payload_bytes, count, group_id):
    assert run_ranks(passed_over, 3, kind, payload_bytes, count, group_id) == ["passed", None, "passed"]


# ---- revocations


def revoke(liar, status, text, ranks=HONEST):
    for rank in ranks:
        liar.tell(rank, wire.error_info(status, text, rank=LIAR, peer=LIAR), kind=wire.REVOKE)


def test_a_revocation_ends_a_wait_with_its_text():
    for error, peer, text in attack(revoke, -6, "x" * 700):  # cut, and without a terminating zero
        assert (error, peer) == ("RevokedError", LIAR)
        assert "xxxx" in text


@pytest.mark.parametrize("status", [0, 1, 1 << 30])
def test_a_revocation_never_passes_for_success(status):
    for error, peer, text in attack(revoke, status, "all is well"):
        assert (error, peer) == ("RevokedError", LIAR)
        assert "all is well" in text


def test_whoever_is_told_tells_the_others():
    for error, peer, text in attack(revoke, -6, "told to one", (VICTIM,)):
        assert (error, peer) == ("RevokedError", LIAR)
        assert "told to one" in text


def confirm_with(rank, world_size, status):
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.meet()
            liar.dial()
            liar.share()
            liar.confirm(status, "all is well")
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        return raised(lambda: world.create_group("g", range(world_size)))


def test_a_confirmation_never_passes_for_success():
    for error, _, text in run_ranks(confirm_with, 3, 1)[::2]:
        assert error == "InternalError"
        assert "rank 1" in text


# ---- agreement


def never_agree(rank, world_size, rounds):
    """The liar has another opinion than the others in every round. Returns in how many it was asked for one."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            asked = 0
            while asked < rounds:
                ordinal = 1 << 63 | 1 << 16 | asked  # of the first agreement
                for to in HONEST:
                    liar.tell(to, wire.OPINION.pack((1 << 64) - 1, 0, bytes(128)), (), ordinal)
                if any(not liar.asked(to, ordinal) for to in HONEST):
                    break
                asked += 1
            liar.await_others()
            return asked
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        return raised(lambda: group.agree(5, timeout_ms=1000))


def test_an_agreement_has_no_more_rounds_than_ranks_and_one():
    victim, asked, bystander = run_ranks(never_agree, 3, 40)
    assert asked <= 4, (victim, bystander)
