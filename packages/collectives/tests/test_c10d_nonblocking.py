"""Neither new_group, abort nor destroy_process_group waits for anybody on the backend `phalanx`."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_groups import join, run_groups
from ranks import scratch


def alone(rank, size):  # P23: needs no variable, unlike torch's TORCH_NCCL_USE_COMM_NONBLOCKING
    events = dist.FileStore(str(scratch() / "events"), 1)
    join(rank, size, seconds=600)
    if rank == 1:  # makes no call at all before rank 0 has done all of this
        events.wait(["done"], timedelta(seconds=60))
        again(rank, size)
        return
    group, sub = dist.group.WORLD, dist.new_group([0, 1], use_local_synchronization=True)
    dist.new_group([0, 1], use_local_synchronization=True)  # never used by anybody
    failures = []

    def first_call():
        begun.set()
        try:
            sub.allreduce([torch.ones(1)]).wait()
        except dist.DistBackendError as error:
            failures.append(str(error))

    begun = threading.Event()
    thread = threading.Thread(target=first_call)  # waits for rank 1 to come for the first time
    thread.start()
    begun.wait()
    sub.abort()
    thread.join()
    assert f"group '{sub.group_name}' was aborted" in failures[0]
    group.abort()
    group.abort()
    with pytest.raises(dist.DistBackendError, match="was aborted"):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group(sub)
    events.set("done", b"")
    again(rank, size)


def again(rank, size):
    dist.destroy_process_group()
    join(rank, size, name="later")
    dist.barrier()
    dist.destroy_process_group()


def test_groups_are_made_aborted_and_destroyed_though_nobody_comes():  # P23
    run_groups(alone, 2)
