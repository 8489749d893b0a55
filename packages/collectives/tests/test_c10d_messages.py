"""Messages between two ranks on the backend `phalanx`."""

import pytest
import torch
import torch.distributed as dist

from c10d_groups import join, run_groups


def pairs(rank, size):
    """As the first calls on the group: the ranks meet here."""
    x = torch.arange(4.0) + rank
    if rank == 0:
        dist.send(x, 1)
        dist.send(x * 2, 1, tag=7)
        dist.send(x * 3, 1, tag=3)
    elif rank == 1:
        got = torch.empty(4, 2)[:, 0]  # not contiguous
        assert dist.recv(got, 0, tag=3) == 0
        assert got.tolist() == [0, 3, 6, 9]
        dist.recv(got, 0, tag=7)
        assert got.tolist() == [0, 2, 4, 6]
        dist.recv(got, 0)
        assert got.tolist() == [0, 1, 2, 3]
    big = torch.full((1_000_000,), float(rank))  # larger than what is buffered
    right, left = (rank + 1) % size, (rank - 1) % size
    sent = dist.isend(big, right)
    got = torch.empty_like(big)
    dist.recv(got, left)
    sent.wait()
    assert (got == left).all()


def from_anybody(rank, size):
    if rank == 1:
        seen = set()
        for _ in range(2 * (size - 1)):
            got = torch.empty(2, dtype=torch.int64)
            source = dist.recv(got)
            assert got.tolist()[0] == source
            seen.add(tuple(got.tolist()))
        assert seen == {(r, i) for r in (0, 2) for i in (0, 1)}
        request = dist.irecv(torch.empty(1), tag=5)
        request.wait()
        assert request._source_rank() == 2
    else:
        for i in range(2):
            dist.send(torch.tensor([rank, i]), 1)
        if rank == 2:
            dist.send(torch.ones(1), 1, tag=5)


def batches(rank, size):  # P11
    right, left = (rank + 1) % size, (rank - 1) % size
    got = [torch.empty(n) for n in (3, 100_000, 2)]
    sent = [torch.full_like(each, float(10 * rank + i)) for i, each in enumerate(got)]
    receives = [dist.P2POp(dist.irecv, got[0], left), dist.P2POp(dist.irecv, got[1], left)]
    receives.append(dist.P2POp(dist.irecv, got[2], right, tag=4))
    sends = [dist.P2POp(dist.isend, sent[0], right), dist.P2POp(dist.isend, sent[1], right)]
    sends.append(dist.P2POp(dist.isend, sent[2], left, tag=4))
    order = [*receives, *sends] if rank % 2 else [*sends, *receives]
    for request in reversed(dist.batch_isend_irecv(order)):
        request.wait()
    for i, peer in ((0, left), (1, left), (2, right)):
        assert (got[i] == 10 * peer + i).all()


def in_any_order(rank, size):
    peer = 1 - rank
    got = [torch.empty(2) for _ in range(10)]
    receives = [dist.irecv(each, peer, tag=i) for i, each in enumerate(got)]
    futures = [receive.get_future() for receive in receives]
    sends = [dist.isend(torch.full((2,), float(i)), peer, tag=i) for i in reversed(range(10))]
    assert futures[9].wait()[0].tolist() == [9, 9]  # though the older ones may be pending
    for receive in receives:
        receive.wait()
    assert [each[0].item() for each in got] == list(range(10))
    del sends
    itself = torch.empty(3)
    dist.group.WORLD.send([torch.ones(3)], rank, 0)
    dist.group.WORLD.recv([itself], rank, 0).wait()
    assert itself.tolist() == [1, 1, 1]


def objects(rank, size):
    if rank == 0:
        dist.send_object_list(["a", {"b": 1}], 1)
    elif rank == 1:
        got = [None, None]
        assert dist.recv_object_list(got, 0) == 0
        assert got == ["a", {"b": 1}]


def between_collectives(rank, size):
    """A message may wait while collectives go on, also if the future of the message is older."""
    if rank == 0:
        got = torch.empty(1)
        future = dist.irecv(got, 1).get_future()
        total = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        assert total.wait()[0].item() == size
        assert future.wait()[0].item() == 5
    else:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size
        if rank == 1:
            dist.send(torch.tensor([5.0]), 0)


def everything(rank, size):
    join(rank, size)
    pairs(rank, size)
    dist.barrier()  # or a faster rank's next message is taken from anybody
    from_anybody(rank, size)
    dist.barrier()
    batches(rank, size)
    if rank < 2:
        in_any_order(rank, size)
        objects(rank, size)
    between_collectives(rank, size)
    for wrong in (lambda: dist.isend(torch.ones(1), 1, tag=-1), lambda: dist.group.WORLD.send([torch.ones(1)], 5, 0)):
        with pytest.raises(ValueError, match="send: .*(negative|not in the group)"):
            wrong()
    dist.barrier()
    dist.destroy_process_group()


def test_messages_arrive_where_they_belong():  # P11, P30
    run_groups(everything, 3, timeout=60)
