"""Process groups of the backend `phalanx` come and go."""

import contextlib
import gc
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from c10d_groups import join, run_groups


def held():
    """What this process holds of the core: mappings, descriptors of shared memory, sockets, threads."""
    maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:phalanx" in line]
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(os.readlink(fd))
    ours = [name for name in names if "/memfd:phalanx" in name or name.startswith("socket")]
    threads = [each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")]
    return maps, ours, [name for name in threads if "phalanx" in name or "phx" in name], threading.active_count()


def come_and_go(rank, size):
    nothing = held()
    kept = []
    for turn in range(3):
        join(rank, size, name=f"store{turn}")
        group, sub = dist.group.WORLD, dist.new_group([2, 0, 1])
        if "PHALANX_HOST_ID" not in os.environ:  # several hosts have to find out whether the core serves them
            assert held() == nothing  # P17: nothing is made before it is used
        works = [dist.all_reduce(torch.ones(100), async_op=True, group=each) for each in (group, sub)]
        future = works[0].get_future()
        kept += [group, sub, *works, future]
        assert future.wait()[0].tolist() == [size] * 100
        assert held() != nothing
        dist.all_reduce(torch.ones(1), group=sub)
        if turn == 0:
            dist.destroy_process_group(sub)
            with pytest.raises((dist.DistBackendError, ValueError)):
                sub.allreduce([torch.ones(1)]).wait()
        dist.destroy_process_group()
        gc.collect()
        assert held() == nothing  # P25: whoever still refers to them
        with pytest.raises(dist.DistBackendError, match="destroyed"):
            group.allreduce([torch.ones(1)])
    assert works[1].wait() and works[1].is_success()


def unfinished(rank, size):
    nothing = held()
    join(rank, size)
    results = [torch.full((1000,), float(i)) for i in range(5)]
    for x in results:
        dist.all_reduce(x, async_op=True)  # dropped, never waited for
    receive = dist.irecv(torch.empty(1), 1 - rank)  # of what is never sent
    future = receive.get_future()
    dist.destroy_process_group()
    assert [x[0].item() for x in results] == [2.0 * i for i in range(5)]
    with pytest.raises(RuntimeError, match="destroyed group|revoked|left"):
        future.wait()
    with pytest.raises(dist.DistBackendError):
        receive.wait()
    gc.collect()
    assert held() == nothing


def subgroups(rank, size):
    join(rank, size)
    evens, odds = dist.new_group([0, 2]), dist.new_group([1])
    mine = odds if rank == 1 else evens
    assert dist.get_backend(mine) == "phalanx" and dist.get_world_size(mine) == (1 if rank == 1 else 2)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mine)
    assert x.item() == (1 if rank == 1 else 2)
    every, _ = dist.new_subgroups(1)
    dist.barrier(every)
    reordered = dist.new_group([2, 0, 1], use_local_synchronization=True)
    parts = [torch.empty(1) for _ in range(3)]
    dist.all_gather(parts, torch.tensor([float(rank)]), group=reordered)
    wanted = [float(each) for each in dist.get_process_group_ranks(reordered)]
    assert [part.item() for part in parts] == wanted
    # the same ranks by another backend, and a second time by this one
    gloo = dist.new_group(backend="gloo")
    y = torch.ones(1)
    dist.all_reduce(y, group=gloo)
    again = dist.new_group([0, 1, 2])
    dist.all_reduce(y, group=again)
    dist.barrier(again)
    assert y.item() == 9
    for each, message in ((0, "a"), (1, "b")):
        got = [message if rank == each else None]
        dist.broadcast_object_list(got, each, group=again)
        assert got == [message]
    dist.destroy_process_group()


def beside_gloo(rank, size):
    """The default group is gloo's, and one of the backend is made beside it."""
    join(rank, size, backend="gloo")
    group = dist.new_group(backend="phalanx")
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x)
    assert x.tolist() == [4, 4]
    dist.destroy_process_group()


def by_device(rank, size):  # P13, P16
    join(rank, size, backend="cpu:phalanx,cuda:gloo")  # CUDA is never touched here
    assert type(dist.group.WORLD) is dist.ProcessGroup
    assert dist.get_backend_config() == "cpu:phalanx,cuda:gloo"
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.barrier()
    assert x.item() == size
    dist.destroy_process_group()


def sequence_numbers(rank, size):  # P29
    join(rank, size)
    group = dist.group.WORLD
    counter = group._get_backend(torch.device("cpu")) if type(group) is dist.ProcessGroup else group
    counter._set_sequence_number_for_group()
    before = counter._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    assert counter._get_sequence_number_for_group() == before + 3
    dist.destroy_process_group()


def threads(rank, size):
    """Threads with a group each, in any order; a thread may wait while another starts."""
    join(rank, size)
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    failures = []

    def work(group):
        try:
            for i in range(50):
                x = torch.full((5 if i % 5 else 100_000,), float(rank + i))
                future = dist.all_reduce(x, group=group, async_op=True).get_future()
                y = torch.tensor([float(rank)])
                dist.all_reduce(y, group=group)
                assert future.wait()[0][0].item() == 2 * i + 1 and y.item() == 1
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=(group,)) for group in (groups if rank else reversed(groups))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failures, failures
    dist.destroy_process_group()


def everything(rank, size):
    come_and_go(rank, size)
    subgroups(rank, size)


def beside_functional(rank, size):
    join(rank, size)
    group, x = dist.group.WORLD, torch.ones(3)
    assert (pc.all_reduce(x, "sum", group) + 0).tolist() == [size] * 3
    assert pc.is_core_group(group)
    later = pc.all_reduce(x, "sum", group)
    dist.all_reduce(x, async_op=True).wait()
    assert (later + 0).tolist() == [size] * 3
    assert x.tolist() == [size] * 3
    dist.destroy_process_group()


def test_groups_come_and_go_and_leave_nothing():  # P13, P16, P17, P25
    run_groups(everything, 3, timeout=90)


@pytest.mark.parametrize("part", [unfinished, beside_gloo, by_device, sequence_numbers, threads, beside_functional])
def test_two_ranks(part):  # P13, P16, P29
    run_groups(part, 2)


def forgets(rank, size):
    join(rank, size)
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    for _ in range(3):
        dist.all_reduce(torch.ones(4), async_op=True)
    return rank  # nothing is destroyed, nothing is waited for


def test_a_rank_may_exit_without_destroying_its_groups():
    assert run_groups(forgets, 2, fresh=True) == [0, 1]
