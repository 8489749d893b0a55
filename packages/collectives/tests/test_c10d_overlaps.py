"""Tensors that share memory, in one call on the backend `phalanx`: inputs are read before anything is written.

What then has one meaning works, and what has none is refused before anything is sent.
"""

import pytest
import torch
import torch.distributed as dist

from c10d_groups import join, run_groups

OPTIONS = torch._C._distributed_c10d


def order_of_lists(rank, size):
    join(rank, size)
    for count in (1, size, size + 1):
        inputs = [torch.full((2, i + 1), 10.0 * rank + i) for i in range(count)]
        outputs = [[torch.zeros(2, i + 1) for i in range(count)] for _ in range(size)]
        work = dist.all_gather_coalesced(outputs, inputs, async_op=True)
        work.wait()
        for r in range(size):
            for i in range(count):
                assert torch.equal(outputs[r][i], torch.full((2, i + 1), 10.0 * r + i)), (count, r, i)
    with pytest.raises(ValueError, match=f"{size} lists of outputs are needed, one for each rank, not {size + 1}"):
        dist.all_gather_coalesced([[torch.zeros(1)] for _ in range(size + 1)], [torch.zeros(1)])
    with pytest.raises(ValueError, match="1 tensors for 2 inputs|1 outputs for 2 inputs"):
        dist.all_gather_coalesced([[torch.zeros(1)] for _ in range(size)], [torch.zeros(1)] * 2)
    dist.barrier()


def test_all_gather_coalesced_has_a_list_of_outputs_for_each_rank():
    run_groups(order_of_lists, 3)


def repeated(rank, size):
    join(rank, size)
    total = size * (size + 1) / 2
    for is_async in (False, True):
        t, alone = torch.full((6,), rank + 1.0), torch.full((2,), rank + 1.0)
        lists = [[t, alone, t], [t[:4], alone, t[2:]], [t[::2], t], [t.view(2, 3), t]]
        for tensors in lists:
            t.fill_(rank + 1.0)
            alone.fill_(rank + 1.0)
            work = dist.all_reduce_coalesced(tensors, async_op=is_async)
            if is_async:
                work.wait()
            assert t.tolist() == [total if any(x.numel() > 3 for x in tensors) else rank + 1] * 6, tensors
            assert alone.tolist() == [total if len(tensors) == 3 else rank + 1] * 2
    group, given = dist.group.WORLD, torch.full((2,), float(rank))
    many = torch.zeros(2 * size)
    group.allgather_into_tensor_coalesced([many, many], [given, given], OPTIONS.AllgatherOptions()).wait()
    assert many.tolist() == [r for r in range(size) for _ in range(2)]
    one = torch.zeros(2)
    group.reduce_scatter_tensor_coalesced([one, one], [many, many], OPTIONS.ReduceScatterOptions()).wait()
    assert one.tolist() == [float(size * rank)] * 2
    # What one call writes, another reads: it reads what was there before.
    a, b = torch.full((2,), float(rank)), torch.zeros(2 * size + 2)
    group.allgather_into_tensor_coalesced([b[2:], many], [b[:2], a], OPTIONS.AllgatherOptions()).wait()
    assert b.tolist() == [0] * (2 * size + 2) and many.tolist() == [r for r in range(size) for _ in range(2)]
    c = torch.full((2 * size,), float(rank))
    group.allgather_into_tensor_coalesced([b[2:], c], [c[:2], a], OPTIONS.AllgatherOptions()).wait()
    assert b[2:].tolist() == c.tolist() == [r for r in range(size) for _ in range(2)]


def test_one_tensor_may_come_twice_in_a_coalesced_call():
    run_groups(repeated, 3)


def in_place(rank, size):
    join(rank, size)
    numbers = torch.arange(2.0 * size)
    b = numbers + 100 * rank
    dist.all_to_all_single(b, b)
    assert b.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
    b = numbers.clone() + 100 * rank
    blocks = list(b.chunk(size))
    dist.all_to_all(blocks, blocks)
    assert b.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
    whole = torch.cat([numbers + 100 * rank, torch.zeros(1)])
    dist.all_to_all_single(whole[1:], whole[:-1])  # not the same memory, but most of it
    assert whole[1:].tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]


def test_an_exchange_may_write_where_it_reads():
    run_groups(in_place, 3)


def ambiguous(rank, size):
    join(rank, size)
    t, x = torch.zeros(4), torch.full((2,), float(rank))
    group, gather = dist.group.WORLD, OPTIONS.AllgatherOptions()
    calls = [
        lambda: dist.all_gather([x.clone()] * size, x),
        lambda: dist.all_gather([t[r : r + 2] for r in range(size)], x),
        lambda: dist.all_gather(list(t.unfold(0, 2, 1))[:size], x),
        lambda: dist.all_to_all([t[:2]] * size, [x] * size),
        lambda: dist.all_gather_coalesced([[t[:2]] for _ in range(size)], [x]),
        lambda: dist.all_gather_coalesced([[t[:2], t[2:]], [t[:2], t[2:]]], [x, x]),
        lambda: group.allreduce_coalesced([t, t.view(torch.int32)], OPTIONS.AllreduceCoalescedOptions()),
        lambda: group.allgather_into_tensor_coalesced([t, t], [x, x.clone()], gather),
        lambda: group.reduce_scatter_tensor_coalesced([x, x], [t, t.clone()], OPTIONS.ReduceScatterOptions()),
        lambda: dist.all_reduce(torch.zeros(1).expand(4)),
        lambda: dist.all_gather_into_tensor(torch.zeros(1).expand(2 * size), x),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="unsupported operation: more than one element of the written-to tensor"):
            call()
    assert t.tolist() == [0] * 4
    dist.barrier()  # nothing was sent
    columns = torch.zeros(2, size)  # these lie among each other, and share nothing
    dist.all_gather([columns[:, r] for r in range(size)], x)
    assert columns.tolist() == [list(range(size))] * 2
    wide = torch.ones(1).expand(4) if rank == 0 else torch.zeros(4)  # the root only reads
    dist.broadcast(wide, 0)
    assert wide.tolist() == [1] * 4


def test_overlaps_with_no_one_meaning_are_refused_in_the_words_of_torch():
    run_groups(ambiguous, 2)
