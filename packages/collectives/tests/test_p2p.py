"""isend, irecv, send, recv and batches of them."""

import gc

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from c10d_groups import apart
from phalanx.collectives import _work
from phalanx.core import InvalidArgumentError, PhalanxError
from ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2)


def ring(rank, size, through_core):
    group = dist.group.WORLD
    assert (pc.core_group(group) is not None) is through_core
    right, left = (rank + 1) % size, (rank - 1) % size
    dtypes = DTYPES if through_core else DTYPES[:1]
    for dtype in dtypes:
        for shape in ((), (3,), (0,), (2, 5000)):
            if not through_core and shape == (0,):
                continue  # gloo has no empty messages
            x = torch.full(shape, rank + 1.0).to(dtype)
            got = torch.zeros(shape).to(dtype)
            version = got._version
            receiving, sending = pc.irecv(got, left, group), pc.isend(x, right, group)
            assert receiving.wait() and sending.wait()
            assert torch.equal(
                got.float() if dtype.itemsize == 1 else got,
                torch.full(shape, left + 1.0).to(dtype).to(torch.float32 if dtype.itemsize == 1 else dtype),
            )
            assert got._version > version or not through_core
    columns = torch.arange(6.0).view(2, 3).t() + rank
    got = torch.zeros(3, 2)
    works = [pc.irecv(got, group_src=left), pc.isend(columns, group_dst=right)]
    for work in works:
        work.wait()
    assert torch.equal(got, torch.arange(6.0).view(2, 3).t() + left)
    if rank == 0:
        pc.send(torch.tensor([5, 6]), 1)
        sender = pc.recv(other := torch.zeros(2, dtype=torch.int64))  # from any
        assert sender == 1 and other.tolist() == [7, 8]
    elif rank == 1:
        assert pc.recv(other := torch.zeros(2, dtype=torch.int64), 0) == 0 and other.tolist() == [5, 6]
        pc.send(torch.tensor([7, 8]), 0)


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_every_dtype_go_around(size):  # P11, P12
    run_ranks(ring, size, True, start_torch=True)


def test_groups_of_torch_have_the_same_messages():  # P11
    run_ranks(ring, 2, False, start_torch=True, env=apart(2))


def batches(rank, size, through_core):
    group = dist.group.WORLD
    assert (pc.core_group(group) is not None) is through_core
    right, left = (rank + 1) % size, (rank - 1) % size

    def batch(order, ours):
        module = pc if ours else dist
        sent = [torch.full((4,), 10.0 * rank + i) for i in range(4)]
        got = [torch.zeros(4) for _ in range(4)]
        ops = [module.P2POp(module.isend, each, right, group, tag=i // 2) for i, each in enumerate(sent)]
        ops += [module.P2POp(module.irecv, each, left, group, tag=i // 2) for i, each in enumerate(got)]
        works = pc.batch_isend_irecv([ops[i] for i in order])
        assert len(works) == len(ops)
        for work in works:
            work.wait()  # P11: it really waits
        return [each[0].item() for each in got] == [10.0 * left + i for i in range(4)]

    # Any order of sends and receives; those of one direction and tag keep theirs.
    orders = [[*range(8)], [4, 5, 6, 7, 0, 1, 2, 3], [0, 4, 1, 5, 2, 6, 3, 7], [6, 7, 2, 3, 4, 5, 0, 1]]
    for i, order in enumerate(orders if through_core else orders[:3]):
        assert batch(order if rank % 2 else orders[0], ours=bool(i % 2))
    assert pc.batch_isend_irecv([]) == []
    with pc.coalescing_manager(group, async_ops=True) as cm:
        got, x = torch.zeros(2), torch.full((2,), float(rank))
        works = pc.batch_isend_irecv([pc.P2POp(pc.irecv, got, left), pc.P2POp(pc.isend, x, right)])
        y = pc.all_reduce(x, "max", group)
    assert len(works) == 2
    cm.wait()
    assert all(work.wait() for work in works) and works[1].is_completed()
    assert got.tolist() == [left] * 2 and y.tolist() == [size - 1] * 2
    assert "P2POp(irecv, [2] of torch.float32, peer=0, tag=0)" in repr(pc.P2POp(pc.irecv, got, 0))


@pytest.mark.parametrize("size", [2, 3])
def test_a_batch_has_any_order_of_sends_and_receives(size):  # P11
    run_ranks(batches, size, True, start_torch=True)


def test_groups_of_torch_have_batches():  # P11
    run_ranks(batches, 2, False, start_torch=True, env=apart(2))


def waits(rank, size):
    group = dist.group.WORLD
    pc.enable_group(group)
    if rank == 0:
        got = torch.zeros(100_000)
        (work,) = pc.batch_isend_irecv([pc.P2POp(pc.irecv, got, 1, group, 7)])
        assert not work.is_completed() and not work.is_success() and work.exception() is None
        pc.send(torch.ones(1), 1, tag=1)  # now it may send
        assert work.wait() and work.is_completed() and work.is_success() and work.source_rank() == 1
        assert got.sum().item() == 100_000
        dropped = pc.irecv(torch.zeros(3), 1, tag=8)
        del dropped
        gc.collect()
        assert len(_work._parked) == 1  # its memory stays until the message has come
        pc.send(torch.ones(1), 1, tag=1)
        pc.wait_tensor(pc.all_reduce(torch.ones(1), "sum", group))
        _work._sweep()
        assert not _work._parked
    else:
        pc.recv(torch.zeros(1), 0, tag=1)
        pc.isend(torch.ones(100_000), 0, tag=7)  # dropped: it is sent all the same
        pc.recv(torch.zeros(1), 0, tag=1)
        pc.send(torch.ones(3), 0, tag=8)
        pc.wait_tensor(pc.all_reduce(torch.ones(1), "sum", group))


def test_waiting_waits_and_dropped_works_go_on():  # P11, P18
    run_ranks(waits, 2, start_torch=True)


def disagree(rank, group):
    if rank == 0:
        pc.send(torch.ones(3), 1, group)
    else:
        pc.recv(torch.ones(4), 0, group)
    pc.all_reduce_(torch.ones(1), "sum", group)


def wrong(rank, size):
    group = dist.group.WORLD
    x = torch.ones(4)
    for call, text in (
        (lambda: pc.isend(x, size), r"dst is 2, which is not in the group; its ranks are \[0, 1\]"),
        (lambda: pc.isend(x, group_dst=-1), "group_dst is -1; it must be an int from 0 to 1"),
        (lambda: pc.isend(x), "dst is missing"),
        (lambda: pc.irecv(x, 0, group_src=0), "src and group_src are both given"),
        (lambda: pc.irecv(x.view(2, 2).t(), 0), "receive into a contiguous tensor"),
        (lambda: pc.isend(x, 0, tag=-1), "the tag is -1"),
        (lambda: pc.P2POp(dist.all_reduce, x, 0), "must be the function isend or irecv"),
        (lambda: pc.batch_isend_irecv([pc.P2POp(pc.isend, x, 0), x]), "expected a list of P2POp"),
        (lambda: pc.batch_isend_irecv([pc.P2POp(pc.isend, x, 0), pc.P2POp(pc.irecv, x, 9)]), "src is 9"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(TypeError, match="isend: expected a torch.Tensor, not list"):
        pc.isend([1.0], 0)
    pc.enable_group(group)
    pc.isend(x, rank)  # to itself
    pc.recv(y := torch.zeros(4), rank)
    assert y.tolist() == [1.0] * 4  # and nothing of the wrong ones was sent
    other = dist.new_group([0, 1])
    pc.enable_group(other)
    with pytest.raises(ValueError, match="must be on one group"):
        pc.batch_isend_irecv([pc.P2POp(pc.isend, x, 0, group), pc.P2POp(pc.irecv, x, 0, other)])
    with pytest.raises(PhalanxError) as caught:  # A12: the sender has another number of elements
        disagree(rank, other)
    assert not isinstance(caught.value, InvalidArgumentError)


def test_wrong_arguments_are_told_before_anything_is_sent():
    run_ranks(wrong, 2, start_torch=True)


def subgroups(rank, size):
    group = dist.new_group([1, 2])
    if rank:
        between(rank, group)
    dist.barrier()


def between(rank, group):
    pc.enable_group(group)
    other = 3 - rank
    got = torch.zeros(2)
    works = [pc.irecv(got, other, group), pc.isend(torch.full((2,), float(rank)), other, group)]
    for work in works:
        work.wait()
    assert got.tolist() == [other] * 2 and works[0].source_rank() == other  # global ranks
    pc.irecv(got, group=group, group_src=2 - rank)
    pc.send(torch.full((2,), 10.0 * rank), group=group, group_dst=2 - rank)
    pc.all_reduce_(torch.ones(1), "sum", group)
    y = pc.irecv_inplace(got, None, group=group, group_src=2 - rank)
    z = pc.isend_inplace(torch.full((2,), 20.0 * rank), other, group=group)
    assert (y + 0).tolist() == [20.0 * other] * 2 and (z + 0).tolist() == [20.0 * rank] * 2


def test_ranks_are_global_or_of_the_group():  # P11
    run_ranks(subgroups, 3, start_torch=True)
