"""The collectives of phalanx.collectives on tensors that lie in symmetric memory: nothing is copied."""

import os

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx import symm_mem
from ranks import run_ranks

COUNT = 3 * 4 * 8192  # elements that 2, 3 and 4 ranks can deal out; enough where they outnumber the cores
SMALL = COUNT // 8  # enough where they do not


def shared(values, group):
    tensor = symm_mem.empty(*values.shape, dtype=values.dtype)
    symm_mem.rendezvous(tensor, group)
    return tensor.copy_(values)


def every_collective(rank, size):
    group = dist.group.WORLD
    core = pc.core_group(group)
    count = COUNT if size > len(os.sched_getaffinity(0)) else SMALL
    values = [torch.arange(count, dtype=torch.float32) % 97 + each for each in range(size)]
    mine = shared(values[rank], group)
    total = sum(values)
    part = count // size
    own = slice(rank * part, (rank + 1) * part)
    splits = [part] * size
    expected = {
        "all_reduce": total,
        "all_gather": torch.cat(values),
        "reduce_scatter": total[own],
        "all_to_all": torch.cat([each[own] for each in values]),
        "all_to_all_v": torch.cat([each[own] for each in values]),
        "broadcast": values[-1],
    }
    calls = {
        "all_reduce": lambda: pc.all_reduce(mine, "sum", group),
        "all_gather": lambda: pc.all_gather_tensor(mine, 0, group),
        "reduce_scatter": lambda: pc.reduce_scatter_tensor(mine, "sum", 0, group),
        "all_to_all": lambda: pc.all_to_all_single(mine, None, None, group),
        "all_to_all_v": lambda: pc.all_to_all_single(mine, splits, splits, group),
        "broadcast": lambda: pc.broadcast(mine, size - 1, group),
    }
    seen = {}
    for name, call in calls.items():
        before = core.zero_copies
        torch.testing.assert_close(call() + 0, expected[name], rtol=0, atol=0)
        seen[name] = core.zero_copies - before
    torch.testing.assert_close(mine, values[rank], rtol=0, atol=0)
    before = core.zero_copies
    view = mine[256:]  # part of a tensor
    torch.testing.assert_close(pc.all_reduce(view, "sum", group) + 0, total[256:], rtol=0, atol=0)
    pc.all_reduce_(mine, "sum", group)
    torch.testing.assert_close(mine, total, rtol=0, atol=0)
    mine.copy_(values[rank])
    pc.broadcast_(mine, size - 1, group)
    torch.testing.assert_close(mine, values[-1], rtol=0, atol=0)
    seen["a view, in place, broadcast"] = core.zero_copies - before
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_reads_symmetric_inputs_where_they_lie(size):  # M35 I5
    for seen in run_ranks(every_collective, size, start_torch=True):
        assert seen.pop("a view, in place, broadcast") == 3
        assert set(seen.values()) == {1}, seen


def only_the_root_has_symmetric_memory(rank, size):
    group = dist.group.WORLD
    core = pc.core_group(group)
    shared(torch.zeros(8), group)  # freed at once, but there is other memory that a root may mean
    known = shared(torch.zeros(8), group)
    root = size - 1
    values = torch.arange(COUNT, dtype=torch.float32) % 89
    block = shared(values if rank == root else torch.zeros(COUNT), group)
    mine = block if rank == root else torch.zeros(COUNT)
    seen = [core.zero_copies]
    for _ in range(2):  # the second one is of ordinary memory
        result = pc.broadcast(mine, root, group) + 0
        torch.testing.assert_close(result, values, rtol=0, atol=0)
        in_place = mine if rank == root else torch.zeros(COUNT)
        pc.broadcast_(in_place, root, group)
        torch.testing.assert_close(in_place, values, rtol=0, atol=0)
        part = torch.empty(COUNT // size)
        core.scatter(mine.numpy() if rank == root else None, part.numpy(), root_group_rank=root)
        torch.testing.assert_close(part, values.chunk(size)[rank], rtol=0, atol=0)
        seen.append(core.zero_copies)
        mine = values.clone() if rank == root else mine
    del known
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_of_broadcast_and_scatter_only_where_the_root_has_its_input_matters(size):  # M35 I5
    assert run_ranks(only_the_root_has_symmetric_memory, size, start_torch=True) == [[0, 3, 3]] * size


def lists(rank, size):
    group = dist.group.WORLD
    core = pc.core_group(group)
    values = [[torch.arange(COUNT, dtype=torch.float32) % (89 + k) + each for each in range(size)] for k in range(3)]
    mine = [shared(each[rank], group) for each in values]
    few = torch.full((4,), float(rank))
    seen = [core.zero_copies]
    for out, expected in zip(pc.all_reduce_coalesced([*mine, few], "sum", group), [*map(sum, values)], strict=False):
        torch.testing.assert_close(out + 0, expected, rtol=0, atol=0)
    seen.append(core.zero_copies)
    gathered = pc.all_gather_into_tensor_coalesced(mine, group)
    for out, each in zip(gathered, values, strict=True):
        torch.testing.assert_close(out + 0, torch.cat(each), rtol=0, atol=0)
    seen.append(core.zero_copies)
    scattered = pc.reduce_scatter_tensor_coalesced(mine, "sum", [0] * 3, group)
    for out, each in zip(scattered, values, strict=True):
        torch.testing.assert_close(out + 0, sum(each).chunk(size)[rank], rtol=0, atol=0)
    seen.append(core.zero_copies)
    with pc.coalescing_manager(group):
        pc.all_reduce_(mine[0], "sum", group)
        whole = pc.all_gather_tensor(mine[1], 0, group)
        pc.broadcast_(mine[2], size - 1, group)
    torch.testing.assert_close(mine[0], sum(values[0]), rtol=0, atol=0)
    torch.testing.assert_close(whole + 0, torch.cat(values[1]), rtol=0, atol=0)
    torch.testing.assert_close(mine[2], values[2][-1], rtol=0, atol=0)
    seen.append(core.zero_copies)
    ordinary = values[1][rank].clone()  # of one rank, of one call
    two = pc.all_gather_into_tensor_coalesced([mine[2], mine[1] if rank else ordinary], group)
    torch.testing.assert_close(two[0] + 0, values[2][-1].repeat(size), rtol=0, atol=0)
    torch.testing.assert_close(two[1] + 0, torch.cat(values[1]), rtol=0, atol=0)
    seen.append(core.zero_copies)
    with pc.coalescing_manager(group):
        alone = pc.broadcast(mine[2], 0, group)
    with pc.coalescing_manager(group):  # two calls read one tensor: the broadcast sends a copy
        twice = pc.broadcast(mine[1], 0, group), pc.all_gather_tensor(mine[1], 0, group)
    torch.testing.assert_close(alone + 0, values[2][-1], rtol=0, atol=0)
    torch.testing.assert_close(twice[0] + 0, values[1][0], rtol=0, atol=0)
    torch.testing.assert_close(twice[1] + 0, torch.cat(values[1]), rtol=0, atol=0)
    seen.append(core.zero_copies)
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_lists_of_calls_read_each_symmetric_input_where_it_lies(size):  # M35 I5
    # Sums of more than two ranks that are not in place read less when they go through slots, part by part.
    sums = 3 if size == 2 else 0
    seen = [0, sums, *(sums + each for each in (3, 6, 9, 10, 12))]
    assert run_ranks(lists, size, start_torch=True) == [seen] * size


def some_ranks_have_ordinary_memory(rank, size):
    group = dist.group.WORLD
    core = pc.core_group(group)
    values = torch.full((COUNT,), float(rank + 1))
    mine = shared(values, group)
    out = [pc.all_reduce(mine if rank == 0 else values, "sum", group) + 0]
    alone = symm_mem.empty(COUNT, dtype=torch.float32).fill_(rank + 1)  # has had no rendezvous
    out.append(pc.all_reduce(alone, "sum", group) + 0)
    elsewhere = shared(values, group)
    out.append(pc.all_reduce(mine if rank == 0 else elsewhere, "sum", group) + 0)
    for each in out:
        assert each.eq(size * (size + 1) / 2).all()
    return core.zero_copies


def test_ranks_need_not_agree_on_where_their_inputs_lie():
    assert run_ranks(some_ranks_have_ordinary_memory, 2, start_torch=True) == [0, 0]


def subgroups_and_freed_memory(rank, size):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[rank // 2]
    values = torch.full((COUNT,), float(rank + 1))
    mine = shared(values, half)  # met its half only
    expected = torch.full((COUNT,), 3.0 if rank < 2 else 7.0)
    assert pc.all_reduce(mine, "sum", half).eq(expected).all()
    assert pc.all_reduce(mine, "sum", dist.group.WORLD).eq(10).all()
    counts = [pc.core_group(half).zero_copies, pc.core_group(dist.group.WORLD).zero_copies]
    del mine
    again = torch.full((COUNT,), float(rank + 1))  # perhaps at the address of what was freed
    assert pc.all_reduce(again, "sum", half).eq(expected).all()
    return [*counts, pc.core_group(half).zero_copies]


def test_a_rendezvous_counts_for_the_ranks_that_made_it():
    assert run_ranks(subgroups_and_freed_memory, 4, start_torch=True) == [[1, 0, 1]] * 4
