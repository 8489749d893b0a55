"""Collectives on lists of buffers, one for each rank. What lies in rows is for C and C++: test_matrix."""

import pytest

from phalanx.core import FileStore, InvalidArgumentError, World
from ranks import run_ranks, scratch

np = pytest.importorskip("numpy", reason="needs numpy")


def join(rank, world_size):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=30_000)


def exercise(rank, n):
    with join(rank, n) as world:
        group = world.create_group("lists", range(n))
        x = np.arange(5, dtype=np.float32) + 100 * rank
        outs = [np.empty(5, np.float32) for _ in range(n)]
        group.all_gather(x, outs)
        for r in range(n):
            assert np.array_equal(outs[r], np.arange(5) + 100 * r)

        uneven = [np.empty(r + 1, np.int64) for r in range(n)]
        work = group.all_gather(np.full(rank + 1, rank), uneven, blocking=False)
        work.wait()
        assert all((uneven[r] == r).all() for r in range(n))

        # One rank has a list, the others one buffer.
        if rank == 0:
            group.all_gather(x, outs)
        else:
            flat = np.empty((n, 5), np.float32)
            group.all_gather(x, flat)
            outs = list(flat)
        assert all((outs[r] == np.arange(5) + 100 * r).all() for r in range(n))

        sent = [np.full(r + 1, 10 * rank + r, np.int32) for r in range(n)]
        received = [np.empty(rank + 1, np.int32) for _ in range(n)]
        group.all_to_all(sent, received)
        assert all((received[r] == 10 * r + rank).all() for r in range(n))

        part = np.empty(3, np.float64)
        parts = [np.full(3, r + 0.5) for r in range(n)]
        group.reduce_scatter(parts, part)
        assert (part == n * (rank + 0.5)).all()
        group.scatter(parts if rank == 1 else None, part, root_group_rank=1)
        assert (part == rank + 0.5).all()
        group.gather(part, parts if rank == 0 else None, root_group_rank=0)
        assert rank != 0 or all((parts[r] == r + 0.5).all() for r in range(n))


@pytest.mark.parametrize("world_size", [2, 3])
def test_buffers_may_lie_anywhere(world_size):
    run_ranks(exercise, world_size)


def refuse(rank, n):
    with join(rank, n) as world:
        group = world.create_group("lists", range(n))
        x = np.zeros(4, np.float32)
        outs = [np.zeros(4, np.float32) for _ in range(n)]
        for out, words in (
            (outs[:1], "list of 2 buffers"),
            ([x[:3], x[:3]], "elements, but the other side has 4"),
            ([outs[0], outs[1].astype(np.float64)], "dtype"),
            ([outs[0], 4096], "bare address"),
        ):
            with pytest.raises(InvalidArgumentError, match=words):
                group.all_gather(x, out)
        with pytest.raises(InvalidArgumentError, match="count goes with one buffer"):
            group.all_gather(x, outs, 4)
        with pytest.raises(InvalidArgumentError, match="give a list of 2 buffers"):
            group.all_to_all(outs, x)
        with pytest.raises(InvalidArgumentError, match="overlaps"):  # of the core, which tells the other ranks
            group.all_gather(x, [outs[0], outs[0]])


def test_wrong_lists_are_refused():
    run_ranks(refuse, 2)
