"""What goes wrong on the backend `phalanx` has a name, and nobody waits for ever."""

import os
import re
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_groups import everybody_is_done, join, run_groups
from phalanx.collectives import c10d
from phalanx.collectives._c10d._connect import Connection
from ranks import scratch


def disagree(rank, size):
    join(rank, size)
    dist.barrier()
    with pytest.raises(dist.DistBackendError, match=r"float32, (3|4)") as caught:
        dist.all_reduce(torch.ones(3 + rank))
    assert "float32, 3" in str(caught.value) and "float32, 4" in str(caught.value)
    with pytest.raises(dist.DistBackendError, match="all_reduce"):  # names the first cause
        dist.broadcast(torch.ones(1), 0)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    dist.destroy_process_group()


def test_ranks_that_disagree_learn_what_each_called():
    run_groups(disagree, 2)


def late(rank, size):
    join(rank, size, seconds=20)
    if rank != 1:
        said = "Rank 1 failed to pass monitoredBarrier" if rank == 0 else f"Rank {rank} successfully reached"
        with pytest.raises(dist.DistBackendError, match=rf"{said}.*still waits for rank\(s\) 1"):
            c10d.monitored_barrier(timeout=timedelta(seconds=1))  # they have not met
    everybody_is_done(rank, range(size))
    dist.barrier()  # late, but not too late
    if rank != 1:
        with pytest.raises(
            dist.DistBackendError, match=r"timed out after 1000 ms \(.* call\): Ranks 1 failed to pass monitoredBarrier"
        ):  # P29
            c10d.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    else:
        dist.FileStore(str(scratch() / "done"), 1).wait(["over0", "over2"], timedelta(seconds=30))
        with pytest.raises(
            dist.DistBackendError, match=r"Rank 1 successfully .* from rank 0: .*Ranks 1 failed to pass"
        ):
            c10d.monitored_barrier(timeout=timedelta(seconds=1))
    dist.FileStore(str(scratch() / "done"), 1).set(f"over{rank}", b"")
    for _ in range(3):
        c10d.monitored_barrier()
    x = torch.ones(1)
    dist.all_reduce(x)  # the group is as good as before
    assert x.item() == size
    c10d.set_timeout(timedelta(seconds=1))
    with pytest.raises(ValueError, match="must not be negative"):
        c10d.set_timeout(timedelta(seconds=-1))
    if rank != 1:
        with pytest.raises(dist.DistBackendError, match=r"all_reduce.*1000 ms.*rank 1"):
            dist.all_reduce(torch.ones(1))
    everybody_is_done(rank, range(size))
    dist.destroy_process_group()


def test_a_late_rank_is_named():  # P29
    run_groups(late, 3, timeout=60)


def late_futures(rank, size):
    join(rank, size)
    dist.barrier()
    c10d.set_timeout(timedelta(seconds=1))
    if rank == 0:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        chained = future.then(lambda done: done.value())
        for each in (future, chained):
            with pytest.raises(RuntimeError, match="rank 1"):
                each.wait()
    everybody_is_done(rank, range(size))
    dist.destroy_process_group()


def test_a_future_fails_in_time_though_nobody_waits_for_its_work():
    run_groups(late_futures, 2)


def killed(rank, size):
    join(rank, size)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="rank 1"):
        future.wait()
    with pytest.raises(dist.DistBackendError):
        dist.recv(torch.ones(1), 1)
    dist.destroy_process_group()


def test_a_killed_rank_is_named_and_nobody_waits_for_it():
    run_groups(killed, 3, expect_exit={1: -9})


def aborted(rank, size):
    join(rank, size, seconds=60)
    sub = dist.new_group([0, 1])
    dist.barrier()
    dist.all_reduce(torch.ones(1), group=sub)
    unmet = dist.new_group([0, 1])
    if rank == 1:  # never comes
        everybody_is_done(rank, range(size))
        with pytest.raises(dist.DistBackendError, match="rank 0 aborted process group"):
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        return
    failures = []
    begun = threading.Semaphore(0)

    def stuck(call):
        begun.release()
        try:
            call()
        except Exception as error:
            failures.append(error)

    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()  # P24: in every thread
    calls = (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.recv(torch.ones(1), 1),
        lambda: future.wait(),
        lambda: dist.barrier(unmet),  # waits for the others to come for the first time
    )
    threads = [threading.Thread(target=stuck, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire()
    group = dist.group.WORLD
    group.abort()
    unmet.abort()
    for thread in threads:
        thread.join()
    texts = [str(error) for error in failures]
    assert sum("rank 0 aborted process group '0'" in text for text in texts) == 3, texts
    # of one that several hosts had met for: "rank 0 aborted process group"
    assert sum(f"group '{unmet.group_name}'" in text and "abort" in text for text in texts) == 1, texts
    with pytest.raises(dist.DistBackendError, match="was aborted"):
        dist.all_reduce(torch.ones(1))
    group.abort()
    everybody_is_done(rank, range(size))
    dist.destroy_process_group()


def test_abort_ends_what_waits_in_every_thread():  # P23, P24
    run_groups(aborted, 2)


def ended_when_it_has_just_met(rank, size, method="address", end="abort"):
    """The ranks have met, and the call that met them does not know it yet: it is in this method of Connection."""
    met, over = threading.Event(), threading.Event()
    quick = getattr(Connection, method)

    def slow(connection, timeout_ms):
        found = quick(connection, timeout_ms)
        met.set()
        over.wait()
        return found

    failures = []

    def first_call(group):
        try:
            group.allreduce([torch.ones(1)]).wait()  # torch.distributed asks for the group once more when it fails
        except dist.DistBackendError as error:
            failures.append(str(error))

    join(rank, size, seconds=600)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(Connection, method, slow)
        group = dist.new_group([0, 1])
        name = group.group_name
        thread = threading.Thread(target=first_call, args=(group,))
        thread.start()
        if rank == 0:
            met.wait()
            group.abort() if end == "abort" else dist.destroy_process_group(group)
            over.set()
        thread.join()
    mine = {"abort": "was aborted: rank 0 aborted process group", "destroy": "was destroyed. Make a new group"}[end]
    others = r"rank 0 (revoked|aborted)"
    assert len(failures) == 1 and re.search(others if rank else f"group '{name}' {mine}", failures[0]), failures
    everybody_is_done(rank, range(size))
    dist.destroy_process_group()


@pytest.mark.parametrize("end", ["abort", "destroy"])
@pytest.mark.parametrize("method", ["address", "_meet"])
def test_a_group_is_ended_whose_ranks_have_just_met(method, end):  # P23, P24
    run_groups(ended_when_it_has_just_met, 2, method, end)
