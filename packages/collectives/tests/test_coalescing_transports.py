"""Coalescing managers with plain calls of torch.distributed, on groups that the core does not serve, and in graphs."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import phalanx.collectives as pc
from c10d_groups import apart
from ranks import run_ranks

MOVED = f"torch {torch.__version__} has changed "


def plain(rank, size):
    group = dist.group.WORLD
    core = pc.core_group(group)
    before = core.sequence
    x, y, z = torch.full((4,), rank + 1.0), torch.full((3,), rank + 1), torch.full((2,), 1 + rank * 1j)
    parameter = torch.nn.Parameter(torch.ones(2))
    gathered, stacked, part = torch.zeros(4 * size), torch.zeros(size, 4), torch.zeros(2)
    given = torch.arange(2.0 * size) + rank
    with pc._coalescing_manager(group, async_ops=True) as cm:
        dist.all_reduce(x)
        work = dist.all_reduce(y, op=dist.ReduceOp.PRODUCT, async_op=True)
        dist.all_reduce(z)
        dist.all_reduce(parameter, group=group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one of the two names is deprecated
            dist.all_gather_into_tensor(gathered, torch.full((4,), float(rank)))
            dist.all_gather_into_tensor(stacked, torch.full((4,), float(rank)))
            dist.reduce_scatter_tensor(part, given, op=dist.ReduceOp.MAX)
        with pytest.raises(ValueError, match="Illegal to call wait"):
            work.wait()
        assert x.tolist() == [rank + 1.0] * 4
    cm.wait()
    assert core.sequence == before + 1, MOVED + "who reads _world.pg_coalesce_state"  # P3
    total = size * (size + 1) / 2
    assert x.tolist() == [total] * 4 and y.tolist() == [torch.arange(1, size + 1).prod().item()] * 3
    assert z.tolist() == [size + sum(range(size)) * 1j] * 2 and parameter.tolist() == [float(size)] * 2
    every = torch.arange(float(size)).view(-1, 1).expand(size, 4)
    assert torch.equal(gathered, every.reshape(-1)) and torch.equal(stacked, every)
    assert torch.equal(part, (torch.arange(2.0 * size) + size - 1).chunk(size)[rank])
    with pytest.raises(ValueError, match="the input has 4 elements of torch.float32, and the output 4 of"):
        with pc.coalescing_manager(group):
            dist.all_gather_single(x, x.clone())
    with pytest.raises(ValueError, match="cannot record the reduction"):
        with pc.coalescing_manager(group):
            dist.all_reduce(x, op=dist._make_nccl_premul_sum(2.0))
    with pc.coalescing_manager(group):  # the rest of torch.distributed is sent at once, as ever
        dist.broadcast(x.fill_(rank), 1)
        assert x.tolist() == [1.0] * 4
    assert core.sequence == before + 1 and not c10d._world.pg_coalesce_state


def test_plain_calls_of_torch_are_recorded_with_ours():  # P3, P7, P8
    run_ranks(plain, 2, start_torch=True)


def test_what_torch_records_looks_as_it_did():
    call = c10d._CollOp(dist.all_reduce, torch.ones(1), None, dist.ReduceOp.SUM, None)
    assert {"op", "tensor", "dst_tensor", "redop"} <= set(vars(call)), MOVED + "_CollOp"
    names = {dist.all_reduce.__name__, dist.all_gather_single.__name__, dist.reduce_scatter_single.__name__}
    assert names == {"all_reduce", "all_gather_single", "reduce_scatter_single"}, MOVED + "names"


def twice(group, x, last):
    with pc.coalescing_manager(group):
        pc.all_reduce_(x, "sum", group)
        last()


def through_torch(rank, size):
    group = dist.group.WORLD
    assert pc.core_group(group) is None
    for asynchronous in (False, True):
        x, y, c = torch.full((4,), rank + 1.0), torch.full((3,), rank + 1), torch.full((2, 2), rank + 1.0).t()
        part, p = torch.zeros(1), torch.full((2,), float(rank))
        with pc.coalescing_manager(group, async_ops=asynchronous) as cm:
            pc.all_reduce_(x, "sum", group)
            a = pc.all_reduce(y, "max", group)
            pc.all_reduce_(c, "product", group)
            b = pc.all_gather_tensor(y, 0, group)
            d = pc.all_gather_tensor(y.view(3, 1).clone(), 1, group)
            pc.reduce_scatter_tensor_inplace(part, torch.arange(float(size)), "sum", group)
            pc.broadcast_(p, 1, group)
            e = pc.permute_tensor(y, [*range(1, size), 0], group)
            dist.all_reduce(f := torch.ones(2), op=dist.ReduceOp.MAX)
            work = pc.isend(g := torch.full((2,), float(rank)), (rank + 1) % size)
            pc.irecv(h := torch.zeros(2), (rank - 1) % size)
            with pytest.raises(RuntimeError, match="has not been issued yet"):
                a + 1
        if asynchronous:
            assert len(cm.works) == 1
            cm.wait()
        work.wait()
        every = torch.arange(1, size + 1)
        assert x.tolist() == [every.sum().item()] * 4 and a.tolist() == [size] * 3
        assert torch.equal(c, torch.full((2, 2), float(every.prod())))
        assert torch.equal(b + 0, every.repeat_interleave(3)) and torch.equal(d + 0, every.expand(3, size))
        assert part.item() == size * rank and p.tolist() == [1.0] * 2 and f.tolist() == [1.0] * 2
        assert e.tolist() == [(rank - 1) % size + 1] * 3
        assert g.tolist() == [rank] * 2 and h.tolist() == [(rank - 1) % size] * 2
    for error, last in ((ValueError, lambda: pc.all_reduce_(x, "max", group)), (ZeroDivisionError, lambda: 1 // 0)):
        with pytest.raises(error, match="calls 0 and 1 .*overlap|use the same memory|division"):
            twice(group, x, last)
    assert pc.all_reduce(torch.ones(1), "sum", group).item() == size


def test_groups_of_torch_give_the_same():  # P5, P7, P9
    run_ranks(through_torch, 2, start_torch=True, env=apart(2))


def compiled(rank, size):
    group = dist.group.WORLD

    def body(x, y):
        with pc.coalescing_manager(group, async_ops=True) as cm:
            a = pc.all_reduce(x, "sum", group)
            b = pc.all_gather_tensor(y, 0, group)
            pc.all_reduce_(z := y.clone(), "max", group)
        cm.wait()
        return a + 1, b, z

    x, y = torch.full((4,), rank + 1.0), torch.arange(3.0) + rank
    graph = torch.compile(body, fullgraph=True, backend="aot_eager")
    for one, two in zip(graph(x, y), body(x, y), strict=True):
        assert torch.equal(one, two + 0)
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(body)(x, y)
    names = [str(node.target) for node in traced.graph.nodes if "phalanx" in str(node.target)]
    assert "phalanx.all_reduce.default" in names and "phalanx.all_gather_into_tensor.default" in names


@pytest.mark.timeout(200)
def test_in_a_graph_they_are_the_single_calls():  # F19
    run_ranks(compiled, 2, start_torch=True, timeout=150)


def profiled(rank, size):
    """A rank that is watched records as the others do."""
    group = dist.group.WORLD
    pc.enable_group(group)
    x = torch.full((4,), rank + 1.0)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    if rank:
        profile.__enter__()
    with torch.inference_mode(), pc.coalescing_manager(group):
        made = torch.full((2,), rank + 1.0)
        pc.all_reduce_(made, "sum", group)
        y = pc.all_reduce(x, "sum", group)
        z = pc.all_reduce(torch.full((2,), rank + 1j).conj(), "sum", group)
    if rank:
        profile.__exit__(None, None, None)
    assert made.tolist() == [3.0] * 2 and y.tolist() == [3.0] * 4 and z.tolist() == [1 - 2j] * 2


def test_what_is_recorded_does_not_depend_on_who_watches():
    run_ranks(profiled, 2, start_torch=True)


def core_groups(rank, size):
    group = pc.core_group(dist.group.WORLD)
    with pc.coalescing_manager(group):  # a phalanx.core.Group
        y = pc.all_reduce(torch.ones(2), "sum", group)
        pc.all_reduce_(x := torch.ones(3), "sum", group)
    assert y.tolist() == [size] * 2 and x.tolist() == [size] * 3


def test_groups_of_the_core_have_them_too():
    run_ranks(core_groups, 2, start_torch=True)
