"""The backend `phalanx` where the ranks of a group are on several hosts. Processes are told to be on different ones."""

import gc
import importlib.util
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import phalanx.collectives as pc
from c10d_groups import join
from phalanx.collectives import c10d
from phalanx.collectives.c10d._hosts_mail import Mail
from ranks import run_ranks, scratch


def on(*hosts):
    """Groups of one host are served in Python: nothing is compiled here."""
    return [{"PHALANX_HOST_ID": str(7 + host), "PHALANX_C10D": "python"} for host in hosts]


def programs(name):
    """Those of another file of tests."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_after_another(rank, size, *parts):
    """Programs that make a default group of their own: functions, or names of some in other files."""
    folder = scratch()
    for i, part in enumerate(parts):
        os.environ["PHX_TEST_SCRATCH"] = str(folder / str(i))
        scratch().mkdir(exist_ok=True)
        if isinstance(part, str):
            file, _, name = part.partition(".")
            part = getattr(programs(file), name)
        part(rank, size)
        gc.collect()  # what errors that were caught refer to
    os.environ["PHX_TEST_SCRATCH"] = str(folder)


def is_on_hosts(group):
    return type(group).__name__ == "HostsGroup"


# ---- what one host does, several do ----------------------------------------------------------------------------------


def as_on_one_host(rank, size):
    parts = "test_c10d_calls.everything", "test_c10d_messages.everything"
    one_after_another(rank, size, *parts, "test_c10d_life.come_and_go", "test_c10d_life.subgroups")


def test_two_ranks_on_a_host_and_one_on_another_compute_what_three_on_one_do():  # P1 to P6, P11, P17, P18, P25, P30
    run_ranks(as_on_one_host, 3, env=on(0, 0, 1), timeout=120)


def functional_alone(rank, size):
    """The functional collectives of this package go through the group."""
    join(rank, size)
    group = dist.group.WORLD
    assert pc.enable_group(group) is False and is_on_hosts(group)
    assert (pc.all_reduce(torch.ones(2), "sum", group) + 0).tolist() == [2.0] * 2
    assert (pc.all_gather_tensor(torch.tensor([rank]), 0, group) + 0).tolist() == [0, 1]
    assert (pc.all_to_all_single(torch.arange(2) + 10 * rank, None, None, group) + 0).tolist() == [rank, 10 + rank]
    assert (pc.broadcast(torch.tensor([rank]), 1, group) + 0).item() == 1
    dist.destroy_process_group()


def each_alone(rank, size):
    names = "threads", "beside_gloo", "sequence_numbers", "unfinished"
    parts = functional_alone, *(f"test_c10d_life.{name}" for name in names), "test_c10d_torch.everything"
    one_after_another(rank, size, *parts, "test_c10d_ddp.everything")  # the last one replaces parts of torch


def test_what_torch_builds_on_process_groups_runs_where_each_rank_has_a_host():  # P18 to P22, P29
    run_ranks(each_alone, 2, env=on(0, 1), timeout=120)


# ---- four ranks on two hosts -----------------------------------------------------------------------------------------


def everywhere(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def unsigned(rank, size):
    """Torch adds no unsigned integers but bytes."""
    op = dist.ReduceOp
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        top = torch.iinfo(dtype).max
        mine = torch.tensor([top - rank, rank + 1, 2 + rank], dtype=dtype)
        wanted = {
            op.SUM: [(-4 - 6) % (top + 1), 10, 14],
            op.PRODUCT: [24, 24, 120],
            op.MIN: [top - 3, 1, 2],
            op.MAX: [top, 4, 5],
            op.BOR: [top, 7, 7],
        }
        for reduction, values in wanted.items():
            x = mine.clone()
            dist.all_reduce(x, reduction)
            assert x.tolist() == values, (dtype, reduction)
    x = torch.tensor([7 + rank], dtype=torch.uint16)
    dist.all_reduce(x, op.AVG)
    assert x.item() == 8  # 34 by 4, towards zero
    for wrong, reduction in ((torch.ones(1), op.BXOR), (torch.ones(1, dtype=torch.bool), op.AVG)):
        with pytest.raises(NotImplementedError, match="is not defined for"):
            dist.all_reduce(wrong, reduction)
    with pytest.raises(NotImplementedError, match="avg of uint64"):
        dist.all_reduce(torch.ones(1, dtype=torch.uint64), op.AVG)


def same_bits(rank, size):
    drawn = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(500_003, generator=drawn).to(dtype) * 10.0 ** (rank - 1)
        parts = everywhere(values)
        dist.all_reduce(values)
        close = torch.stack([part.double() for part in parts]).sum(0)
        torch.testing.assert_close(values.double(), close, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
        assert all(torch.equal(each, values) for each in everywhere(values))


def larger_messages(rank, size):
    """More than is sent unasked, in place too."""
    n = 50_000
    sent = torch.cat([torch.full((n,), 10.0 * rank + other) for other in range(size)])
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    assert got.view(size, n).mean(1).tolist() == [10.0 * other + rank for other in range(size)]
    dist.all_to_all_single(got, got)
    assert torch.equal(got, sent)
    parts = [torch.empty(n, dtype=torch.float8_e5m2) for _ in range(size)] if rank == 3 else None
    dist.gather(torch.full((n,), float(rank)).to(torch.float8_e5m2), parts, 3)
    assert rank != 3 or all((part.float() == other).all() for other, part in enumerate(parts))
    mine = torch.empty(n, dtype=torch.bool)
    dist.scatter(mine, [torch.full((n,), other % 2 == 0) for other in range(size)] if rank == 1 else None, 1)
    assert (mine == (rank % 2 == 0)).all()
    exchange = dist.all_to_all_single(got, sent, async_op=True)
    total = dist.all_reduce(torch.ones(3), async_op=True)
    assert total.get_future().wait()[0].tolist() == [4.0] * 3
    assert exchange.get_future().wait()[0] is not None
    assert torch.equal(got.view(size, n).mean(1), torch.arange(4.0) * 10 + rank)


def together(rank, size):
    """Small tensors share a buffer, large ones do not."""
    tensors = [torch.full((n,), float(rank + n)) for n in (400_000, 3, 0, 400_001, 5)]
    tensors.append(torch.full((4,), rank, dtype=torch.int16))
    dist.group.WORLD.allreduce_coalesced(tensors).wait()
    assert all((x == 6 + 4 * x.numel()).all() for x in tensors[:-1]) and tensors[-1].tolist() == [6] * 4


def late_messages(rank, size):
    """A message that does not come is no harm to the group."""
    if rank == 0:
        request = dist.irecv(torch.empty(1), 3, tag=9)
        with pytest.raises(
            dist.DistBackendError, match=r"recv on group '0': timed out after 100 ms .*: rank 0 still waits .* rank 3"
        ):
            request.wait(timedelta(milliseconds=100))
    dist.barrier()
    c10d.monitored_barrier()


def functional(rank, size):
    """The functional collectives of this package, which have connections of their own."""
    group = dist.group.WORLD
    assert pc.enable_group(group) is True and pc.core_group(group) is None
    x = torch.full((3,), float(rank))
    later = pc.all_reduce(x, "sum", group)
    dist.all_reduce(x)
    assert (later + 0).tolist() == x.tolist() == [6.0] * 3
    assert (pc.all_gather_tensor(torch.tensor([rank]), 0, group) + 0).tolist() == [0, 1, 2, 3]
    sent = torch.arange(size) + 10 * rank
    assert (pc.all_to_all_single(sent, None, None, group) + 0).tolist() == [rank + 10 * each for each in range(size)]
    y = torch.ones(2, requires_grad=True)
    (pc.all_reduce(y, "sum", group) * (rank + 1)).sum().backward()
    assert y.grad.tolist() == [10.0] * 2
    with pc.coalescing_manager(group):
        a, b = torch.ones(2), torch.full((2,), rank)
        dist.all_reduce(a)
        dist.all_reduce(b)
    assert a.tolist() == [4.0] * 2 and b.tolist() == [6] * 2


def subgroups(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("far", "near"))  # the ranks 0, 2 and 1, 3 share a host
    for name, total in (("far", 2 * (rank % 2) + 2), ("near", 4 * (rank // 2) + 1)):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh.get_group(name))
        assert x.item() == total
    assert is_on_hosts(mesh.get_group("near")) and not is_on_hosts(mesh.get_group("far"))
    some = dist.new_group([3, 1, 0])
    if rank != 2:
        parts = [torch.empty(1) for _ in range(3)]
        dist.all_gather(parts, torch.tensor([float(rank)]), group=some)
        assert [part.item() for part in parts] == [float(each) for each in dist.get_process_group_ranks(some)]


def training(rank, size):
    test_c10d_ddp = programs("test_c10d_ddp")
    model = test_c10d_ddp.Net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    test_c10d_ddp.check(model, rank, size, ddp)
    for p in model.parameters():
        assert all(torch.equal(each, p.grad) for each in everywhere(p.grad))


def two_and_two(rank, size):
    join(rank, size)
    assert is_on_hosts(dist.group.WORLD) and dist.get_backend() == "phalanx"
    for part in (unsigned, same_bits, larger_messages, together, late_messages, functional, subgroups, training):
        part(rank, size)
        dist.barrier()
    dist.destroy_process_group()


def test_two_hosts_of_two_ranks_each():  # P13, P16, P18
    run_ranks(two_and_two, 4, env=on(0, 1, 0, 1), timeout=120)


# ---- life ------------------------------------------------------------------------------------------------------------


def held():
    gc.collect()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:phalanx" in line]
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count(), len(maps)


def cycle(rank, size, name):
    join(rank, size, name=name)
    work = dist.all_reduce(torch.ones(300_000), async_op=True)
    works = [dist.irecv(torch.empty(1), (rank + 1) % size), work]  # the first of what is never sent
    assert work.get_future().wait()[0][0].item() == size
    dist.all_to_all_single(torch.empty(size), torch.ones(size))
    assert (pc.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 0).tolist() == [size] * 2
    dist.barrier()
    dist.destroy_process_group()
    return works


def come_and_go(rank, size):
    counts, kept = [], []
    for turn in range(3):
        kept.append(cycle(rank, size, f"store{turn}"))  # whoever still refers to them
        counts.append(held())
    assert all(after <= before for before, after in zip(counts[1], counts[2], strict=True)), counts
    for receive, reduced in kept:
        assert reduced.is_success() and reduced.wait()
        with pytest.raises(dist.DistBackendError, match="has left the group|destroyed group"):
            receive.wait()
    if rank == 0:  # the other ranks do not make the group
        with pytest.raises(
            dist.DistBackendError, match=r"group '0': timed out after 1000 ms .* rank\(s\) 1, 2 to make it too"
        ):
            join(rank, size, seconds=1, name="alone")


def test_nothing_stays_of_a_group_and_who_does_not_make_it_is_named():  # P25
    run_ranks(come_and_go, 3, env=on(0, 1, 1))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def late(rank, size):
    join(rank, size, seconds=2)
    dist.barrier()
    done = dist.FileStore(str(scratch() / "done"), 1)
    if rank == 0:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        told = r"all_reduce.* timed out after 2000 ms .*: rank 0 still waits for rank\(s\) 1 on another host"
        for wait in (lambda: dist.all_reduce(torch.ones(1)), future.wait):
            with pytest.raises(RuntimeError, match=told):
                wait()
        done.set("done", b"")
    else:
        done.wait(["done"], timedelta(seconds=30))
        with pytest.raises(dist.DistBackendError, match="rank 0 gave up: all_reduce.* 2000 ms"):
            dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def wrong(rank, size):
    one_after_another(rank, size, mismatched, late, "test_c10d_failures.disagree", "test_c10d_failures.aborted")


def mismatched(rank, size):
    """What is made of messages, and what is not."""
    join(rank, size)
    dist.barrier()
    with pytest.raises(
        dist.DistBackendError, match=r"rank 1 sent all_to_all\(float32, 4\) #1|rank 0 sent .*float32, 3"
    ):
        dist.all_to_all_single(torch.empty(6 + 2 * rank), torch.ones(6 + 2 * rank))
    with pytest.raises(dist.DistBackendError, match="revoked by an earlier failure"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(dist.DistBackendError, match="revoked by an earlier failure"):
        dist.recv(torch.ones(1), 1 - rank)
    dist.destroy_process_group()


def test_ranks_that_disagree_or_do_not_come_or_abort_are_named():  # P23, P24
    run_ranks(wrong, 2, env=on(0, 1), timeout=90)


def reduce_for_ever():
    while True:
        dist.all_reduce(torch.ones(1000))


def killed(rank, size):
    join(rank, size)
    dist.barrier()
    failed = []

    def receive():
        with pytest.raises(dist.DistBackendError) as caught:
            dist.recv(torch.ones(1), (rank + 1) % size, tag=5)
        failed.append(str(caught.value))

    waiting = threading.Thread(target=receive)
    waiting.start()
    future = dist.irecv(torch.ones(1), (rank + 1) % size if rank == 3 else 3).get_future()
    total = dist.all_reduce(torch.ones(5), async_op=True).get_future()
    assert total.wait()[0].tolist() == [4.0] * 5
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError) as caught:
        reduce_for_ever()
    with pytest.raises(RuntimeError, match="rank 3"):
        future.wait()
    waiting.join()
    with pytest.raises(dist.DistBackendError, match="revoked by an earlier failure"):
        dist.gather(torch.ones(1), [torch.ones(1) for _ in range(4)] if rank == 0 else None)
    assert "rank 3" in failed[0], failed
    dist.destroy_process_group()
    return str(caught.value)


def told_late(rank, size):
    """The messages of rank 0 come later than the end of the connections of its collectives."""
    join(rank, size)
    dist.barrier()
    done = dist.FileStore(str(scratch() / "done"), 1)
    if rank == 0:
        read = Mail._read
        Mail._read = lambda *args: (time.sleep(0.5), read(*args))
        done.set("slow", b"")
        with pytest.raises(dist.DistBackendError, match=f"rank {size - 1} aborted process group '0'"):
            dist.all_reduce(torch.ones(1000))
    elif rank == size - 1:
        done.wait(["slow"], timedelta(seconds=30))
        time.sleep(0.5)  # rank 0 waits for it
        dist.group.WORLD.abort()
    else:
        with pytest.raises(dist.DistBackendError, match=f"rank {size - 1} aborted process group '0'"):
            dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1)])
def test_who_closes_a_connection_because_others_failed_is_not_the_cause(hosts):
    run_ranks(told_late, len(hosts), env=on(*hosts), timeout=60)


def test_a_killed_rank_is_named_on_all_hosts_and_nobody_waits_for_it():
    texts = run_ranks(killed, 4, env=on(0, 0, 1, 1), expect_exit={3: -signal.SIGKILL})
    assert all("rank 3" in text for text in texts[:3]), texts
