"""A member that writes what it likes into the memory of a group, its own and that of others, during collectives."""

import array
import random
import struct

import pytest

import wire
from liar import BYSTANDER, LIAR, SLOT_BYTES, TIMEOUT_MS, VICTIM, Liar, group_with_liar, honest_rank, raised
from phalanx.core import PhalanxError
from ranks import run_ranks

GUARD = 256
SEGMENT = SLOT_BYTES // 3 // wire.LINE * (wire.LINE // 4)  # elements of a slot for each rank in all_to_all_v


class Guarded:
    """A buffer of floats between bytes that nobody may touch."""

    def __init__(self, count):
        self.memory = bytearray(b"\xa5" * (GUARD + 4 * count + GUARD))
        self.view = memoryview(self.memory)[GUARD:-GUARD].cast("f")

    def check(self):
        assert self.memory[:GUARD] == self.memory[-GUARD:] == b"\xa5" * GUARD


def floats(count, value=1.0):
    return array.array("f", [value] * count)


def all_reduce(group, timeout_ms):
    group.all_reduce(floats(4), floats(4), timeout_ms=timeout_ms)


def collective(rank, world_size, lie, args, timeout_ms):
    """Returns how an all_reduce fails on each rank; the liar has None."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            lie(liar, *args)
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        return raised(lambda: all_reduce(group, timeout_ms))


def attack(lie, *args, timeout_ms=TIMEOUT_MS):
    victim, _, bystander = run_ranks(collective, 3, lie, args, timeout_ms)
    return victim, bystander


# ---- the record of a call


def publish(liar, call):
    liar.segments[LIAR].publish(1, call)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ((250, 250, 250, 250, -1, 4, 0), "an unknown collective("),
        ((wire.ALL_REDUCE, 250, 250, 250, 1 << 30, (1 << 64) - 1, (1 << 64) - 1), "all_reduce(?, 18446744073709551615"),
        ((wire.ALL_REDUCE, wire.FLOAT32, wire.SUM, 0, -1, 4, 0), "all_reduce(float32, 4, sum)"),
        ((wire.ALL_REDUCE, wire.FLOAT32, wire.SUM, wire.ONE_SHOT, -1, 1 << 40, 0), "all_reduce(float32, 1099511627776"),
        ((wire.BARRIER, 0, 0, 0, -1, 0, 0), "barrier()"),
    ],
    ids=["unknown", "everything", "another algorithm", "another count", "another call"],
)
def test_a_call_that_nobody_else_made_is_named(call, text):
    for error, peer, told in attack(publish, wire.CALL.pack(*call)):
        assert (error, peer) == ("MismatchError", LIAR)
        assert f"called {text}" in told
        assert "called all_reduce(float32, 4, sum)" in told


def go_back(liar):
    liar.segments[LIAR].words[liar.segments[LIAR].slot(1) // 4] = (1 << 31) + 2  # less than 1, as such counters go


def test_an_epoch_that_goes_back_is_waited_for_until_the_deadline():
    for error, peer, told in attack(go_back, timeout_ms=1500):
        assert (error, peer) == ("WaitTimeoutError", LIAR)
        assert "still waits for rank 1 (pid" in told


# ---- noise


def every_collective(group, out, seed):
    """One call after another, all of which the liar may spoil."""
    n = group.group_size
    rng = random.Random(seed)
    count = rng.choice([1, 5, 300, 3000])
    one, all_, got, gathered = floats(count), floats(count * n), out.view[:count], out.view[: count * n]
    counts = [count] * n
    calls = [
        lambda: group.all_reduce(one, got, timeout_ms=200),
        lambda: group.all_gather(one, gathered, timeout_ms=200),
        lambda: group.reduce_scatter(all_, got, timeout_ms=200),
        lambda: group.all_to_all(all_, gathered, timeout_ms=200),
        lambda: group.all_to_all_v(all_, counts, gathered, counts, timeout_ms=200),
        lambda: group.broadcast(got, root_group_rank=LIAR, timeout_ms=200),
        lambda: group.recv(got, LIAR, timeout_ms=200),
        lambda: group.send(all_, LIAR, timeout_ms=200),
    ]
    rng.shuffle(calls)
    for call in calls:
        call()


def noise(rank, world_size, seed):
    if rank == LIAR:
        rng = random.Random(seed)
        with Liar(rank, world_size) as liar:
            liar.join()
            size = liar.segment_bytes()
            for _ in range(2000):
                segment = liar.segments[rng.randrange(world_size)]
                # Near the words that steer, mostly: the head of the lane, the slots' heads, those of the rings.
                places = [wire.LINE, *map(segment.slot, range(4)), segment.area(), *map(segment.ring, range(3))]
                at = rng.choice(places) + rng.choice([0, 4, 8, 64, 68, 72, 80, 88, 128])
                data = rng.choice(
                    [rng.randbytes(8), struct.pack("<II", rng.randrange(9), rng.randrange(9)), b"\xff" * 8]
                )
                segment.write(min(at, size - 8), data)
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        out = Guarded(3 * 3000)
        group = group_with_liar(world)
        told = raised(lambda: [every_collective(group, out, seed) for seed in range(1000)])
        out.check()
    return told


@pytest.mark.parametrize("seed", range(6))
def test_noise_in_shared_memory_ends_in_an_error_and_touches_nothing_else(seed):
    for error, _, text in run_ranks(noise, 3, seed)[::2]:
        assert error != "nothing"
        assert "on group 'g'" in text


# ---- counts of all_to_all_v


def publish_counts(liar, pairs, own_pair):
    """The honest counts of a rank, but for what it keeps for itself."""
    own = liar.segments[LIAR]
    own.put(1, struct.pack("<6Q", *pairs[:2], *own_pair, *pairs[4:]))
    own.publish(1, wire.CALL.pack(wire.ALL_TO_ALL_V, wire.FLOAT32, 0, 0, -1, 0, 0))


def exchange_counts(rank, world_size, own_count, timeout_ms):
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            publish_counts(liar, [0] * 6, (own_count, own_count))
            liar.await_others()
            return None
    counts = [0] * world_size
    counts[VICTIM + BYSTANDER - rank] = 3  # the honest ranks have something for each other alone
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        out = Guarded(3)
        try:
            group.all_to_all_v(floats(3, rank + 5.0), counts, out.view, counts, timeout_ms=timeout_ms)
        except PhalanxError as error:
            out.check()
            return type(error).__name__, error.peer, str(error)
        out.check()
        return list(out.view)


def test_counts_that_would_take_for_ever_end_at_the_deadline():
    for result in run_ranks(exchange_counts, 3, 1 << 40, 1500)[::2]:
        assert result[:2] == ("WaitTimeoutError", LIAR), result


def test_counts_that_overflow_the_rounds_lose_no_data_between_the_others():
    victim, _, bystander = run_ranks(exchange_counts, 3, 2 * SEGMENT * ((1 << 32) - 1), 1500)  # two at once
    assert victim[0] == "MismatchError" and "more than memory can hold" in victim[2], victim
    assert bystander[0] == "MismatchError" and "more than memory can hold" in bystander[2], bystander


def test_counts_that_do_not_match_fail_alike():
    victim, _, bystander = run_ranks(mismatched_counts, 3)
    for error, _, text in (victim, bystander):
        assert error == "MismatchError"
        assert "group rank 1 sends 18446744073709551615 elements to group rank 0, which expects 0" in text


def mismatched_counts(rank, world_size):
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            publish_counts(liar, [(1 << 64) - 1, 0, 0, 0, 0, 0], (0, 0))
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        zeros = [0] * world_size
        return raised(lambda: group.all_to_all_v(floats(0), zeros, floats(0), zeros))
