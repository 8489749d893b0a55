"""The coalescing manager: every collective and mix of them gives what one by one gives."""

import gc

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx.collectives import _work
from ranks import run_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.uint8)


def tensors(rank, size, rows):
    """What a rank puts in: strides, no dims, no elements, and every dtype."""
    base = torch.arange(rows * size * 2.0) % 5 + rank
    listed = [base.view(rows * size, 2).to(dtype) for dtype in DTYPES]
    return [*listed, base.view(2, rows * size).t(), base[:0].view(0, 3)]


def calls(inputs, group, size, manager):
    """Every collective on every input, out of place, in one body."""
    ring = [(i + 1) % size for i in range(size)]
    results = []
    with manager:
        for i, x in enumerate(inputs):
            results.append(pc.all_reduce(x, ("sum", "max", "PRODUCT", "min", "avg")[i % 5], group))
            results.append(pc.all_gather_tensor(x, 0, group))
            results.append(pc.all_gather_tensor(x, -1, group))
            results.append(pc.reduce_scatter_tensor(x, "max" if i % 2 else "sum", 0, group))
            results.append(pc.broadcast(x, i % size, group))
            results.append(pc.all_to_all_single(x, None, None, group))
            results.append(pc.permute_tensor(x, ring, group))
            results.append(pc.shard_dim_alltoall(x, 1, 0, group))
            rows = x.size(0) // size
            uneven = [rows + 1, rows - 1, *[rows] * (size - 2)] if rows else [0] * size
            mine = [uneven[dist.get_rank(group)]] * size
            results.append(pc.all_to_all_single(x, mine, uneven, group))
            results.append(pc.reduce_scatter_v(x, "sum", uneven, 0, group))
            results.append(pc.all_gather_v(x[: mine[0]], uneven, 0, group))
            results.append(pc.reduce_scatter_v(x.t(), "sum", uneven, 1, group))
            results.append(pc.all_gather_v(x.t()[:, : mine[0]], uneven, -1, group))
        results.append(pc.all_reduce(torch.tensor(2.5), "sum", group))
        results.append(pc.all_gather_tensor(torch.tensor(True), 0, group))
        results.append(pc.all_reduce(torch.tensor([1 + 2j]), "sum", group))
    return results


class Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def lists(rank, size):
    """The functions of several tensors are part of the body's one call, gradients included."""
    group = dist.group.WORLD
    core = pc.core_group(group)
    x = torch.full((2, 2), float(rank + 1), requires_grad=True)
    before = core.sequence
    with pc.coalescing_manager(group):
        total, most = pc.all_reduce_coalesced([x, torch.full((3,), 2.0)], "sum", group)
        (joined,) = pc.all_gather_into_tensor_coalesced([torch.tensor([rank])], group)
    assert core.sequence == before + 1
    assert (total + 0).tolist() == [[3.0, 3.0]] * 2
    assert (most + 0).tolist() == [4.0] * 3
    assert (joined + 0).tolist() == [0, 1]
    ((rank + 1) * total).sum().backward()
    assert x.grad.tolist() == [[3.0, 3.0]] * 2


def test_functions_of_several_tensors_are_recorded_too():
    run_ranks(lists, 2, start_torch=True)


def values(rank, size):
    group = dist.group.WORLD
    for rows in (1, 3, 5000):  # one slot, one fused buffer, and steps of their own
        inputs = tensors(rank, size, rows)
        wanted = [pc.wait_tensor(each) for each in calls(inputs, group, size, Nothing())]
        kept = [x.clone() for x in inputs]
        found = calls(inputs, group, size, pc.coalescing_manager(group))
        assert type(found[0]) is pc.AsyncCollectiveTensor and found[0].completed
        later = pc.coalescing_manager(group, async_ops=True)
        again = calls(inputs, group, size, later)
        assert len(later.works) == 1  # P2
        later.wait()
        first = calls(inputs, group, size, pc.coalescing_manager(group, async_ops=True))
        for i, (one, two, three, want) in enumerate(zip(found, again, first, wanted, strict=True)):
            for each in (one, two, three):
                assert each.dtype == want.dtype and each.shape == want.shape, (rows, i, each.shape, want.shape)
                assert torch.equal(pc.wait_tensor(each), want), (rows, i)  # P5, P8
        assert all(map(torch.equal, inputs, kept))


@pytest.mark.parametrize("size", [2, 3])
def test_all_collectives_of_a_body_give_what_one_by_one_gives(size):  # P1, P2, P5, P7, P8
    run_ranks(values, size, start_torch=True)


def in_place(rank, size):
    group = dist.group.WORLD
    total, every = size * (size + 1) / 2, torch.arange(1.0, size + 1)
    for asynchronous in (False, True):
        a = torch.full((4,), rank + 1.0)
        b = torch.full((3,), rank + 1)
        c = torch.full((2, 3), rank + 1.0).t()
        d = torch.full((3,), rank + 1.0)
        e = torch.nn.Parameter(torch.full((2,), rank + 1.0), requires_grad=False)
        gathered, columns = torch.zeros(size), torch.zeros(2, size)
        part, strided = torch.zeros(1), torch.zeros(4, 2)[:, 0]
        listed = [torch.zeros(()) for _ in range(size)]
        exchanged = torch.zeros(size)
        versions = [each._version for each in (a, c, gathered, strided)]
        one = torch.full((1,), rank + 1.0)
        with pc.coalescing_manager(group, async_ops=asynchronous) as cm:
            assert pc.all_reduce_(a, "sum", group) is a
            assert pc.all_reduce_(b, "PRODUCT", group) is b
            assert pc.all_reduce_inplace(c, "max", group) is c
            assert pc.broadcast_(d, 1, group) is d
            assert pc.broadcast_inplace(e, 0, group) is e
            assert pc.all_gather_tensor_inplace(gathered, one) is gathered
            pc.all_gather_tensor_inplace(columns, one.expand(2).view(2, 1), group, gather_dim=1)
            pc.reduce_scatter_tensor_inplace(part, every, "sum", group)
            pc.all_reduce_(strided.add_(rank), "max", group)
            pc.all_gather_inplace(listed, one.view(()), group)
            pc.all_to_all_inplace(exchanged, every + 10 * rank)
        if asynchronous:
            cm.wait()
        assert a.tolist() == [total] * 4 and b.tolist() == [torch.arange(1, size + 1).prod().item()] * 3
        assert torch.equal(c, torch.full((3, 2), float(size))) and d.tolist() == [2.0] * 3 and e.tolist() == [1.0] * 2
        assert torch.equal(gathered, every) and torch.equal(columns, every.expand(2, size))
        assert part.item() == size * (rank + 1) and strided.tolist() == [size - 1.0] * 4
        assert torch.equal(torch.stack(listed), every)
        assert torch.equal(exchanged, rank + 1.0 + 10 * torch.arange(size))
        after = [each._version for each in (a, c, gathered, strided)]
        assert all(new > old for new, old in zip(after, versions, strict=True))  # autograd sees the change


@pytest.mark.parametrize("size", [2, 3])
def test_forms_in_place_and_into_tensors_are_recorded(size):  # F21, P8
    run_ranks(in_place, size, start_torch=True)


def one_source_of_several(rank, size):
    group = dist.group.WORLD
    x = torch.arange(24.0).reshape(4, 6) + 100 * rank
    kept = x.clone()
    with pc.coalescing_manager(group):
        row = pc.broadcast(x[0], 0, group)
        column = pc.broadcast(x[1:, 2], 0, group)
        others = pc.broadcast(x[2], 1, group), pc.broadcast(x[2, 3:], 1, group), pc.all_reduce(x[3], "sum", group)
    assert torch.equal(row + 0, torch.arange(6.0)) and torch.equal(column + 0, torch.tensor([8.0, 14.0, 20.0]))
    assert torch.equal(others[0] + 0, torch.arange(12.0, 18.0) + 100)
    assert torch.equal(others[1] + 0, torch.arange(15.0, 18.0) + 100)
    assert torch.equal(others[2] + 0, size * torch.arange(18.0, 24.0) + 100 * sum(range(size)))
    assert torch.equal(x, kept)


def test_broadcasts_of_a_body_may_read_one_tensor():  # P1, P5
    run_ranks(one_source_of_several, 2, start_torch=True)


def one_call(rank, size):
    group = dist.group.WORLD
    core = pc.core_group(group)
    before = core.sequence
    x = [torch.full((8,), rank + 1.0) for _ in range(64)]
    with pc.coalescing_manager(group):
        for i, each in enumerate(x):
            pc.all_reduce_(each, ("sum", "max")[i % 2], group)
            pc.all_gather_tensor(each.clone(), 0, group)
    assert core.sequence == before + 1  # P3, P4: 128 collectives on 64 tensors
    assert all(each[0].item() == (size if i % 2 else size * (size + 1) / 2) for i, each in enumerate(x))
    with pc.coalescing_manager(group) as cm:
        pass
    cm.wait()
    with pc.coalescing_manager(group, torch.device("cpu"), True) as cm:
        assert cm.works == []
    cm.wait()
    assert cm.works == [] and core.sequence == before + 1  # P10: an empty body sends nothing


def test_a_body_is_one_call_of_the_core_and_an_empty_one_is_none():  # P3, P4, P10
    run_ranks(one_call, 2, start_torch=True)


def asynchronous(rank, size):
    group = dist.group.WORLD
    store, name = dist.distributed_c10d._get_default_store(), "asynchronous"
    pc.enable_group(group)
    x = torch.full((4,), rank + 1.0)
    if rank:
        store.wait([name])
    with pc.coalescing_manager(group, async_ops=True) as cm:
        y = pc.all_reduce(x, "sum", group)
        view = pc.all_gather_tensor(x, 0, group).view(size, 4)
    (work,) = cm.works
    if rank == 0:
        assert not work.is_completed() and not y.completed  # the others have not come
        store.set(name, b"")
    assert torch.equal(y + 0, torch.full((4,), size * (size + 1) / 2)) and y.completed
    assert torch.equal(view + 0, torch.arange(1.0, size + 1).view(-1, 1).expand(size, 4))
    assert work.is_completed() and work.is_success() and work.exception() is None and work.wait()
    cm.wait()
    for _ in range(3):  # dropped before they are complete: the memory stays until they are
        with pc.coalescing_manager(group, async_ops=True):
            pc.all_reduce(x, "sum", group)
    del y, view, cm, work
    gc.collect()
    assert pc.all_reduce(torch.ones(1), "sum", group).item() == size
    pc.all_reduce_(torch.ones(1), "sum", group)
    _work._sweep()
    assert not _work._parked


def test_an_asynchronous_body_returns_before_the_peers_come():  # P2, A6
    run_ranks(asynchronous, 2, start_torch=True)


def gradients(rank, size):
    group = dist.group.WORLD
    weight, total = rank + 1.0, sum(range(1, size + 1))

    def leaf():
        return torch.ones(2, 2 * size, requires_grad=True)

    a, b, c, d, e = leaf(), leaf(), leaf(), leaf(), leaf()
    with pc.coalescing_manager(group):
        results = [
            pc.all_reduce(a, "sum", group),
            pc.all_gather_tensor(b, 0, group),
            pc.all_gather_tensor(c, 1, group),
            pc.reduce_scatter_tensor(d, "avg", 1, group),
            pc.permute_tensor(e, [*range(1, size), 0], group),
        ]
    torch.stack([(each * weight).sum() for each in results]).sum().backward()
    for x in (a, b, c):
        assert torch.equal(x.grad, torch.full((2, 2 * size), float(total)))  # F26
    wanted = torch.arange(1.0, size + 1).repeat_interleave(2).expand(2, -1) / size
    assert torch.allclose(d.grad, wanted)
    assert torch.equal(e.grad, torch.full((2, 2 * size), (rank + 1) % size + 1.0))
    with pytest.raises(RuntimeError, match="all_reduce_: an op that writes into its argument has no gradient"):
        with pc.coalescing_manager(group):
            pc.all_reduce_(a, "sum", group)
    with torch.no_grad(), pc.coalescing_manager(group):
        pc.all_reduce_(a, "sum", group)
    assert torch.equal(a.detach(), torch.full((2, 2 * size), float(size)))


def test_recorded_collectives_have_gradients():  # F26
    run_ranks(gradients, 2, start_torch=True)
