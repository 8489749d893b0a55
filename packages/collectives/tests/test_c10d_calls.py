"""Every collective of torch.distributed on the backend `phalanx`, against closed forms."""

import pytest
import torch
import torch.distributed as dist

from c10d_groups import join, run_groups

ALL_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
)


def equal(got, wanted):
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    assert torch.equal(got.to(torch.complex128), wanted.to(torch.complex128)), (got, wanted)


def every_dtype(rank, size):
    for dtype in ALL_DTYPES:
        x = torch.tensor([rank, 1, 0, 1]).to(dtype)
        dist.all_reduce(x)
        total = torch.tensor([3, size, 0, size])
        equal(x, (total > 0).to(dtype) if dtype == torch.bool else total.to(dtype))
        parts = [torch.empty(2, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, torch.tensor([rank, 1]).to(dtype))
        for r, part in enumerate(parts):
            equal(part, torch.tensor([r, 1]).to(dtype))
    moved = torch.full((3,), rank + 1.0).to(torch.float8_e4m3fnuz)  # which the core has not got
    dist.broadcast(moved, 2)
    assert moved.float().tolist() == [3, 3, 3]
    with pytest.raises(NotImplementedError, match="does not reduce"):
        dist.all_reduce(moved)


def every_reduction(rank, size):
    op = dist.ReduceOp
    for reduce_op, wanted in ((op.SUM, 9), (op.PRODUCT, 24), (op.MIN, 2), (op.MAX, 4), (op.AVG, 3)):
        x = torch.full((5,), float(rank + 2))
        dist.all_reduce(x, reduce_op)
        assert x.tolist() == [wanted] * 5
        y = torch.full((2,), rank + 2)
        dist.reduce(y, 1, reduce_op)
        assert y.tolist() == [wanted if rank == 1 else rank + 2] * 2
    for reduce_op, wanted in ((op.BAND, 8), (op.BOR, 15), (op.BXOR, 15)):
        x = torch.tensor([8 | 1 << rank])
        dist.all_reduce(x, reduce_op)
        assert x.item() == wanted
    premul = dist._make_nccl_premul_sum(0.5)
    x = torch.full((3,), float(rank))
    dist.all_reduce(x, premul)
    assert x.tolist() == [1.5] * 3
    out = torch.empty(1)
    dist.reduce_scatter_tensor(out, torch.arange(3.0), dist._make_nccl_premul_sum(torch.tensor(2.0)))
    assert out.item() == 2 * 3 * rank
    with pytest.raises((ValueError, NotImplementedError)):
        dist.all_reduce(torch.ones(1), op.BAND)
    dist.all_reduce(x)  # nothing was sent


def lists(rank, size):
    me = torch.full((2, 2), float(rank))
    parts = [torch.empty(2, 2) for _ in range(size)]
    dist.all_gather(parts, me)
    assert [part[0, 0].item() for part in parts] == [0, 1, 2]
    uneven = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [part.tolist() for part in uneven] == [[0], [1, 1], [2, 2, 2]]
    whole = torch.empty(size * 2, 2)  # blocks of one tensor: no staging
    dist.all_gather(list(whole.chunk(size)), me)
    assert whole[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    gathered = [torch.empty(2, 2) for _ in range(size)] if rank == 2 else None
    dist.gather(me, gathered, 2)
    if rank == 2:
        assert [part[1, 1].item() for part in gathered] == [0, 1, 2]
    mine = torch.empty(3)
    dist.scatter(mine, [torch.full((3,), 10.0 + r) for r in range(size)] if rank == 0 else None, 0)
    assert mine.tolist() == [10.0 + rank] * 3
    out = torch.empty(rank + 1)
    dist.reduce_scatter(out, [torch.full((r + 1,), float(rank + r)) for r in range(size)])
    assert out.tolist() == [3.0 + 3 * rank] * (rank + 1)
    even = torch.empty(2)
    dist.reduce_scatter(even, [torch.tensor([float(rank), float(r)]) for r in range(size)], dist.ReduceOp.MAX)
    assert even.tolist() == [2.0, float(rank)]
    sent = [torch.full((rank + 2 * r,), rank * 10 + r) for r in range(size)]
    got = [torch.empty(r + 2 * rank, dtype=torch.int64) for r in range(size)]
    dist.all_to_all(got, sent)
    assert [part.tolist() for part in got] == [[r * 10 + rank] * (r + 2 * rank) for r in range(size)]


def single(rank, size):
    whole = torch.empty(size * 2)
    dist.all_gather_into_tensor(whole, torch.tensor([rank, rank + 0.5]))
    assert whole.tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    whole.zero_()
    whole[2 * rank : 2 * rank + 2] = rank  # in place: the input is a part of the output
    dist.all_gather_into_tensor(whole, whole[2 * rank : 2 * rank + 2])
    assert whole.tolist() == [0, 0, 1, 1, 2, 2]
    stacked = torch.empty(size, 2)
    dist.all_gather_into_tensor(stacked, torch.full((2,), float(rank)))
    assert stacked[:, 1].tolist() == [0, 1, 2]
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(6.0) + rank)
    assert part.tolist() == [6.0 * rank + 3, 6.0 * rank + 6]
    out = torch.empty(3, 2)
    dist.all_to_all_single(out, torch.arange(6.0).view(3, 2) + 10 * rank)
    assert out.tolist() == [[10 * r + 2 * rank, 10 * r + 2 * rank + 1] for r in range(size)]
    splits = [(rank + r) % 3 for r in range(size)]  # symmetric, with zeros
    sent = torch.cat([torch.full((n, 2), float(10 * rank + r)) for r, n in enumerate(splits)])
    got = torch.empty(3, 2)
    dist.all_to_all_single(got, sent, splits, splits)
    wanted = torch.cat([torch.full((n, 2), float(10 * r + rank)) for r, n in enumerate(splits)])
    assert torch.equal(got, wanted)
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather_into_tensor(torch.empty(0), empty)
    big = torch.full((3_000_001,), float(rank + 1))
    dist.all_reduce(big)
    assert (big == 6).all()


def layouts(rank, size):
    base = torch.full((4, 6), float(rank))
    x = base.t()[1:4]
    dist.all_reduce(x)
    assert (x == 3).all() and (base[:, 0] == rank).all() and (base[:, 4:] == rank).all()
    y = torch.full((3, 2), rank * (1 + 2j)).t()
    dist.broadcast(y, 1)
    assert (y == 1 + 2j).all()
    parts = [torch.zeros(2, 3).t() for _ in range(size)]
    dist.all_gather(parts, torch.full((2, 3), float(rank)).t())
    assert all((part == r).all() for r, part in enumerate(parts))
    image = torch.full((1, 2, 3, 3), float(rank)).to(memory_format=torch.channels_last)
    dist.reduce(image, 0)
    assert (image == (3 if rank == 0 else rank)).all()
    parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)).t())
    with torch.no_grad():
        dist.broadcast(parameter, 2)
    assert (parameter == 2).all()


def objects(rank, size):
    told = [None] * size
    dist.all_gather_object(told, {"rank": rank, "text": "x" * rank * 1000})
    assert [each["rank"] for each in told] == [0, 1, 2] and len(told[2]["text"]) == 2000
    two = [("a", rank), [rank] * rank]
    dist.broadcast_object_list(two, 1)
    assert two == [("a", 1), [1]]
    gathered = [None] * size if rank == 2 else None
    dist.gather_object(rank * "z", gathered, 2)
    assert gathered == (["", "z", "zz"] if rank == 2 else None)
    got = [None]
    dist.scatter_object_list(got, [10, "eleven", None] if rank == 0 else None, 0)
    assert got == [[10, "eleven", None][rank]]


def several(rank, size):
    a, b = torch.full((3,), float(rank)), torch.full((2,), rank, dtype=torch.int32)
    options = dist.distributed_c10d.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.MAX
    dist.group.WORLD.allreduce_coalesced([a, b], options).wait()  # P8: mixed dtypes
    assert a.tolist() == [2.0] * 3 and b.tolist() == [2, 2]
    with dist._coalescing_manager():  # P1, P3
        xs = [torch.full((n,), float(rank)) for n in (1, 5, 1000)]
        for x in xs:
            dist.all_reduce(x)
    assert all((x == 3).all() for x in xs)
    with dist._coalescing_manager(async_ops=True) as manager:  # P2
        outs = [torch.empty(size * n) for n in (1, 4)]
        for n, out in zip((1, 4), outs, strict=True):
            dist.all_gather_into_tensor(out, torch.full((n,), float(rank)))
    manager.wait()
    assert outs[0].tolist() == [0, 1, 2] and outs[1][::4].tolist() == [0, 1, 2]
    with dist._coalescing_manager():
        parts = [torch.empty(n) for n in (1, 2)]
        for n, part in zip((1, 2), parts, strict=True):
            dist.reduce_scatter_tensor(part, torch.arange(3.0 * n))
    assert parts[0].tolist() == [3.0 * rank] and parts[1].tolist() == [6.0 * rank, 6.0 * rank + 3]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:  # P6
        y, z = torch.full((2,), float(rank)), torch.full((3,), rank)
        dist.broadcast(y, 1)
        dist.all_to_all_single(z, torch.arange(3) + 10 * rank)
    manager.wait()
    assert y.tolist() == [1, 1] and z.tolist() == [rank, 10 + rank, 20 + rank]
    lists = [[torch.empty(2), torch.empty(1)] for _ in range(size)]
    dist.group.WORLD.allgather_coalesced(lists, [torch.full((2,), float(rank)), torch.tensor([rank + 0.5])]).wait()
    assert [each[0].tolist() for each in lists] == [[0, 0], [1, 1], [2, 2]]
    assert [each[1].item() for each in lists] == [0.5, 1.5, 2.5]
    sparse = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (5,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1, 1, 1, 6, 0]


def asynchronous(rank, size):
    xs = [torch.full((n,), float(rank + n)) for n in (1, 10_000, 3, 500_000)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for x, work in reversed(list(zip(xs, works, strict=True))):
        assert work.wait() is True
        assert work.is_completed() and work.is_success() and work.exception() is None
        assert (x == 3 + 3 * x.numel()).all()
    t = torch.full((4, 2), float(rank)).t()  # what is copied back is there when the work is complete
    future = dist.broadcast(t, 1, async_op=True).get_future()  # P18; the work itself is dropped
    assert future.wait()[0] is not None and (t == 1).all()
    chained = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert chained.wait().tolist() == [6.0] * 3
    for i in range(100):  # dropped works still happen
        dist.all_reduce(torch.full((100,), float(i)), async_op=True)
    barrier = dist.barrier(async_op=True)
    barrier.wait()
    done = [dist.all_reduce(torch.ones(2), async_op=True).get_future() for _ in range(20)]
    torch.futures.wait_all(done)
    assert all(each.value()[0].tolist() == [3, 3] for each in done)
    polled = dist.all_gather_into_tensor(torch.empty(3), torch.ones(1), async_op=True)
    while not polled.is_completed():
        pass
    assert polled.result()[0].tolist() == [1, 1, 1]


def wrong_arguments(rank, size):
    for call in (
        lambda: dist.all_gather_into_tensor(torch.empty(4), torch.ones(2)),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(5)),
        lambda: dist.all_gather([torch.empty(1)], torch.ones(1)),
        lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 1, 2], [1, 1, 1]),
        lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4)),
        lambda: dist.group.WORLD.broadcast([torch.ones(1), torch.ones(1)], dist.BroadcastOptions()),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            call()
    x = torch.ones(1)
    dist.all_reduce(x)  # nothing was sent
    assert x.item() == size


def everything(rank, size):
    join(rank, size)
    for part in (every_dtype, every_reduction, lists, single, layouts, objects, several, asynchronous, wrong_arguments):
        part(rank, size)
        dist.barrier()
    sub = dist.new_group([0, 2])
    if rank != 1:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=sub)
        dist.broadcast(x, 2, group=sub)
        assert x.item() == 2
    dist.destroy_process_group()


def test_every_collective_gives_what_its_definition_says():  # P1 to P6, P15, P18, P30
    run_groups(everything, 3, timeout=120)
