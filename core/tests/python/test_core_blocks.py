"""Collectives on lists of buffers, one for each rank. What lies in rows is for C and C++: test_matrix."""

import numpy as np
import pytest
from ranks import run_ranks

from phalanx.core import InvalidArgumentError


def _exercise(rank, world):
    n = world.size
    group = world.group("lists", range(n))
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
    group.release()


@pytest.mark.parametrize("ranks", [2, 3])
def test_buffers_may_lie_anywhere(ranks):
    run_ranks(ranks, _exercise)
