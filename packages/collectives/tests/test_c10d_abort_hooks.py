"""Abort hooks of torch 2.14 when the work that fails is one that nobody waits for."""

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from c10d_groups import everybody_is_done, join, needs_torch, run_groups


def unwatched(rank, size, cause, order):
    """Rank 0 starts a work that cannot end, and looks only at what its hook does. Rank 1 does not take part."""
    join(rank, size, seconds=60)
    dist.barrier()
    if rank == 1:
        everybody_is_done(rank, range(size), "started")
        if cause != "timeout":
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        backend = _get_default_group()._get_backend(torch.device("cpu"))
        failed = threading.Event()
        if cause == "timeout":
            backend.set_timeout(timedelta(milliseconds=300))
        if order == "hook first":
            backend.register_abort_hook(1, failed.set)
        work = dist.irecv(torch.ones(1), 1) if cause == "message" else dist.all_reduce(torch.ones(1), async_op=True)
        if order == "work first":
            backend.register_abort_hook(1, failed.set)
        assert not failed.wait(0.05)
        everybody_is_done(rank, range(size), "started")
        assert failed.wait(20)  # the group has 60 s
        with pytest.raises(dist.DistBackendError, match="300 ms" if cause == "timeout" else "rank 1"):
            work.wait()
    if cause == "timeout":
        everybody_is_done(rank, range(size), "over")
    dist.destroy_process_group()


@pytest.mark.parametrize("order", ["hook first", "work first"])
@pytest.mark.parametrize("cause", ["death", "message", "timeout"])
def test_abort_hooks_are_run_although_nobody_waits(cause, order):  # P38
    needs_torch(2, 14, "abort hooks")
    run_groups(unwatched, 2, cause, order, expect_exit=None if cause == "timeout" else {1: -signal.SIGKILL})
