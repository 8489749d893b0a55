"""Counters in shared memory go on past 2^31 and 2^32. core/tests/test_counters.cpp has every collective."""

from array import array

import pytest

from phalanx.core import FileStore, MismatchError, World
from ranks import run_ranks, scratch

ENDS = (2**31, 2**32)


def join(rank, world_size):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=30_000)


def use_everything(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        symm = group.rendezvous(world.alloc(4096))
        first = group.sequence
        for i in range(6):
            given, out = array("i", [i + rank, i - rank]), array("i", [0, 0])
            group.all_reduce(given, out)
            assert out.tolist() == [2 * i + 1, 2 * i - 1]
            symm.barrier()
            symm.put_signal(1 - rank)
            symm.wait_signal(1 - rank)
            if rank == 0:
                group.send(given, 1)
            else:
                group.recv(out, 0)
                assert out.tolist() == [i, i]
        assert group.sequence == first + 6
        group.barrier()
        return first


@pytest.mark.parametrize("end", ENDS)
def test_calls_of_python_pass_the_end_of_the_counters(end):
    assert run_ranks(use_everything, 2, env={"PHALANX_FIRST_COUNT": str(end - 3)}) == [end - 3] * 2


def meet(rank, world_size):
    with join(rank, world_size) as world, pytest.raises(MismatchError, match="PHALANX_FIRST_COUNT"):
        world.create_group("all", range(world_size))


def test_ranks_that_begin_at_different_numbers_do_not_meet():
    run_ranks(meet, 2, env=[{"PHALANX_FIRST_COUNT": "3"}, {"PHALANX_FIRST_COUNT": "4"}])
