"""Groups that span hosts, with processes that are told to be on different ones. test_hosts_network.py has real ones."""

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
from phalanx.core import MismatchError, PhalanxError, RevokedError
from ranks import run_ranks, scratch

ALL = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.uint8)


def on(*hosts):
    return [{"PHALANX_HOST_ID": str(7 + host)} for host in hosts]


def everywhere(tensor):
    """What every rank has, by torch's own road."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def part(rank, shape, dtype, seed=0):
    drawn = torch.Generator().manual_seed(100 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=drawn, dtype=torch.float32).to(dtype)
    return torch.randint(0, 5, shape, generator=drawn).to(dtype)


def expected(parts, reduction, dtype):
    wide = torch.stack([each.double() for each in parts])
    if reduction == "avg":
        done = wide.mean(0)
        return (done if dtype.is_floating_point else done.trunc()).to(dtype)
    found = {"sum": wide.sum, "product": wide.prod, "min": wide.amin, "max": wide.amax}[reduction](0)
    return found.to(dtype)


def reductions(rank, size, group):
    for dtype in ALL:
        for reduction in ("sum", "avg", "product", "min", "max"):
            for shape in ((), (301,)) if dtype != torch.float32 else ((), (1,), (7, 3), (1000,), (0, 4)):
                parts = [part(each, shape, dtype) for each in range(size)]
                got = pc.all_reduce(parts[rank], reduction, group) + 0
                assert got.shape == parts[0].shape and got.dtype == dtype
                torch.testing.assert_close(got, expected(parts, reduction, dtype))
        parts = [part(each, (size * 3, 5), dtype) for each in range(size)]
        got = pc.reduce_scatter_tensor(parts[rank], "sum", 0, group) + 0
        torch.testing.assert_close(got, expected(parts, "sum", dtype)[3 * rank : 3 * rank + 3])
    bits = [torch.tensor([1 << each, 3]) for each in range(size)]
    assert (pc.all_reduce(bits[rank], "bor", group) + 0).tolist() == [2**size - 1, 3]
    assert (pc.all_reduce(torch.tensor([rank == 1]), "max", group) + 0).tolist() == [True]


def movements(rank, size, group):
    for dtype in ALL:
        for shape in ((5, 3), (2001,)) if dtype != torch.float32 else ((), (1,), (5, 3), (0, 3), (20_001,)):
            parts = [part(each, shape, dtype) for each in range(size)]
            rows = [each.reshape(1) if each.dim() == 0 else each for each in parts]
            assert torch.equal(pc.all_gather_tensor(parts[rank], 0, group) + 0, torch.cat(rows))
            for source in range(size):
                assert torch.equal(pc.broadcast(parts[rank], source, group) + 0, parts[source])
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    wide = torch.cat([torch.arange(6.0).view(2, 3) + 10 * each for each in range(size)], 1)
    assert torch.equal(pc.all_gather_tensor(x.t().contiguous().t(), 1, group) + 0, wide)
    sent = torch.arange(size) + 100 * rank
    assert (pc.all_to_all_single(sent, None, None, group) + 0).tolist() == [rank + 100 * each for each in range(size)]


def forms(rank, size, group):
    """In place, into a given output, by name, coalesced, with a gradient; next to torch's own collectives."""
    x = torch.full((4,), float(rank + 1))
    total = float(sum(range(1, size + 1)))
    pc.wait_tensor(pc.all_reduce_(x, "sum", group))
    assert x.tolist() == [total] * 4
    out = torch.empty(size * 2)
    torch.ops.phalanx.all_gather_into_tensor_out(torch.full((2,), float(rank)), size, group.group_name, out=out)
    assert out.tolist() == [float(each) for each in range(size) for _ in range(2)]
    several = pc.all_reduce_coalesced([torch.ones(3), torch.ones(2, dtype=torch.int32)], "sum", group)
    assert [(each + 0).tolist() for each in several] == [[float(size)] * 3, [size] * 2]
    y = torch.ones(3, requires_grad=True)
    (pc.all_reduce(y, "sum", group) * (rank + 1)).sum().backward()
    assert y.grad.tolist() == [total] * 3
    compiled = torch.compile(lambda z: pc.all_reduce(z * 2, "sum", group) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2)).tolist() == [2.0 * size + 1] * 2
    check = torch.ones(1)
    dist.all_reduce(check)
    assert check.item() == size


def same_bits(rank, size, group):
    values = part(rank, (100_003,), torch.float32, seed=3) * 10.0 ** (rank - 1)
    for reduction in ("sum", "avg"):
        for x in (values, values.bfloat16()):
            got = (pc.all_reduce(x, reduction, group) + 0).view(torch.uint8)
            for other in everywhere(got):
                assert torch.equal(other, got)


def spans(rank, size):
    group = dist.group.WORLD
    assert pc.enable_group(group) is True  # on every rank
    assert pc.core_group(group) is None
    reductions(rank, size, group)
    movements(rank, size, group)
    forms(rank, size, group)
    same_bits(rank, size, group)
    with pytest.raises(ValueError, match="src is"):
        pc.broadcast(torch.ones(2), size, group)
    with pytest.raises((ValueError, AssertionError), match=f"must be a multiple of group_size {size}"):
        pc.reduce_scatter_tensor(torch.ones(size + 1, 2), "sum", 0, group)
    neighbours = [each for each in range(size) if os.environ["PHALANX_HOST_ID"] == on(*HOSTS[size])[each].popitem()[1]]
    lists = sorted({tuple(ranks) for ranks in dist_gather(neighbours)})
    made = [dist.new_group(list(ranks)) for ranks in lists]
    mine = made[lists.index(tuple(neighbours))]
    assert pc.is_core_group(mine) or pc.enable_group(mine)  # these share a host: a group of the core's own
    assert (pc.all_reduce(torch.ones(2), "sum", mine) + 0).tolist() == [float(len(neighbours))] * 2


def dist_gather(value):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


HOSTS = {4: (0, 1, 0, 1), 3: (0, 0, 1)}


def test_two_hosts_of_two_ranks_each_compute_what_one_does():
    run_ranks(spans, 4, start_torch=True, env=on(*HOSTS[4]))


def test_hosts_may_have_different_numbers_of_ranks():
    run_ranks(spans, 3, start_torch=True, env=on(*HOSTS[3]))


def many_hosts(rank, size):
    group = dist.group.WORLD
    reductions(rank, size, group)
    same_bits(rank, size, group)


def test_parts_are_reduced_by_one_host_each_where_there_are_many():
    run_ranks(many_hosts, 5, start_torch=True, env=on(0, 1, 2, 3, 3))


def come_and_go(rank, size):
    held = []
    for cycle in range(3):
        address = f"file://{scratch()}/cycle{cycle}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        assert (pc.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 0).tolist() == [size, size]
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:phalanx" in line]
        held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(maps)))
    assert held[1] == held[2], held  # the first one leaves what gloo keeps for the process


def test_nothing_stays_of_a_group_that_was_destroyed():
    run_ranks(come_and_go, 3, env=on(0, 0, 1))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def different_calls(rank, size):
    address, limit = f"file://{scratch()}/c10d", timedelta(seconds=3)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=limit)
    group = dist.group.WORLD
    assert (pc.all_reduce(torch.ones(2), "sum", group) + 0).tolist() == [4.0, 4.0]
    call = pc.all_reduce if rank < 2 else lambda x, _, g: pc.all_gather_tensor(x, 0, g)
    with pytest.raises(PhalanxError) as caught:
        call(torch.ones(2), "sum", group).sum()
    with pytest.raises(RevokedError, match="revoked by an earlier failure"):
        pc.all_reduce(torch.ones(2), "sum", group).sum()
    dist.destroy_process_group()
    return type(caught.value).__name__, str(caught.value)


def test_different_calls_on_different_hosts_are_both_named():
    found = run_ranks(different_calls, 4, env=on(0, 0, 1, 1))
    assert any(kind == MismatchError.__name__ for kind, _ in found)
    print(*found, sep="\n\n")
    for _, text in found:
        assert "all_reduce(float32, 2, sum) #2" in text and "all_gather_into_tensor(float32, 2) #2" in text, found


def call_for_ever(group):
    while True:
        pc.all_reduce(torch.ones(2), "sum", group).sum()


def dies(rank, size):
    group = dist.group.WORLD
    assert (pc.all_reduce(torch.ones(2), "sum", group) + 0).tolist() == [4.0, 4.0]
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PhalanxError) as caught:
        call_for_ever(group)
    with pytest.raises(RevokedError, match="revoked by an earlier failure"):
        pc.all_reduce(torch.ones(2), "sum", group).sum()
    return str(caught.value)


def test_the_death_of_a_rank_ends_the_collective_on_all_hosts():
    found = run_ranks(dies, 4, start_torch=True, env=on(0, 0, 1, 1), expect_exit={3: -signal.SIGKILL})
    assert "rank 3" in found[2] and "died" in found[2], found  # beside it
    for text in found[:2]:  # on the other host
        assert "rank 2" in text or "rank 3" in text, found


def absent(rank, size):
    address, limit = f"file://{scratch()}/c10d", timedelta(seconds=2)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=limit)
    group = dist.group.WORLD
    assert (pc.all_reduce(torch.ones(2), "sum", group) + 0).tolist() == [4.0, 4.0]
    done = [scratch() / f"done.{each}" for each in (0, 2, 3)]
    if rank == 1:
        while not all(each.exists() for each in done):
            time.sleep(0.05)
        return ""
    with pytest.raises(PhalanxError) as caught:
        pc.all_reduce(torch.ones(2), "sum", group).sum()
    (scratch() / f"done.{rank}").touch()
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named_on_all_hosts():
    for text in run_ranks(absent, 4, env=on(0, 0, 1, 1)):
        assert "still waits for rank(s) 1" in text or "still waits for rank 1" in text or text == "", text
