"""Process groups whose ranks change while the processes live: torch's `reconfigure` (2.14) and `shrink_group`."""

import contextlib
import gc
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import SHRINK_ABORT, _get_default_group

import phalanx.collectives as pc
from c10d_groups import apart, everybody_is_done, join, needs_torch, needs_ucx, run_groups
from phalanx.collectives import _registry, c10d
from phalanx.core import InvalidArgumentError
from ranks import scratch

LIMIT = timedelta(seconds=60)


@pytest.fixture
def _reconfigure():
    needs_torch(2, 14, "reconfigure")


def bulletin():
    """What the processes of a test share while they have no common group."""
    return dist.FileStore(str(scratch() / "bulletin"), -1)


def begin(rank, size, name="store"):
    """The default group of a process that waits to be told who the others are."""
    c10d.register()
    store = dist.FileStore(str(scratch() / name), -1)
    dist.init_process_group("phalanx", rank=rank, world_size=size, store=store, timeout=LIMIT, enable_reconfigure=True)


def handles(what, rank, ranks):
    """The handles that these processes have now, in order."""
    board = bulletin()
    board.set(f"{what}/{rank}", dist._get_reconfigure_handle())
    return [board.get(f"{what}/{each}").decode() for each in ranks]


def check(position, size):
    """Every kind of call on the default group, whose result tells which rank has which part."""
    assert (dist.get_rank(), dist.get_world_size()) == (position, size)
    group, total = dist.group.WORLD, float(sum(range(size)))
    x = torch.full((300,), float(position))
    dist.all_reduce(x)
    assert x.tolist() == [total] * 300
    right, left = (position + 1) % size, (position - 1) % size
    received, work = torch.zeros(3), group.send([torch.full((3,), float(position))], right, 7)
    group.recv([received], left, 7).wait()
    work.wait()
    assert received.tolist() == [left] * 3
    parts = [torch.empty(1) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([float(position)]), async_op=True).wait()
    assert [part.item() for part in parts] == list(range(size))
    assert pc.all_reduce(torch.full((2,), float(position)), "sum", group).tolist() == [total] * 2
    assert pc.all_gather_tensor(torch.tensor([position]), 0, group).tolist() == list(range(size))
    assert pc.core_group(group).group_rank == position


def changes(rank, size):
    begin(rank, size)
    everyone = range(size)
    with pytest.raises(dist.DistBackendError, match="reconfigure"):  # it has no ranks yet
        dist.all_reduce(torch.ones(1))
    given = handles("all", rank, everyone)
    dist._reconfigure(1, given).wait()
    check(rank, size)
    dist._reconfigure(2, given[::-1]).wait()  # a list gives the ranks their order
    check(size - 1 - rank, size)
    dist._reconfigure(3, set(given)).wait()  # a set has none: all processes find the same one
    check(sorted(given).index(given[rank]), size)
    if rank != 1:
        dist._reconfigure(4, [given[each] for each in everyone if each != 1]).wait()
        check(rank - (rank > 1), size - 1)
    dist._reconfigure(5, given, timeout=LIMIT).wait()  # process 1 is back, which did not take part before
    check(rank, size)
    half = size // 2
    halves = [range(half), range(half, size)]
    own = halves[rank >= half]
    dist._reconfigure(6 + (rank >= half), [given[each] for each in own]).wait()
    check(rank - own[0], len(own))
    dist._reconfigure(10 + rank, [given[rank]]).wait()
    check(0, 1)
    dist._reconfigure(20, given).wait()
    check(rank, size)
    everybody_is_done(rank, everyone)
    dist.destroy_process_group()


@pytest.mark.usefixtures("_reconfigure")
def test_ranks_go_and_come_and_split_and_merge():  # P31
    run_groups(changes, 4, timeout=120)


@pytest.mark.usefixtures("_reconfigure")
def test_ranks_on_several_hosts_go_and_come():  # P31
    needs_ucx()
    env = [{"PHALANX_HOST_ID": str(7 + rank // 2)} for rank in range(4)]
    run_groups(changes, 4, env=env, timeout=160)


def apart_without_ucx(rank, size):
    begin(rank, size)
    given = handles("all", rank, range(size))
    with pytest.raises((dist.DistBackendError, NotImplementedError), match="UCX"):
        dist._reconfigure(1, given).wait()
    everybody_is_done(rank, range(size))
    dist._reconfigure(10 + rank, [given[rank]]).wait()
    check(0, 1)
    dist.destroy_process_group()


@pytest.mark.usefixtures("_reconfigure")
def test_hosts_without_ucx_cannot_meet():  # P31
    run_groups(apart_without_ucx, 2, env=apart(2))


def aborted(rank, size):
    begin(rank, size)
    dist._reconfigure(1, handles("first", rank, range(size))).wait()
    check(rank, size)
    pending = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
    everybody_is_done(rank, range(size), "called")
    _get_default_group()._get_backend(torch.device("cpu")).abort()
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1))
    if pending is not None:
        with pytest.raises(dist.DistBackendError):
            pending.wait()
    dist._reconfigure(2, handles("second", rank, range(size))).wait()
    check(rank, size)
    dist.destroy_process_group()


@pytest.mark.usefixtures("_reconfigure")
def test_a_group_that_was_aborted_goes_on_with_new_ranks():  # P32
    run_groups(aborted, 3)


def replaced(rank, size):
    """Process 1 is killed; the last process takes its place."""
    living = [size - 1 if position == 1 else position for position in range(size - 1)]
    begin(1 if rank == size - 1 else rank, size - 1, "replacement" if rank == size - 1 else "store")
    if rank < size - 1:
        dist._reconfigure(1, handles("first", rank, range(size - 1))).wait()
        check(rank, size - 1)
        if rank == 1:
            bulletin().wait([f"waits/{each}" for each in (0, 2, 3)], LIMIT)
            os.kill(os.getpid(), signal.SIGKILL)
        bulletin().set(f"waits/{rank}", b"")
        with pytest.raises(dist.DistBackendError, match=r"rank 1"):
            dist.all_reduce(torch.ones(1))
    given = handles("second", rank, living)
    dist._reconfigure(2, given).wait()
    check(living.index(rank), size - 1)
    dist._reconfigure(3, given[::-1]).wait()  # the store that all share is that of a living process
    check(size - 2 - living.index(rank), size - 1)
    everybody_is_done(rank, living)
    dist.destroy_process_group()


@pytest.mark.usefixtures("_reconfigure")
def test_a_new_process_takes_the_place_of_one_that_was_killed():  # P32
    run_groups(replaced, 5, expect_exit={1: -signal.SIGKILL}, timeout=120)


def refused(rank, size):
    begin(rank, size)
    given = handles("all", rank, range(size))
    dist._reconfigure(1, given).wait()
    for uuid, wrong, text in (
        (1, given, "uuid 1 was already used"),
        (2, [*given, given[0]], "twice"),
        (3, [given[1 - rank]], "the handle of this process is not among the 1 handles"),
        (4, [given[rank], "tcp://there"], "'tcp://there' is not a handle"),
        (5, [given[rank], '["phalanx", 1]'], "is not a handle"),
        (6, [], "not among the 0 handles"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            dist._reconfigure(uuid, wrong)
        check(rank, size)  # the group is as it was
    everybody_is_done(rank, range(size))
    dist.destroy_process_group()


@pytest.mark.usefixtures("_reconfigure")
def test_wrong_handles_and_used_uuids_are_refused_and_the_group_stays():  # P33
    run_groups(refused, 2)


def missing(rank, size):
    begin(rank, size)
    given = handles("all", rank, range(size))
    dist._reconfigure(1, given).wait()
    if rank != 1:
        with pytest.raises(dist.DistBackendError, match=r"rank\(s\) 1 to call reconfigure"):
            dist._reconfigure(2, given, timeout=timedelta(seconds=1))
    everybody_is_done(rank, range(size), "over")
    check(rank, size)  # the group is as it was
    dist._reconfigure(3, given).wait()
    check(rank, size)
    dist.destroy_process_group()


@pytest.mark.usefixtures("_reconfigure")
def test_a_process_that_does_not_come_is_named_and_the_group_stays():  # P33
    run_groups(missing, 3)


def of_two_managers(rank, size):
    """Two groups made by hand in each process change their ranks, and stay two."""
    store = dist.FileStore(str(scratch() / "managers"), -1)
    made = [c10d.process_group(dist.PrefixStore(str(each), store), rank, size, LIMIT) for each in range(2)]
    board = bulletin()
    for number, group in enumerate(made):
        board.set(f"{number}/{rank}", group.get_reconfigure_handle())
    for number, group in enumerate(made):
        options = dist.distributed_c10d.ReconfigureOptions()
        options.uuid = 1
        options.handles = [board.get(f"{number}/{each}").decode() for each in range(size)][:: 1 if number else -1]
        group.reconfigure(options).wait()
    assert len({group.group_name for group in made} & set(_registry.connections)) == 2
    for position, group in ((size - 1 - rank, made[0]), (rank, made[1])):
        assert group.rank() == position
        x = torch.full((3,), float(position))
        group.allreduce([x]).wait()
        assert x.tolist() == [float(sum(range(size)))] * 3
    everybody_is_done(rank, range(size))


@pytest.mark.usefixtures("_reconfigure")
def test_groups_made_by_hand_change_their_ranks_apart_from_each_other():  # P31
    run_groups(of_two_managers, 3)


def symmetric(rank, size):
    from phalanx import symm_mem

    begin(rank, size)
    given = handles("all", rank, range(size))
    tensor = symm_mem.empty(4)
    for uuid, order in enumerate((given, given[::-1])):
        dist._reconfigure(uuid, order).wait()
        position = dist.get_rank()
        handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
        assert (handle.rank, handle.world_size) == (position, size)
        tensor.fill_(position)
        handle.barrier()
        peer = (position + 1) % size
        assert handle.get_buffer(peer, (4,), torch.float32).tolist() == [peer] * 4
        handle.barrier()
        reduced = torch.ops.phalanx.one_shot_all_reduce(tensor, "sum", dist.group.WORLD.group_name)
        assert reduced.tolist() == [sum(range(size))] * 4
        handle.barrier()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_reconfigure")
def test_symmetric_memory_follows_the_ranks():  # P31
    pytest.importorskip("phalanx.symm_mem")
    run_groups(symmetric, 2)


def held():
    """How much this process holds: descriptors, mappings of the core, threads, worlds."""
    gc.collect()
    descriptors = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            descriptors.append(os.readlink(fd).partition(":")[0])
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:phalanx" in line]
    worlds = sum(each._world is not None for each in _registry._live)
    return len(descriptors), len(maps), len(list(Path("/proc/self/task").iterdir())), threading.active_count(), worlds


def again_and_again(rank, size):
    begin(rank, size)
    given, counts = handles("all", rank, range(size)), []
    for turn in range(20):
        dist._reconfigure(100 + turn, given).wait()
        dist.all_reduce(torch.ones(1000), async_op=True)
        assert pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item() == size
        dist.barrier()
        counts.append(held())
    first, last = (list(map(min, zip(*some, strict=True))) for some in (counts[1:6], counts[-5:]))
    assert first == last, counts  # the least of several: a connection may be about to go
    everybody_is_done(rank, range(size))
    dist.destroy_process_group()


@pytest.mark.usefixtures("_reconfigure")
def test_nothing_stays_of_the_ranks_before():  # P34
    run_groups(again_and_again, 2, timeout=120)


# ---- shrink_group, which torch has had since 2.10 --------------------------------------------------------------------


def shrinks(rank, size):
    join(rank, size)
    dist.barrier()
    sub = dist.new_group(list(range(size)))
    if rank != size - 1:  # the others only may call it
        smaller = dist.shrink_group([size - 1], group=sub)
        x = torch.full((5,), float(rank))
        dist.all_reduce(x, group=smaller)
        assert smaller.size() == size - 1 and x.tolist() == [sum(range(size - 1))] * 5
    dist.barrier()  # the default group is as it was
    if rank != 1:
        remaining = [each for each in range(size) if each != 1]
        group = dist.shrink_group([1])
        assert group is dist.group.WORLD
        assert (dist.get_rank(), dist.get_world_size()) == (remaining.index(rank), size - 1)
        x = torch.full((5,), float(rank))
        dist.all_reduce(x)
        assert x.tolist() == [sum(remaining)] * 5
        assert pc.all_reduce(torch.ones(2), "sum", group).tolist() == [size - 1] * 2
        backend = group._get_backend(torch.device("cpu"))
        assert not hasattr(backend, "options") or backend.options._timeout == timedelta(
            seconds=30
        )  # torch 2.14 has them
    everybody_is_done(rank, range(size))
    dist.destroy_process_group()


def test_shrink_group_leaves_ranks_out():  # P35
    run_groups(shrinks, 4)


def shrinks_after_a_death(rank, size):
    join(rank, size)
    dist.barrier()
    if rank == 1:
        bulletin().wait(["waits/0", "waits/2"], LIMIT)
        os.kill(os.getpid(), signal.SIGKILL)
    bulletin().set(f"waits/{rank}", b"")
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        dist.all_reduce(torch.ones(1))
    dist.shrink_group([1], shrink_flags=SHRINK_ABORT)
    x = torch.full((5,), float(rank))
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 5
    everybody_is_done(rank, (0, 2))
    dist.destroy_process_group()


def test_the_others_go_on_without_a_rank_that_was_killed():  # P35
    run_groups(shrinks_after_a_death, 3, expect_exit={1: -signal.SIGKILL})


def refused_shrinks(rank, size):
    join(rank, size)
    dist.barrier()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_shrinking
    with pytest.raises(InvalidArgumentError, match=rf"this rank \({rank}\) is among the ranks to exclude"):
        backend.shrink([rank], 0, None)
    with pytest.raises(InvalidArgumentError, match="rank 7 is not in group"):
        backend.shrink([7], 0, None)
    dist.barrier()  # nothing was sent
    dist.destroy_process_group()


def test_ranks_that_shrink_must_stay_and_those_that_go_must_be_there():  # P35
    run_groups(refused_shrinks, 2)
