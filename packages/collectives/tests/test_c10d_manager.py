"""Torch's own coalescing manager on the backend `phalanx`."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from c10d_groups import join, run_groups

CPU = torch.device("cpu")


def calls_of(group):
    """How many collectives this rank has issued on the group."""
    counter = group._get_backend(CPU) if type(group) is dist.ProcessGroup else group
    return counter._get_sequence_number_for_group()


def one_call(rank, size):  # P4: what 64 tensors cost is one call of the core. benchmarks/coalescing.py has the times
    total = size * (size + 1) / 2
    for asynchronous in (False, True):
        before = calls_of(dist.group.WORLD)
        xs = [torch.full((n + 1,), rank + 1.0) for n in range(64)]
        with _coalescing_manager(async_ops=asynchronous) as manager:
            for x in xs:
                dist.all_reduce(x)
        if asynchronous:
            assert len(manager.works) == 1
            manager.wait()
        assert calls_of(dist.group.WORLD) == before + 1
        assert all((x == total).all() for x in xs)


class Counted:
    """Calls of a method of a class go through, and are counted."""

    def __init__(self, kind, name):
        self.count, self._method = 0, getattr(kind, name)
        self.patch = patch.object(kind, name, lambda *args: self(*args))

    def __call__(self, *args):
        self.count += 1
        return self._method(*args)


def with_device(rank, size):  # P6
    group = dist.new_group(list(range(size)))
    start, end = Counted(type(group), "_start_coalescing"), Counted(type(group), "_end_coalescing")
    with start.patch, end.patch:
        for asynchronous in (True, False):
            sent = torch.arange(2.0 * size) + 10 * rank
            a, b, c = torch.full((3,), float(rank)), torch.empty(2 * size), torch.full((2, 2), float(rank)).t()
            parts = [torch.empty(1) for _ in range(size)]
            with _coalescing_manager(group, device=CPU, async_ops=asynchronous) as manager:
                dist.broadcast(a, 1, group=group)
                works = [dist.all_to_all_single(b, sent, group=group, async_op=True)]
                dist.reduce(c, 0, dist.ReduceOp.MAX, group=group)  # not contiguous: copied back when it is complete
                dist.all_gather(parts, torch.tensor([float(rank)]), group=group)
                works.append(dist.isend(sent, (rank + 1) % size, group))
                works.append(dist.irecv(got := torch.empty(2 * size), (rank - 1) % size, group))
            if asynchronous:
                (work,) = manager.works
                assert isinstance(work, dist.Work)
                manager.wait()
                assert work.is_completed() and work.is_success() and work.exception() is None
            assert all(each.is_completed() for each in works)  # the one work waits for all of them
            assert a.tolist() == [1.0] * 3 and torch.equal(got, torch.arange(2.0 * size) + 10 * ((rank - 1) % size))
            assert b.tolist() == [10.0 * r + 2 * rank + i for r in range(size) for i in (0, 1)]
            assert rank or (c == size - 1).all()
            assert [part.item() for part in parts] == list(range(size))
        x, y = torch.ones(4), torch.full((4,), rank + 1.0)
        before = calls_of(group)
        with _coalescing_manager(group, device=CPU, async_ops=True) as manager:
            dist.all_reduce(x, group=group)  # of these torch makes one call at the end of the body
            dist.all_reduce(y, group=group)
        assert calls_of(group) == before + 1
        manager.wait()
        assert x.tolist() == [size] * 4 and y.tolist() == [size * (size + 1) / 2] * 4
        with _coalescing_manager(group, device=CPU, async_ops=True) as manager:
            pass
        manager.wait()
    assert (start.count, end.count) == (4, 4)
    kept = []
    try:
        with _coalescing_manager(group, device=CPU):
            kept.append(dist.broadcast(x, 0, group=group, async_op=True))
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    kept[0].wait()
    dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)  # which torch 2.13 leaves behind
    with _coalescing_manager(group, device=CPU, async_ops=True) as manager:
        dist.broadcast(z := torch.full((2,), float(rank)), 1, group=group)
    manager.wait()
    assert z.tolist() == [1.0, 1.0]  # the group is as good as before


def everything(rank, size):
    join(rank, size)
    one_call(rank, size)
    with_device(rank, size)
    dist.destroy_process_group()


def test_a_body_is_one_call_and_one_work():  # P4, P6
    run_groups(everything, 2)
