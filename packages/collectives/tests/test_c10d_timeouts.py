"""What a timeout means on process groups. Gloo is the judge where it accepts the value."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d_internals

import phalanx.collectives as pc
from c10d_groups import join, run_groups
from phalanx.collectives import c10d
from phalanx.core import PhalanxError
from ranks import run_ranks

OVER = {"zero": timedelta(0), "less than 1 ms": timedelta(microseconds=300), "negative": timedelta(milliseconds=-5)}
LONG = timedelta(seconds=100)  # more than the test may take: what waits it fails


def over_at_once(group):
    """Calls with a timeout that rank 0 makes alone, each for one group."""

    def all_reduce(timeout):
        options = dist.AllreduceOptions()
        options.timeout = timeout
        group.allreduce([torch.ones(3)], options).wait()

    def barrier(timeout):
        options = dist.BarrierOptions()
        options.timeout = timeout
        group.barrier(options).wait()

    def wait(timeout):
        group.allreduce([torch.ones(3)]).wait(timeout)

    return all_reduce, barrier, group.monitored_barrier, wait


def zero(rank, size, backend):
    join(rank, size, 100, backend)
    store = c10d_internals._get_default_store()
    cases = [(value, number) for value in OVER.values() for number in range(4) if number < 3 or value < timedelta(0)]
    groups = [dist.new_group([0, 1], timeout=LONG) for _ in cases]
    for group in groups:
        dist.barrier(group)
    if rank == 0:
        for (value, number), group in zip(cases, groups, strict=True):
            with pytest.raises(RuntimeError, match=r"[Tt]imed out") as caught:
                over_at_once(group)[number](value)
            if backend == "phalanx":
                assert re.search(r"timed out after 1 ms \(the timeout(_ms)? of this call\)", str(caught.value))
                if number == 2:  # no collective was under way: the group is as good as before
                    continue
                with pytest.raises(dist.DistBackendError, match="timed out after 1 ms"):  # names the first cause
                    dist.barrier(group)
        store.set("tried", b"")
    store.wait(["tried"], LONG)
    if backend == "phalanx":
        for (_, number), group in zip(cases, groups, strict=True):
            if number == 2:
                x = torch.ones(1)
                dist.all_reduce(x, group=group)
                assert x.item() == size
    dist.destroy_process_group()


def test_zero_is_over_at_once_and_not_the_default():
    run_groups(zero, 2, "phalanx")


def test_gloo_says_the_same_of_zero():
    run_ranks(zero, 2, "gloo")


def before_they_met(rank, size):
    join(rank, size, 100)
    group = dist.new_group([0, 1], timeout=LONG)
    store = c10d_internals._get_default_store()
    if rank == 0:
        for call in over_at_once(group)[:3]:
            with pytest.raises(dist.DistBackendError, match=r"timed out after 1 ms .*rank\(s\) 1"):
                call(timedelta(0))
        store.set("tried", b"")
    store.wait(["tried"], LONG)
    x = torch.ones(1)
    dist.all_reduce(x, group=group)  # nothing was sent
    assert x.item() == size
    dist.destroy_process_group()


def test_zero_before_the_ranks_met_leaves_the_group_as_it_was():
    run_groups(before_they_met, 2)


def waits(rank, size):
    """Values that wait for a rank which comes after all of them were given."""
    join(rank, size, 100)
    store = c10d_internals._get_default_store()
    dist.barrier()
    if rank == 1:
        store.wait(["started"], LONG)
    works, group = [], dist.group.WORLD
    for value in (None, timedelta(milliseconds=-1), timedelta.max, timedelta(days=36500)):
        options = dist.AllreduceOptions()
        options.asyncOp = True
        if value is not None:
            options.timeout = value
        works.append((value, torch.ones(2), options))
    works = [(value, x, group.allreduce([x], options)) for value, x, options in works]
    store.set("started", b"")
    for value, x, work in works:
        work.wait(timedelta(0) if value is None or value < timedelta(0) else value)  # zero: as none, torch's kNoTimeout
        assert x.tolist() == [size, size]
    c10d.monitored_barrier(timeout=None)
    c10d.monitored_barrier(timeout=timedelta.max)
    dist.destroy_process_group()


def test_unset_is_the_default_and_the_longest_timedelta_does_not_overflow():
    run_groups(waits, 2)


def defaults(rank, size):
    with pytest.raises(ValueError, match="must not be negative"):
        join(rank, size, -3, name="negative")
    join(rank, size)
    for value in (None, timedelta.max, timedelta(days=36500)):
        group = dist.new_group([0, 1], timeout=value)
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        assert x.item() == size
    c10d.set_timeout(timedelta.max, group)
    dist.barrier(group)
    with pytest.raises(ValueError, match="must not be negative"):
        c10d.set_timeout(timedelta(seconds=-3), group)
    zero = dist.new_group([0, 1], timeout=timedelta(0))  # gloo makes it too
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"timed out after 1 ms \(the timeout of the group\)"):
            dist.barrier(zero)
    dist.barrier()
    dist.destroy_process_group()


def test_a_group_may_wait_as_long_as_a_timedelta_says_and_no_less_than_nothing():
    run_groups(defaults, 2)


def error_of(work):
    with pytest.raises(dist.DistBackendError) as caught:
        work.wait()
    return caught.value


def own(rank, size):
    """The default group waits 100 seconds, groups that are made later as long as each says."""
    join(rank, size, 100)
    store = c10d_internals._get_default_store()
    calls = {
        "all_reduce": lambda group: group.allreduce([torch.ones(3)]),
        "barrier": lambda group: group.barrier(),
        "all_gather": lambda group: group.allgather([[torch.ones(1), torch.ones(1)]], [torch.ones(1)]),
        "broadcast": lambda group: group.broadcast(torch.ones(3), 1),
        "recv": lambda group: group.recv([torch.ones(1)], 1, 0),
    }

    def made(kind, milliseconds):
        timeout = timedelta(milliseconds=milliseconds)
        if kind == "by hand":
            return c10d.process_group(dist.PrefixStore(str(milliseconds), store), rank, size, timeout)
        return dist.new_group([0, 1], timeout=timeout)

    cases = [(kind, call) for kind in ("new_group", "by hand") for call in calls]
    timeouts = [5000 + number for number in range(len(cases))]
    groups = [made(kind, timeout) for (kind, _), timeout in zip(cases, timeouts, strict=True)]
    for group in groups:
        group.barrier().wait()
    if rank == 0:
        works = [calls[call](group) for (_, call), group in zip(cases, groups, strict=True)]
        with ThreadPoolExecutor(len(works)) as pool:  # they wait at the same time
            errors = list(pool.map(error_of, works))
        for (_, call), timeout, error in zip(cases, timeouts, errors, strict=True):
            assert re.search(rf"{call}.* after {timeout} ms \(the timeout of the group\).*rank 1", str(error))
        store.set("own", b"")
    store.wait(["own"], LONG)
    dist.all_reduce(x := torch.ones(1))  # the default group has lost nothing
    assert x.item() == size
    dist.destroy_process_group()


def test_each_group_has_its_own_timeout_and_names_it():  # P29
    run_groups(own, 2)


def functional(rank, size):
    join(rank, size, 100, "gloo")
    store = c10d_internals._get_default_store()
    pc.enable_group(dist.group.WORLD)
    x = torch.zeros(1)
    if rank == 0:
        works = [pc.irecv(x, 1), pc.irecv(torch.zeros(1), 1, tag=1)]
        store.set("asked", b"")
        works[0].wait(timedelta(0))  # as torch: no timeout of its own
        assert x.item() == 7
        with pytest.raises(PhalanxError, match=r"timed out after 1 ms \(the timeout_ms of this call\)"):
            works[1].wait(timedelta(seconds=-1))
        store.set("over", b"")
    else:
        store.wait(["asked"], LONG)
        pc.send(torch.full((1,), 7.0), 0)
        store.wait(["over"], LONG)
    dist.destroy_process_group()


def test_a_functional_work_takes_zero_as_torch_does():
    run_ranks(functional, 2)
