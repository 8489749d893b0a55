"""The implementation of the wire protocol that the attacks are made with is understood by real ranks."""

import array
import struct

import wire
from liar import LIAR, VICTIM, Liar, group_with_liar, honest_rank
from ranks import run_ranks


def take_part(rank, world_size):
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            own = liar.segments[LIAR]
            own.put(1, struct.pack("<4f", 10, 20, 30, 40))
            own.publish(1, wire.CALL.pack(wire.ALL_REDUCE, wire.FLOAT32, wire.SUM, wire.ONE_SHOT, -1, 4, 0))
            liar.await_epoch(VICTIM, 1)
            seen = struct.unpack("<4f", liar.segments[VICTIM].data(1, 16))
            own.finish(1)
            record = wire.RECORD.pack(0, 5, 7, wire.UINT8, wire.EAGER, 5, 0) + b"hello"
            liar.segments[VICTIM].send(LIAR, record)
            liar.await_others()
            return seen
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        total = array.array("f", [0.0] * 4)
        group.all_reduce(array.array("f", [1.0, 2.0, 3.0, 4.0]), total)
        text = bytearray(5)
        if rank == VICTIM:
            group.recv(text, LIAR, tag=7, dtype="uint8")
    return list(total), bytes(text)


def test_an_honest_liar_is_a_rank_like_any_other():
    victim, seen, bystander = run_ranks(take_part, 3)
    assert victim == ([12.0, 24.0, 36.0, 48.0], b"hello")
    assert bystander == ([12.0, 24.0, 36.0, 48.0], bytes(5))
    assert seen == (1.0, 2.0, 3.0, 4.0)
