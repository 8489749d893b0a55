"""Groups made of groups: split, and what survivors do."""

import os
import signal
import time

import pytest

from phalanx.core import (
    Agreement,
    FileStore,
    InvalidArgumentError,
    PeerDeadError,
    RevokedError,
    World,
)
from ranks import run_ranks, scratch

np = pytest.importorskip("numpy", reason="needs numpy")


def join(rank, world_size):
    world = World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=60_000)
    return world, world.create_group("all", range(world_size))


def total(group, value):
    x = np.full(3, value, np.float32)
    group.all_reduce(x)
    return float(x[0])


def rows_and_columns(rank, world_size):
    world, everyone = join(rank, world_size)
    row, column = everyone.split(rank // 2, name="row"), everyone.split(rank % 2, -rank, "column")
    assert (row.name, row.ranks, column.ranks) == ("row", ((0, 1), (2, 3))[rank // 2], ((2, 0), (3, 1))[rank % 2])
    assert total(row, 10**rank) == (11, 11, 1100, 1100)[rank]
    assert total(column, 10**rank) == (101, 1010)[rank % 2]
    assert everyone.split(-1 if rank else 0, name="one") is None or rank == 0
    with pytest.raises(InvalidArgumentError, match="color must be an integer"):
        everyone.split("0")
    with pytest.raises(InvalidArgumentError, match="color is 2147483648"):
        everyone.split(2**31)
    assert everyone.agree(0b1110 | rank) == Agreement(0b1110, (0, 1, 2, 3))
    world.finalize()


def test_split_makes_rows_and_columns_and_agree_ands():  # P24
    run_ranks(rows_and_columns, 4)


def survivors(rank, world_size):
    world, everyone = join(rank, world_size)
    total(everyone, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDeadError, match="rank 1 "):
        total(everyone, 1)
    started = time.monotonic()
    rest = everyone.shrink("rest")
    assert time.monotonic() - started < 20  # far below the timeout: nobody was waited for
    assert rest.ranks == (0, 2) and total(rest, rank) == 2
    assert everyone.agree(5) == Agreement(5, (0, 2))
    world.finalize()


def test_survivors_shrink_and_go_on():
    run_ranks(survivors, 3, expect_exit={1: -signal.SIGKILL})


def aborted(rank, world_size):
    world, everyone = join(rank, world_size)
    if rank == 1:
        time.sleep(0.05)
        world.abort("the loss is nan")
    else:
        with pytest.raises(RevokedError, match="rank 1 revoked it: the loss is nan"):
            everyone.barrier()
    fresh = everyone.shrink()
    assert fresh.name == "all" and total(fresh, 1) == 2
    world.finalize()


def test_abort_ends_the_waits_of_all_ranks():  # P24
    run_ranks(aborted, 2)
