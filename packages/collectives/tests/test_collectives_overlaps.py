"""Tensors that share memory, in one functional collective: what has one meaning works, and the rest is refused."""

import pytest
import torch
import torch.distributed as dist

from c10d_groups import join, run_groups
from phalanx.core import InvalidArgumentError

SHARED = "unsupported operation: more than one element of the written-to tensor"


def functional(rank, size):
    import phalanx.collectives as pc

    join(rank, size)
    total = size * (size + 1) / 2
    name, t, alone = dist.group.WORLD.group_name, torch.zeros(6), torch.zeros(2)
    for tensors in ([t, t], [t, alone, t], [t[:4], alone, t[2:]], [t[::2], t], [t.view(2, 3), t]):
        t.fill_(rank + 1.0)
        alone.fill_(rank + 1.0)
        torch.ops.phalanx.all_reduce_coalesced_(tensors, "sum", name)
        assert t.tolist() == [total] * 6, tensors
        assert alone.tolist() == [total if len(tensors) == 3 else rank + 1] * 2
    refused = [  # by now the ranks have met: before, torch.distributed serves the op
        lambda: torch.ops.phalanx.all_reduce_coalesced_([t, t.view(torch.int32)], "sum", name),
        lambda: torch.ops.phalanx.all_reduce_coalesced_([alone, torch.zeros(1).expand(3)], "sum", name),
        lambda: torch.ops.phalanx.all_reduce_(torch.zeros(1).expand(3), "sum", name),
        lambda: torch.ops.phalanx.broadcast_(torch.zeros(1).expand(3), 0, name),
    ]
    for call in refused:
        with pytest.raises((RuntimeError, ValueError), match=SHARED):
            call()
    for call in (lambda: pc.all_reduce_(torch.zeros(1).expand(3), "sum", dist.group.WORLD),):
        with pytest.raises(InvalidArgumentError, match=SHARED):
            call()
    pc.all_reduce_(t.fill_(1.0), "sum", dist.group.WORLD)  # nothing was sent
    assert t.tolist() == [size] * 6


def test_functional_collectives_write_shared_memory_where_that_has_one_meaning():
    run_groups(functional, 2)


def managed(rank, size):
    join(rank, size)
    total = size * (size + 1) / 2
    t = torch.full((4,), rank + 1.0)
    with dist._coalescing_manager():
        dist.all_reduce(t)
        dist.all_reduce(t)
    assert t.tolist() == [total] * 4
    x, out = torch.full((2,), float(rank)), torch.zeros(2 * size)
    with dist._coalescing_manager():
        dist.all_gather_single(out, x)
        dist.all_gather_single(out, x)
    assert out.tolist() == [r for r in range(size) for _ in range(2)]

    def ambiguous():
        with dist._coalescing_manager():
            dist.all_gather_single(out, x)
            dist.all_gather_single(out, x.clone())

    with pytest.raises(RuntimeError, match=SHARED):
        ambiguous()


def test_a_coalescing_manager_of_torch_takes_one_tensor_twice():
    run_groups(managed, 2)


def short(rank, size):
    join(rank, size)
    group, x = dist.group.WORLD, torch.full((2,), rank + 1.0)
    outs = [torch.zeros(2) for _ in range(size)]
    group.allgather(outs, x).wait()
    assert [out.tolist() for out in outs] == [[r + 1.0] * 2 for r in range(size)]
    one = torch.zeros(2)
    group.scatter(one, outs if rank == 0 else [], 0).wait()
    assert one.tolist() == [rank + 1.0] * 2
    group.reduce_scatter(one, [x] * size).wait()
    assert one.tolist() == [size * (size + 1) / 2] * 2
    group.gather(outs if rank == 0 else [], x, 0).wait()
    group.broadcast(one.fill_(rank), 1).wait()
    assert one.tolist() == [1] * 2
    group.reduce(one, 0).wait()
    assert one.tolist() == [size if rank == 0 else 1] * 2
    group.allreduce(one.fill_(1)).wait()
    assert one.tolist() == [size] * 2


def test_methods_of_a_process_group_have_forms_without_options():
    run_groups(short, 2)
