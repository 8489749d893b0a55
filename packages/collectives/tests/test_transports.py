"""Groups that the core does not serve: the same calls through torch.distributed, with the same results."""

import logging
import sys
import threading
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

import phalanx.collectives as pc
from c10d_groups import apart
from phalanx.core import load_torch_ops
from ranks import run_ranks


def each_op(rank, size):
    """Every op once, on small numbers with known results; forward and backward."""
    group = dist.group.WORLD
    x = torch.arange(2.0 * size) + 10 * rank
    inputs = [torch.arange(2.0 * size) + 10 * r for r in range(size)]
    total = sum(inputs)
    assert torch.equal(pc.all_reduce(x, "SUM", group) + 0, total)
    assert torch.equal(pc.all_reduce(x, "max", group) + 0, inputs[-1])
    assert torch.equal(pc.all_gather_tensor(x, 0, group) + 0, torch.cat(inputs))
    assert torch.equal(pc.all_gather_tensor(x.view(2, -1), 1, group) + 0, torch.cat([y.view(2, -1) for y in inputs], 1))
    assert torch.equal(pc.reduce_scatter_tensor(x, "sum", 0, group) + 0, total.chunk(size)[rank])
    halves = [y.view(2, size) for y in inputs]
    assert torch.equal(pc.reduce_scatter_tensor(halves[rank], "sum", 1, group) + 0, sum(halves).chunk(size, 1)[rank])
    sizes = [2, *[1] * (size - 1)]
    parts = [y[: sizes[i]] for i, y in enumerate(inputs)]
    assert torch.equal(pc.all_gather_v(parts[rank], sizes, 0, group) + 0, torch.cat(parts))
    most = [y[: size + 1] for y in inputs]
    assert torch.equal(pc.reduce_scatter_v(most[rank], "sum", sizes, 0, group) + 0, sum(most).split(sizes)[rank])
    columns = [y.view(2, size)[:, : sizes[i]] for i, y in enumerate(inputs)]
    assert torch.equal(pc.all_gather_v(columns[rank], sizes, 1, group) + 0, torch.cat(columns, 1))
    wide = [y[: size + 1].repeat(3, 1) for y in inputs]
    assert torch.equal(pc.reduce_scatter_v(wide[rank], "sum", sizes, 1, group) + 0, sum(wide).split(sizes, 1)[rank])
    assert torch.equal(pc.broadcast(x, 1, group) + 0, inputs[1])
    exchanged = torch.cat([y.chunk(size)[rank] for y in inputs])
    assert torch.equal(pc.all_to_all_single(x, None, None, group) + 0, exchanged)
    assert torch.equal(pc.all_to_all_single(x, [2] * size, [2] * size, group) + 0, exchanged)
    moved = torch.cat([y.view(2, size).chunk(size, 1)[rank] for y in inputs], 0)
    assert torch.equal(pc.shard_dim_alltoall(x.view(2, size), 0, 1, group) + 0, moved)
    moved = torch.cat([y.view(size, 2).chunk(size, 0)[rank] for y in inputs], 1)
    assert torch.equal(pc.shard_dim_alltoall(x.view(size, 2), 1, 0, group) + 0, moved)
    cuts = [0, 2, *[0] * (size - 2)]
    moved = torch.cat([y.view(size, 2)[: sizes[i]].split(cuts, 1)[rank] for i, y in enumerate(inputs)])
    assert torch.equal(pc.shard_dim_alltoall(x.view(size, 2)[: sizes[rank]], 0, 1, group, "", sizes, cuts) + 0, moved)
    y = x.clone()
    assert pc.all_reduce_(y, "min", group) is y and torch.equal(y, inputs[0])
    assert pc.broadcast_(y.copy_(x), 0, group) is y and torch.equal(y, inputs[0])
    for one, two in (
        (pc.all_reduce_coalesced([x, x.int()], "sum", group), [total, total.int()]),
        (
            pc.all_gather_into_tensor_coalesced([x, x[:1]], group),
            [torch.cat(inputs), torch.cat([y[:1] for y in inputs])],
        ),
        (
            pc.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", [0, 0], group),
            [c.chunk(size)[rank] for c in (total, 2 * total)],
        ),
    ):
        assert all(torch.equal(found + 0, wanted) for found, wanted in zip(one, two, strict=True))
    assert torch.equal(pc.permute_tensor(x, [*range(1, size), 0], group) + 0, inputs[rank - 1])
    columns = x.view(2, size).t()
    assert torch.equal(pc.all_reduce(columns, "sum", group) + 0, total.view(2, size).t())
    assert torch.equal(pc.all_gather_tensor(columns, 0, group) + 0, torch.cat([y.view(2, size).t() for y in inputs]))
    for call, wanted in (
        (lambda z: pc.all_reduce(z, "sum", group), sum(range(1, size + 1))),
        (lambda z: pc.all_gather_tensor(z, 0, group), sum(range(1, size + 1))),
        (lambda z: pc.all_gather_v(z, [3] * size, 0, group), sum(range(1, size + 1))),
        (lambda z: pc.reduce_scatter_v(z, "avg", [3, *[0] * (size - 1)], 0, group), 1 / size),
        (lambda z: pc.broadcast(z, 0, group), sum(range(1, size + 1)) * (rank == 0)),
    ):
        z = torch.ones(3, requires_grad=True)
        ((rank + 1) * call(z)).sum().backward()
        assert torch.equal(z.grad, torch.full((3,), float(wanted)))
    ops = torch.ops.phalanx  # by name, as a compiled graph calls them
    assert torch.equal(ops.wait_tensor(ops.all_reduce(x, "sum", group.group_name)), total)
    assert not pc.is_core_group(group)
    assert pc.core_group(group) is None


def wrong_arguments(rank, size):
    group, x = dist.group.WORLD, torch.ones(size + 1, 2)
    with pytest.raises(ValueError, match=r"reduce op\w* '?median"):
        pc.all_reduce(x, "median", group)
    with pytest.raises(
        AssertionError, match=f"dim 0 has size {size + 1}, which is not divisible by the group size {size}"
    ):
        pc.reduce_scatter_tensor(x, "sum", 0, group)
    with pytest.raises(ValueError, match=f"0 has size {size + 1}"):
        pc.all_to_all_single(x, None, None, group)
    with pytest.raises(ValueError, match=f"src is {size}"):
        pc.broadcast(x, size, group)
    with pytest.raises(RuntimeError, match="the input needs a gradient"):
        pc.all_reduce(x.requires_grad_(), "max", group)


def other_hosts(rank, size):
    assert pc.enable_group(dist.group.WORLD) is False  # on every rank
    each_op(rank, size)
    wrong_arguments(rank, size)
    from phalanx.collectives import _torch_compat

    dropped = pc.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert type(dropped) is pc.AsyncCollectiveTensor and _torch_compat.registered_work_count() == 1
    del dropped
    assert _torch_compat.registered_work_count() == 0  # A6: torch 2.13 keeps one for ever


def test_ranks_on_several_hosts_go_through_torch_where_there_is_no_ucx():
    run_ranks(other_hosts, 3, start_torch=True, env=apart(3))


def no_library_on_one_rank(rank, size):
    logging.basicConfig(stream=sys.stdout)
    if rank == 1:
        from phalanx.collectives import _library

        _library.refusal = lambda: "there is no library"
    assert pc.enable_group(dist.group.WORLD) is False
    assert (pc.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 0).tolist() == [2.0, 2.0]


def test_a_rank_that_cannot_use_the_core_takes_all_ranks_with_it():
    run_ranks(no_library_on_one_rank, 2, start_torch=True)


def fake_group(rank, size):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    group = dist.group.WORLD
    assert pc.enable_group(group) is False
    x = torch.ones(8, 3)
    assert pc.wait_tensor(pc.all_reduce(x, "sum", group)).shape == (8, 3)
    assert pc.wait_tensor(pc.all_gather_tensor(x, 1, group)).shape == (8, 12)
    assert pc.wait_tensor(pc.reduce_scatter_tensor(x, "sum", 0, group)).shape == (2, 3)
    assert pc.wait_tensor(pc.all_to_all_single(x, None, None, group)).shape == (8, 3)
    assert pc.wait_tensor(pc.broadcast(x, 3, group)).shape == (8, 3)
    dist.destroy_process_group()


def test_fake_groups_work_without_any_other_rank():
    run_ranks(fake_group, 1)


def thread(rank, size, store, failures):
    try:
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
        try:
            each_op(rank, size)
            wrong_arguments(rank, size)
        finally:
            dist.destroy_process_group()
    except BaseException as error:
        failures.append(traceback.format_exc())
        multi_threaded_pg.ProcessLocalGroup.exception_handle(error)


def ranks_as_threads(rank, _):
    size = 2
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, failures = dist.HashStore(), []
    threads = [threading.Thread(target=thread, args=(r, size, store, failures)) for r in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(40)
    assert not failures, failures[0]
    assert not any(each.is_alive() for each in threads)
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    multi_threaded_pg._uninstall_threaded_pg()


def test_ranks_may_be_threads_of_torchs_tests():
    run_ranks(ranks_as_threads, 1)


def count_of_calls(rank, size):
    fallbacks = load_torch_ops().lib.phxt_fallback_count
    group = dist.group.WORLD
    pc.enable_group(group)
    before = fallbacks()
    x = torch.ones(4, requires_grad=True)
    pc.all_reduce(x.detach(), "sum", group).wait()
    pc.all_reduce(x, "sum", group).sum().backward()
    torch.ops.phalanx.all_reduce(x, "sum", group.group_name)
    pc.all_reduce_(x.detach(), "sum", group)
    assert fallbacks() == before


def test_a_group_of_one_host_never_goes_through_torch():
    run_ranks(count_of_calls, 2, start_torch=True)
