"""Ranks that end: with work that nobody waited for, by an exception, or before a group of theirs is first used."""

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from c10d_groups import join, run_groups
from phalanx.core import PeerDeadError
from ranks import run_ranks, scratch

kept = []  # a result that is dropped is waited for there and then; a file goes with the last store on it


def marks():
    kept.append(dist.FileStore(str(scratch() / "marks")))
    return kept[-1]


def functional(x):
    return pc.all_reduce(x, "sum", dist.group.WORLD)


def by_op(x):
    return torch.ops.phalanx.all_reduce(x, "sum", dist.group.WORLD.group_name)


def by_coalesced_op(x):
    return torch.ops.phalanx.all_reduce_coalesced([x, x], "sum", dist.group.WORLD.group_name)[1]


def by_manager(x):
    with pc.coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
        done = pc.all_reduce(x, "sum", dist.group.WORLD)
        pc.all_reduce(x, "max", dist.group.WORLD)
    return done, manager


def by_backend(x):
    return x, dist.all_reduce(x, async_op=True)


def leaves_it(rank, size, backend, start):
    join(rank, size, backend=backend)
    pc.enable_group(dist.group.WORLD)
    dist.barrier()
    if rank == 1:
        kept.append(start(torch.ones(100)))
        marks().set("leaving", b"")
        return
    marks().wait(["leaving"], timedelta(seconds=30))
    done = start(torch.ones(100))
    if start is by_backend:
        done[1].wait()
    result = done[0] if isinstance(done, tuple) else done
    assert torch.ops.phalanx.wait_tensor(result).tolist() == [size] * 100


@pytest.mark.parametrize("start", [functional, by_op, by_coalesced_op, by_manager])
def test_what_a_rank_started_is_completed_at_its_end(start):
    run_ranks(leaves_it, 2, "gloo", start)


def test_what_a_rank_started_on_the_backend_is_completed_at_its_end():
    run_groups(leaves_it, 2, "phalanx", by_backend)


RAISES = """
import sys, datetime, torch, torch.distributed as dist
import phalanx.collectives as pc
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).tolist()
if rank == 1:
    pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    raise LookupError("the data has run out")
pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).tolist()
try:
    pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).tolist()
except RuntimeError as error:
    print(error)
"""


def test_the_others_learn_the_exception_that_ended_a_rank(tmp_path):
    command = [sys.executable, "-c", RAISES]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=env, stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    try:
        (said, _), (_, trace) = (each.communicate(timeout=50) for each in ranks)
    finally:
        for each in ranks:
            each.kill()
    assert "rank 1" in said and "LookupError: the data has run out" in said, said
    assert trace.count("Traceback") == 1 and ranks[1].returncode == 1


def dies_before_the_first_use(rank, size, backend):
    join(rank, size, backend=backend, seconds=300)
    pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).tolist()
    groups = [dist.new_group(list(range(size)), timeout=timedelta(seconds=300)) for _ in range(2)]
    dist.barrier()
    if rank != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDeadError, match=r"rank [12] \(pid \d+\) died"):
        pc.all_reduce(torch.ones(1), "sum", groups[0]).tolist()
    if backend == "phalanx":
        with pytest.raises(dist.DistBackendError, match=r"rank [12] \(pid \d+\) died"):
            dist.all_reduce(torch.ones(1), group=groups[1])


def test_a_death_that_is_known_ends_the_first_meeting_of_another_group():  # well before its timeout
    run_ranks(dies_before_the_first_use, 3, "gloo", expect_exit={1: -9, 2: -9})
    run_groups(dies_before_the_first_use, 3, "phalanx", expect_exit={1: -9, 2: -9})
