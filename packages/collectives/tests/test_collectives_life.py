"""Groups that come and go, ranks that die, and what is left behind."""

import contextlib
import gc
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from c10d_groups import everybody_is_done
from phalanx.core import MismatchError, PeerDeadError, RevokedError, WaitTimeoutError, load_torch_ops
from ranks import run_ranks, scratch


def init(rank, size, name="store", seconds=30):
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch() / name}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )


def registered(name):
    return bool(load_torch_ops().lib.phxt_group_has(0, name.encode()))


def again_and_again(rank, size):
    kept = []
    for turn in range(4):
        init(rank, size, f"store{turn}")
        group, sub = dist.group.WORLD, dist.new_group([0, 1])
        kept.append(group)  # whoever still has a destroyed group must not disturb the next one
        assert not pc.is_core_group(group)
        x = torch.full((3,), float(rank + turn))
        wanted = [float(sum(r + turn for r in range(size)))] * 3
        assert pc.all_reduce(x, "sum", group).tolist() == wanted
        assert pc.all_reduce(x, "sum", group.group_name).tolist() == wanted
        assert torch.ops.phalanx.wait_tensor(torch.ops.phalanx.all_reduce(x, "sum", "0")).tolist() == wanted
        if rank < 2:
            assert pc.all_reduce(x, "sum", sub).tolist() == [2 * turn + 1.0] * 3
            assert registered(sub.group_name)
            dist.destroy_process_group(sub)
            assert not registered(str(sub.group_name))
        assert registered("0")
        dist.destroy_process_group()
        assert not registered("0")
        with pytest.raises(ValueError, match="init_process_group"):
            pc.all_reduce(x, "sum", group)
        with pytest.raises(RuntimeError):
            torch.ops.phalanx.all_reduce(x, "sum", "0")
    init(rank, size, "last")
    with pytest.raises(ValueError, match="it was destroyed"):
        pc.all_reduce(torch.ones(1), "sum", kept[0])
    if rank == 0:  # its name means another group now, which the other ranks have not met on
        assert not registered("0")
    everybody_is_done(rank, range(size))  # gloo's ranks would see the connections of this one closed while they connect
    dist.destroy_process_group()


def test_groups_can_be_destroyed_and_made_again_under_the_same_name():
    run_ranks(again_and_again, 3, timeout=90)


def one_store(rank, size):
    """What a first run left in the store does not disturb the second: not even after a failure in between."""
    store = dist.FileStore(str(scratch() / "file"), size)
    for turn in range(3):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"gloo{turn}", store), rank=rank, world_size=size)
        dist.distributed_c10d._world.pg_map[dist.group.WORLD] = ("gloo", store)  # ours sees no prefix
        assert pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item() == size
        dist.barrier()
        # A run that died while its ranks met leaves these.
        store.set(f"phalanx/0/{turn}", b"stale")
        for key in ("hello/0", "hello/1", "thanks/1"):
            stale = b'["stale", "", "host"]' if turn else b'["of another version"]'
            store.set("phalanx/0/" + members(size) + "/" + key, stale)
        store.set("phalanx/0/" + members(size) + "/answer", b'["stale", "", ["a", "b"], ["host", "host"]]')
        dist.barrier()
        dist.destroy_process_group()


def members(size):
    import hashlib

    return hashlib.sha256(repr(tuple(range(size))).encode()).hexdigest()[:16]


def test_what_is_left_in_a_store_is_not_believed():
    run_ranks(one_store, 2)


def nothing_is_left(rank, size):
    def threads():
        return len(os.listdir("/proc/self/task"))

    def mapped():
        return sum("memfd:phalanx" in line for line in open("/proc/self/maps"))

    def sockets():
        return sum(
            os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        )

    init(rank, size)
    group = dist.group.WORLD
    dist.barrier()
    before = threads(), sockets()
    pc.all_reduce(torch.ones(3), "sum", group).wait()
    assert mapped() > 0 and threads() > before[0]
    dist.barrier()
    pc.finalize()
    pc.finalize()
    assert mapped() == 0 and (threads(), sockets()) == before
    assert not pc.is_core_group(group) and not registered("0")
    dist.barrier()
    assert pc.all_reduce(torch.ones(3), "sum", group).tolist() == [float(size)] * 3  # they meet again
    assert mapped() > 0
    dist.barrier()
    dist.destroy_process_group()
    assert mapped() == 0 and not registered("0")


def test_destroying_the_groups_releases_everything():
    run_ranks(nothing_is_left, 2, check_leaks=True)


def subgroup_dies(rank, size):
    init(rank, size)
    sub = dist.new_group([0, 1])
    pc.enable_group(sub)
    name = str(sub.group_name)
    assert registered(name)
    dist.destroy_process_group(sub)
    del sub
    gc.collect()
    assert not registered(name)
    assert pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item() == size
    dist.destroy_process_group()


def test_a_subgroup_goes_alone():
    run_ranks(subgroup_dies, 2)


def killed(rank, size):
    init(rank, size)
    group = dist.group.WORLD
    assert pc.all_reduce(torch.ones(2), "sum", group).tolist() == [float(size)] * 2
    (scratch() / f"pid{rank}").write_text(str(os.getpid()))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    result = pc.all_reduce(torch.ones(2), "sum", group)
    view = result[1:]
    started = time.monotonic()
    with pytest.raises(PeerDeadError) as caught:  # A12
        result + 1
    assert time.monotonic() - started < 10
    error, pid = caught.value, (scratch() / "pid1").read_text()
    assert "all_reduce #2 on group '0'" in str(error) and "rank 1" in str(error) and pid in str(error)
    assert error.peer == 1 and error.rank == rank and error.operation == "all_reduce" and error.sequence == 2
    for use in (lambda each: each.tolist(), pc.wait_tensor, pc.AsyncCollectiveTensor.wait, lambda each: each + 1):
        for each in (result, view):
            with pytest.raises(PeerDeadError):  # it is told each time: the memory holds nothing
                use(each)
    assert not result.completed
    with pytest.raises((RevokedError, PeerDeadError)):
        pc.all_reduce(torch.ones(2), "sum", group)
    assert not [name for name in os.listdir("/dev/shm") if "phalanx" in name]
    return str(error)


def test_a_killed_rank_is_named_by_those_who_wait_for_it():  # A12
    texts = run_ranks(killed, 3, expect_exit={1: -signal.SIGKILL})
    assert texts[1] is None


def disagree(rank, size):
    init(rank, size)
    group = dist.group.WORLD
    with pytest.raises(MismatchError) as caught:
        pc.wait_tensor(pc.all_reduce(torch.ones(3 + rank), "sum", group))
    assert "float32, 3" in str(caught.value) and "float32, 4" in str(caught.value)
    with pytest.raises(RevokedError):
        pc.all_reduce(torch.ones(3), "sum", group)
    dist.destroy_process_group()


def test_ranks_that_disagree_learn_what_each_called():
    run_ranks(disagree, 2)


def late(rank, size):
    init(rank, size, seconds=2)
    if rank == 0:
        group = dist.group.WORLD
        with pytest.raises(
            WaitTimeoutError,
            match=r"group '0': timed out after 2000 ms \(.* group\): rank 0 still waits for rank\(s\) 1",
        ) as caught:
            pc.all_reduce(torch.ones(1), "sum", group)
        assert caught.value.peer == 1
    everybody_is_done(rank, [0])
    assert pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item() == size  # late, but not too late


def test_a_late_rank_is_named_and_may_still_come():
    run_ranks(late, 2)


def late_member(rank, size):
    init(rank, size, seconds=2)
    if rank != 1:
        with pytest.raises(WaitTimeoutError, match=r"still waits for rank\(s\) 1 to call"):
            pc.enable_group(dist.group.WORLD)
    everybody_is_done(rank, [0, 2])


def test_every_waiting_rank_names_the_late_one():
    run_ranks(late_member, 3)


def exits_with_work_in_flight(rank, size):
    init(rank, size)
    results = [pc.all_reduce(torch.ones(4), "sum", dist.group.WORLD) for _ in range(10)]
    if rank == 0:
        assert results[-1].tolist() == [2.0] * 4
    return rank  # nothing is destroyed, rank 1 never waits


def test_a_rank_may_exit_without_destroying_its_groups():
    run_ranks(exits_with_work_in_flight, 2, fresh=True)


def threads_of_one_rank(rank, size):
    import threading

    init(rank, size)
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    failures = []

    def work(group):
        try:
            for i in range(200):
                count = 4 if i % 10 else 200_000  # the large ones block: without the GIL, or this hangs
                x = torch.full((count,), float(rank + i))
                assert (pc.all_reduce(x, "sum", group) + 0)[0] == sum(r + i for r in range(size))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(group,)) for group in (groups if rank else reversed(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    dist.destroy_process_group()


def test_threads_may_use_groups_of_their_own_at_the_same_time():  # A9
    run_ranks(threads_of_one_rank, 2)


def held():
    """What this process holds of the core: mappings, descriptors of shared memory, threads besides the first."""
    maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:phalanx" in line]
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(os.readlink(fd))
    return maps, [name for name in names if "/memfd:phalanx" in name], len(list(Path("/proc/self/task").iterdir()))


def destroyed_with_stray_references(rank, size):
    before = held()
    dist.init_process_group("gloo", init_method=f"file://{scratch()}/store", rank=rank, world_size=size)
    world, other = dist.group.WORLD, dist.new_group([0, 1])
    pending = [pc.all_reduce(torch.ones(100), "sum", group) for group in (world, other) for _ in range(3)]
    view = pending[0][:1]
    waited = pc.all_gather_tensor(torch.ones(2), 0, other)
    waited.wait()
    assert held() != before
    dist.barrier()
    dist.destroy_process_group()
    maps, fds, _ = held()
    assert (maps, fds) == ([], [])
    assert view.item() == size and all(torch.equal(each + 0, torch.full((100,), float(size))) for each in pending)
    with pytest.raises(ValueError, match="init_process_group"):
        pc.all_reduce(torch.ones(1), "sum", other)
    # the same names again
    dist.init_process_group("gloo", init_method=f"file://{scratch()}/again", rank=rank, world_size=size)
    assert pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item() == size
    dist.destroy_process_group()
    assert held()[:2] == ([], [])


def test_destroying_releases_everything_whoever_still_refers_to_it():  # P25
    run_ranks(destroyed_with_stray_references, 2)
