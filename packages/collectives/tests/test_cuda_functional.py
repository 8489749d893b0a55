"""Functional collectives on tensors of GPUs: on the device of the tests where there is none."""

import gc
import logging
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import fake_torch_cuda
import phalanx.collectives as pc
from phalanx.collectives import _registry, _transport
from phalanx.core import MismatchError, PhalanxError, RevokedError, UnsupportedError
from ranks import run_ranks, scratch

pytestmark = pytest.mark.usefixtures("_device")


@pytest.fixture(scope="module")
def _device():
    fake_torch_cuda.needs_cuda()


def on_gpu(rank, size, seconds=60):
    """Inside a rank: the device, and the default process group, whose own backend is of no use for it."""
    fake_torch_cuda.load()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    address, limit = f"file://{scratch()}/c10d", timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=limit)
    return dist.group.WORLD


def drawn(rank, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def alike(call, *tensors):
    """What a call gives for tensors of the GPU, which must be what it gives for those of the CPU."""
    given = [each.cuda() for each in tensors]
    wanted, got = call(*tensors), call(*given)
    for mine, theirs in zip(given, tensors, strict=True):
        assert torch.equal(mine.cpu(), theirs)  # inputs stay as they are
    listed = isinstance(wanted, (list, tuple))
    for one, other in zip(wanted if listed else [wanted], got if listed else [got], strict=True):
        assert other.is_cuda and other.dtype == one.dtype and other.shape == one.shape
        assert torch.equal((other + 0).cpu(), one + 0)


def values(rank, size):
    group = on_gpu(rank, size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8):
        for reduction in ("sum", "avg", "product", "MIN", "max"):
            for shape in ((), (5,), (300, 7)):
                alike(lambda x, r=reduction: pc.all_reduce(x, r, group), drawn(rank, shape, dtype))
        alike(lambda x: pc.reduce_scatter_tensor(x, "sum", 0, group), drawn(rank, (2 * size, 3), dtype))
        alike(lambda x: pc.all_gather_tensor(x, 0, group), drawn(rank, (4, 3), dtype))
    assert _registry.state_of(group).on_gpus
    alike(lambda x: pc.reduce_scatter_tensor(x, "avg", 1, group), drawn(rank, (3, 2 * size)))
    alike(lambda x: pc.all_gather_tensor(x, 1, group), drawn(rank, (4, 3)))
    alike(lambda x: pc.all_reduce(x.t()[::2], "sum", group), drawn(rank, (4, 6)))
    alike(lambda x: pc.all_gather_tensor(x, 0, group), drawn(rank, ()))
    for source in range(size):
        alike(lambda x, s=source: pc.broadcast(x, s, group), drawn(rank, (5, 2)))
    alike(lambda x: pc.all_to_all_single(x, None, None, group), drawn(rank, (2 * size, 3)))
    splits = [each + 1 for each in range(size)]
    alike(lambda x: pc.all_to_all_single(x, [rank + 1] * size, splits, group), drawn(rank, (sum(splits), 2)))
    alike(lambda x: pc.permute_tensor(x, [*range(1, size), 0], group), drawn(rank, (3, 2)))
    alike(lambda x, y: pc.all_reduce_coalesced([x, y], "sum", group), drawn(rank, (3,)), drawn(rank, (2, 2)))
    alike(lambda x, y: pc.all_gather_into_tensor_coalesced([x, y], group), drawn(rank, (3,)), drawn(rank, (2, 2)))
    alike(
        lambda x, y: pc.reduce_scatter_tensor_coalesced([x, y], "sum", [0, 1], group),
        drawn(rank, (2 * size,)),
        drawn(rank, (3, size)),
    )
    dist.destroy_process_group()


def test_results_on_a_gpu_have_the_bits_of_the_cpu():
    run_ranks(values, 2, timeout=120)


def forms(rank, size):
    group = on_gpu(rank, size)
    total = float(sum(range(1, size + 1)))
    x = torch.full((4,), rank + 1.0, device="cuda")
    assert pc.wait_tensor(pc.all_reduce_(x, "sum", group)).tolist() == [total] * 4
    assert pc.wait_tensor(x) is x  # nothing is pending on it
    y = torch.full((4,), rank + 1.0, device="cuda")
    pc.broadcast_(y, 1, group)
    assert y.tolist() == [2.0] * 4
    out = torch.empty(2 * size, device="cuda")
    name = group.group_name
    torch.ops.phalanx.all_gather_into_tensor_out(torch.full((2,), float(rank), device="cuda"), size, name, out=out)
    assert out.tolist() == [float(each) for each in range(size) for _ in range(2)]
    part = torch.empty(2, device="cuda")
    torch.ops.phalanx.reduce_scatter_tensor_out(torch.arange(2.0 * size, device="cuda"), "sum", size, name, out=part)
    assert part.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
    assert torch.ops.phalanx.blocking_all_reduce(torch.ones(3, device="cuda"), "sum", name).tolist() == [size] * 3
    z = torch.ones(3, device="cuda", requires_grad=True)
    (pc.all_reduce(z, "sum", group) * (rank + 1)).sum().backward()
    assert z.grad.is_cuda and z.grad.tolist() == [total] * 3
    z.grad = None
    (pc.all_gather_tensor(z, 0, group) * torch.arange(3.0 * size, device="cuda")).sum().backward()
    assert z.grad.tolist() == [size * (3.0 * rank + each) for each in range(3)]
    pending = pc.all_reduce(torch.ones(4, 2, device="cuda"), "sum", group)
    assert isinstance(pending, pc.AsyncCollectiveTensor) and pending.is_cuda
    assert pending.view(8)[2:4].tolist() == [float(size)] * 2
    core = pc.core_group(group)
    assert (pc.all_reduce(torch.ones(2, device="cuda"), "sum", core) + 0).tolist() == [float(size)] * 2
    done = pc.barrier(group, torch.full((2,), 5.0, device="cuda"))
    assert done.tolist() == [5.0, 5.0] and torch.cuda.current_stream().query()
    x = torch.ones(2, device="cuda")
    new = dist.new_group(list(range(size)))  # whose ranks meet when the graph runs first
    graph = make_fx(lambda t: pc.all_reduce(t * 2, "sum", new) + 1, tracing_mode="fake")(x)
    assert "phalanx.all_reduce" in graph.code and not _registry.state_of(new).decided
    assert graph(x).tolist() == [2.0 * size + 1] * 2 and _registry.state_of(new).on_gpus
    dist.destroy_process_group()


def test_all_forms_of_a_collective_work_on_a_gpu():
    run_ranks(forms, 2, timeout=120)


def overlapping(x, group):
    with pc.coalescing_manager(group):
        pc.all_reduce_(x, "sum", group)
        pc.all_reduce_(x[1:], "sum", group)


def coalesced(rank, size):
    group = on_gpu(rank, size)
    for asynchronous in (False, True):
        a, b = torch.full((3,), rank + 1.0, device="cuda"), torch.full((2,), rank + 1.0)
        c = torch.arange(2 * size, device="cuda")
        with pc.coalescing_manager(group, async_ops=asynchronous) as manager:
            pc.all_reduce_(a, "sum", group)
            pc.all_reduce_(b, "max", group)  # of the CPU, beside them
            gathered = pc.all_gather_tensor(torch.full((1,), float(rank), device="cuda"), 0, group)
            part = pc.reduce_scatter_tensor(c, "sum", 0, group)
            sent = pc.broadcast(torch.full((2,), float(rank), device="cuda"), 1, group)
            moved = pc.all_to_all_single(c, [2] * size, [2] * size, group)
        manager.wait()
        assert a.tolist() == [3.0] * 3 and b.tolist() == [2.0] * 2
        assert gathered.tolist() == [0.0, 1.0] and part.tolist() == [size * 2 * rank, size * (2 * rank + 1)]
        assert sent.tolist() == [1.0, 1.0] and moved.tolist() == [2 * rank, 2 * rank + 1] * size
    x = torch.ones(4, device="cuda")
    with pytest.raises(ValueError, match="use the same memory"):
        overlapping(x, group)
    assert (pc.all_reduce(x, "sum", group) + 0).tolist() == [float(size)] * 4  # nothing was sent before
    dist.destroy_process_group()


def test_a_manager_sends_what_is_on_a_gpu_as_one_call_too():
    run_ranks(coalesced, 2)


def streams(rank, size):
    group = on_gpu(rank, size)
    x = torch.full((1000,), rank + 1.0, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pending = pc.all_reduce(x, "sum", group)
        plain = torch.ops.phalanx.all_reduce(x, "sum", group.group_name)
    assert (pending + 1).tolist() == [4.0] * 1000  # the default stream waits for the other one
    assert torch.ops.phalanx.wait_tensor(plain).tolist() == [3.0] * 1000
    y = torch.zeros(4, device="cuda")
    (pc.all_reduce(y, "sum", group) + 0).tolist()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y += pc.all_reduce(y + 1, "sum", group)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert y.tolist() == [26.0] * 4  # y = y + 2 (y + 1): 2, 8, 26
    del graph, pending, plain
    group2 = dist.new_group(list(range(size)))
    another = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="cannot be captured"), torch.cuda.graph(another):
        pc.all_reduce(y, "sum", group2)
    del another
    dist.destroy_process_group()


def test_waits_are_those_of_streams_and_collectives_can_be_captured():  # F4 F5
    run_ranks(streams, 2)


def come_and_go(rank, size):
    fake_torch_cuda.load()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    held = []
    for cycle in range(3):
        address = f"file://{scratch()}/cycle{cycle}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        assert (pc.all_reduce(torch.ones(2000, device="cuda"), "sum", dist.group.WORLD) + 0).sum().item() == 2000 * size
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        fake_torch_cuda.empty_cache()
        held.append((len(os.listdir("/proc/self/fd")), fake_torch_cuda.alive()))
    assert held[1] == held[2], held


def test_nothing_stays_on_the_gpu_of_a_group_that_was_destroyed():
    run_ranks(come_and_go, 2)


# ---- who serves it ---------------------------------------------------------------------------------------------------


def one_cannot(rank, size):
    group = on_gpu(rank, size)
    if rank == 1:
        os.environ["PHALANX_CUDA_KERNELS"] = "/nowhere/kernels.fatbin"
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("phalanx.collectives").addHandler(handler)
    asked = []
    _transport.C10dTransport.start = lambda self, op, tensor, *args: asked.append(op.name) or tensor.clone()  # no NCCL
    assert pc.all_reduce(torch.ones(2, device="cuda"), "sum", group).shape == (2,)
    assert asked == ["all_reduce"]
    assert len(told) == 1 and "cannot use the GPUs of rank(s) 1" in told[0], told
    assert ("/nowhere" in told[0]) == (rank == 1)
    assert (pc.all_reduce(torch.ones(2), "sum", group) + 0).tolist() == [2.0, 2.0]  # the CPU is served as before
    dist.destroy_process_group()


def test_where_one_rank_cannot_all_of_them_go_through_torch_distributed():
    run_ranks(one_cannot, 2)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def call_for_ever(call, x):
    while True:
        call(x)
        torch.cuda.synchronize()


def fails(rank, size, what):
    group = on_gpu(rank, size)
    x = torch.ones(4, device="cuda")
    assert (pc.all_reduce(x, "sum", group) + 0).tolist() == [float(size)] * 4
    if what == "dies" and rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    other = what == "differs" and rank == 1
    call = (lambda y: pc.broadcast(y, 0, group)) if other else (lambda y: pc.all_reduce(y, "sum", group))
    with pytest.raises(PhalanxError) as caught:
        call_for_ever(call, x)
    torch.cuda.synchronize()
    with pytest.raises(RevokedError):
        call_for_ever(call, x)
    (scratch() / f"told.{rank}").touch()
    told = [scratch() / f"told.{each}" for each in range(size - (what == "dies"))]
    while not all(each.exists() for each in told):  # a process that ends takes unread words with it
        time.sleep(0.01)
    assert (torch.ones(3, device="cuda") + 1).tolist() == [2.0] * 3  # the GPU can be used
    return type(caught.value).__name__, str(caught.value)


def test_ranks_that_make_different_calls_are_told_so():
    found = run_ranks(fails, 2, "differs")
    assert any(kind == MismatchError.__name__ for kind, _ in found), found
    for _, text in found:
        assert "all_reduce" in text or "broadcast" in text, found


def test_the_death_of_a_rank_is_named_by_the_next_call():
    found = run_ranks(fails, 2, "dies", expect_exit={1: -signal.SIGKILL})
    assert "rank 1" in found[0][1] and "died" in found[0][1], found
