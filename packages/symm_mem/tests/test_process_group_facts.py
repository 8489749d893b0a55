"""A rendezvous on a process group has the timeout of the group, and knows of deaths that other groups have seen."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx import symm_mem
from phalanx.core import PeerDeadError, WaitTimeoutError
from ranks import run_ranks, scratch


def init(rank, size, seconds):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch() / 'store'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def late(rank, size):
    init(rank, size, 60)
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(WaitTimeoutError, match="1000 ms"):
            symm_mem.rendezvous(symm_mem.empty(8), group)
    dist.barrier()


def test_a_rendezvous_waits_for_the_timeout_of_its_process_group():
    run_ranks(late, 2)


def dead(rank, size):
    init(rank, size, 300)
    pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).tolist()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDeadError, match=r"rank 1 \(pid \d+\) died"):
        symm_mem.rendezvous(symm_mem.empty(8), dist.group.WORLD)


def test_a_death_that_is_known_ends_the_first_rendezvous_of_a_group():
    run_ranks(dead, 2, expect_exit={1: -9})
