"""The backend `phalanx` on tensors of GPUs: on the device of the tests where there is none."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

import fake_torch_cuda
from c10d_groups import join, run_groups
from ranks import scratch

pytestmark = pytest.mark.usefixtures("_device")


@pytest.fixture(scope="module")
def _device():
    fake_torch_cuda.needs_cuda()


def on_gpu(rank, size, backend="cpu:phalanx,cuda:phalanx"):
    """Inside a rank: the device, and the default process group."""
    fake_torch_cuda.load()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    join(rank, size, backend=backend)


def gpu(*args):
    return torch.tensor(*args, device="cuda")


def same(got, wanted):
    assert got.is_cuda and got.dtype == wanted.dtype and torch.equal(got.cpu(), wanted), (got.cpu(), wanted)


def drawn(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def as_on_the_cpu(rank, size):
    """Every collective twice, on the CPU and on the GPU: the same bits."""
    on_gpu(rank, size)
    op = dist.ReduceOp
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8):
        for reduction in (op.SUM, op.AVG, op.PRODUCT, op.MIN, op.MAX):
            for shape in ((5,), (1000, 7)):
                host = drawn(rank, shape, dtype)
                device = host.cuda()
                dist.all_reduce(host, reduction)
                dist.all_reduce(device, reduction)
                same(device, host)
    x = [drawn(each, (4, 3), torch.float32) for each in range(size)]
    mine = x[rank].cuda()
    parts = [torch.empty(4, 3, device="cuda") for _ in range(size)]
    dist.all_gather(parts, mine)
    for each, part in zip(x, parts, strict=True):
        same(part, each)
    uneven = [torch.empty(each + 1, device="cuda") for each in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank), device="cuda"))
    assert [part.tolist() for part in uneven] == [[float(each)] * (each + 1) for each in range(size)]
    whole = torch.empty(4 * size, 3, device="cuda")
    dist.all_gather_into_tensor(whole, mine)
    same(whole, torch.cat(x))
    for root in range(size):
        y = mine.clone()
        dist.broadcast(y, root)
        same(y, x[root])
        y = mine.clone()
        dist.reduce(y, root)
        same(y, sum(x[1:], x[0]) if rank == root else x[rank])
    gathered = [torch.empty(4, 3, device="cuda") for _ in range(size)] if rank == size - 1 else None
    dist.gather(mine, gathered, size - 1)
    if gathered is not None:
        same(torch.cat(gathered), torch.cat(x))
    got = torch.empty(4, 3, device="cuda")
    dist.scatter(got, [(each + 1).cuda() for each in x] if rank == 0 else None, 0)
    same(got, x[rank] + 1)
    host, device = torch.empty(2, 3), torch.empty(2, 3, device="cuda")
    given = drawn(rank, (2 * size, 3), torch.float32)
    dist.reduce_scatter_tensor(host, given)
    dist.reduce_scatter_tensor(device, given.cuda())
    same(device, host)
    dist.reduce_scatter(device, [each.cuda() for each in given.chunk(size)], op.MAX)
    dist.reduce_scatter(host, list(given.chunk(size)), op.MAX)
    same(device, host)
    sent = torch.arange(size, device="cuda") + 100 * rank
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    assert got.tolist() == [rank + 100 * each for each in range(size)]
    splits = [each + 1 for each in range(size)]
    sent = torch.full((sum(splits),), float(rank), device="cuda")
    got = torch.empty(size * (rank + 1), device="cuda")
    dist.all_to_all_single(got, sent, [rank + 1] * size, splits)
    assert got.tolist() == [float(each) for each in range(size) for _ in range(rank + 1)]
    lists = [gpu([float(10 * rank + each)]) for each in range(size)]
    taken = [torch.empty(1, device="cuda") for _ in range(size)]
    dist.all_to_all(taken, lists)
    assert [each.item() for each in taken] == [10.0 * each + rank for each in range(size)]
    dist.destroy_process_group()


def test_every_collective_on_a_gpu_gives_the_bits_of_the_cpu():  # P13
    run_groups(as_on_the_cpu, 2, timeout=120)


def odd_tensors(rank, size):
    """Strided, overlapping and empty ones, several devices, and what is refused."""
    on_gpu(rank, size)
    x = torch.full((4, 6), rank + 1.0, device="cuda")
    view = x.t()[::2]
    dist.all_reduce(view)
    assert x[:, 0].tolist() == [3.0] * 4 and x[:, 1].tolist() == [rank + 1.0] * 4
    out = torch.full((2 * size,), 7.0, device="cuda")
    out[2 * rank + 1] = rank
    dist.all_gather_into_tensor(out, out[2 * rank : 2 * rank + 2])  # in place
    assert out.tolist() == [each for other in range(size) for each in (7.0, other)]
    shifted = torch.arange(2.0 * size + 1, device="cuda")
    dist.reduce_scatter_tensor(shifted[1:3], shifted[: 2 * size])  # what it writes overlaps what it reads
    assert shifted[1:3].tolist() == [2.0 * 2 * rank, 2.0 * (2 * rank + 1)]
    dist.all_reduce(torch.empty(0, device="cuda"))
    with pytest.raises(ValueError, match=r"tensors on .* and .* in one collective"):
        dist.all_gather_into_tensor(torch.empty(2 * size, device="cuda"), torch.ones(2))
    y = torch.ones(2)
    dist.all_reduce(y)  # nothing was sent before
    assert y.tolist() == [2.0, 2.0]
    dist.destroy_process_group()


def test_tensors_of_a_gpu_may_have_strides_and_overlap():
    run_groups(odd_tensors, 2)


def works(rank, size):
    on_gpu(rank, size)
    side = torch.cuda.Stream()
    x = torch.full((1000,), rank + 1.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work = dist.all_reduce(x, async_op=True)
    assert work.wait() is True  # the current stream waits for the other one
    y = x + 1
    assert y.tolist() == [4.0] * 1000
    torch.cuda.synchronize()
    assert work.is_completed() and work.is_success() and work.result()[0] is not None
    with torch.cuda.stream(side):
        work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda done: [2 * each for each in done.value()]).wait()
    assert doubled[0].tolist() == [12.0] * 1000
    with dist._coalescing_manager(async_ops=True) as manager:
        for part in x.chunk(3):
            dist.all_reduce(part)
    manager.wait()
    assert x.tolist() == [12.0] * 1000
    a, b = torch.ones(3, device="cuda"), torch.ones(5, device="cuda")
    dist.all_reduce_coalesced([a, b])
    assert a.tolist() == [2.0] * 3 and b.tolist() == [2.0] * 5
    dist.barrier(device_ids=[torch.cuda.current_device()])
    del work, manager
    dist.destroy_process_group()
    torch.cuda.empty_cache()


def test_works_make_streams_wait_and_futures_know_their_stream():
    run_groups(works, 2)


def alone(rank, size):
    """Only the GPU is served by it: objects, barriers and all go over the GPU."""
    on_gpu(rank, size, backend="cuda:phalanx")
    every = [None] * size
    dist.all_gather_object(every, {"rank": rank})
    assert every == [{"rank": each} for each in range(size)]
    dist.barrier()
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    assert x.tolist() == [float(size)] * 4
    with pytest.raises(RuntimeError, match="cpu"):
        dist.all_reduce(torch.ones(1))
    group = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(x, group=group)
    assert x.tolist() == [float(size)] * 4
    dist.destroy_process_group()


def test_a_group_may_be_of_gpus_alone():  # P13
    run_groups(alone, 2)


def captured(rank, size):
    on_gpu(rank, size)
    x = torch.zeros(8, device="cuda")
    dist.all_reduce(x)  # what the group needs on the GPU is made now
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        dist.all_reduce(x)
    torch.cuda.synchronize()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [14.0] * 8  # 2, 6, 14
    del graph
    dist.destroy_process_group()


def test_collectives_can_be_captured_and_replayed():
    run_groups(captured, 2)


def trained(rank, size):
    on_gpu(rank, size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    weights = [each.detach().clone() for each in model.parameters()]
    wrapped = torch.nn.parallel.DistributedDataParallel(model.cuda())
    x = torch.randn(size, 6, 8, generator=torch.Generator().manual_seed(1))
    wrapped(x[rank].cuda()).square().sum().backward()
    alone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    with torch.no_grad():
        for to, source in zip(alone.parameters(), weights, strict=True):
            to.copy_(source)
    (alone(x.view(-1, 8)).square().sum() / size).backward()
    for ours, one in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), one.grad)
    dist.destroy_process_group()


def test_ddp_trains_on_gpus():
    run_groups(trained, 2)


def sharded(rank, size):
    on_gpu(rank, size)
    if not fake_torch_cuda.is_real():  # a torch without CUDA cannot resize storages of GPUs: their memory is kept
        _fsdp_param.free_storage = lambda tensor: None
    mesh = init_device_mesh("cuda", (size,))

    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    plain, model = net(), net().cuda()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    one, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    x = torch.randn(size, 6, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model(x[rank].cuda()).square().mean().backward()
        one.step()
        one.zero_grad()
        for each in x:
            (plain(each).square().mean() / size).backward()
        other.step()
        other.zero_grad()
    for ours, alone in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor().cpu(), alone)
    dist.destroy_process_group()


def test_fsdp_trains_on_gpus():
    run_groups(sharded, 2)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def different(rank, size):
    on_gpu(rank, size)
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    with pytest.raises(dist.DistBackendError) as caught:
        call_for_ever(dist.all_reduce if rank == 0 else lambda y: dist.broadcast(y, 0), x)
    torch.cuda.synchronize()  # the GPU can be used
    assert (torch.ones(3, device="cuda") + 1).tolist() == [2.0] * 3
    dist.destroy_process_group()
    return str(caught.value)


def call_for_ever(call, x):
    while True:
        call(x)
        torch.cuda.synchronize()


def test_ranks_that_make_different_calls_are_told_so():
    for text in run_groups(different, 2):
        assert "all_reduce" in text and ("broadcast" in text or "revoked" in text), text


def dies(rank, size):
    on_gpu(rank, size)
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        (scratch() / "dying").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError) as caught:
        call_for_ever(dist.all_reduce, x)
    assert (torch.ones(3, device="cuda") + 1).tolist() == [2.0] * 3
    dist.destroy_process_group()
    return str(caught.value)


def test_the_death_of_a_rank_ends_what_streams_wait_for_and_is_named_by_the_next_call():
    found = run_groups(dies, 2, expect_exit={1: -signal.SIGKILL})
    assert "rank 1" in found[0] and "died" in found[0], found
