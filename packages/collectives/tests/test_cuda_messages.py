"""Messages between GPUs, through torch.distributed and through phalanx.collectives: on the device of the tests where
there is none."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fake_torch_cuda
import phalanx.collectives as pc
from c10d_groups import join, run_groups
from phalanx.collectives import _registry
from phalanx.core import MismatchError, PhalanxError, UnsupportedError
from ranks import run_ranks, scratch

pytestmark = pytest.mark.usefixtures("_device")

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2)
LARGE = 3 << 20  # of float32: more than is sent before it is received


@pytest.fixture(scope="module")
def _device():
    fake_torch_cuda.needs_cuda()


def on_gpu(rank, size, backend="cpu:phalanx,cuda:phalanx"):
    """Inside a rank: the device, and the default process group."""
    fake_torch_cuda.load()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    join(rank, size, backend=backend)


def on_gloo(rank, size):
    """Likewise, of a backend that is of no use for it."""
    fake_torch_cuda.load()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    address, limit = f"file://{scratch()}/c10d", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=limit)
    return dist.group.WORLD


def drawn(seed, shape, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def same(got, wanted):
    assert got.is_cuda and got.dtype == wanted.dtype
    assert torch.equal(got.cpu().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def for_ever(call, *args):
    """Until what a kernel has found out is raised."""
    while True:
        call(*args)
        torch.cuda.synchronize()


# ---- torch.distributed -----------------------------------------------------------------------------------------------


def ring(rank, size):
    on_gpu(rank, size)
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in DTYPES:
        for shape in ((1,), (3,), (0,), (2, 5000)):
            x, got = drawn(rank, shape, dtype).cuda(), torch.zeros(shape, dtype=dtype, device="cuda")
            receiving, sending = dist.irecv(got, left, tag=3), dist.isend(x, right, tag=3)
            assert receiving.wait() and sending.wait()
            same(got, drawn(left, shape, dtype))
    columns = torch.arange(6.0, device="cuda").view(2, 3).t() + rank
    rows = torch.zeros(2, 3, device="cuda")
    # Neither is contiguous. What copies the result is an op of torch, which on the device of the tests holds the host.
    works = [dist.isend(columns, right), dist.irecv(rows.t(), left)]
    for work in works:
        work.wait()
    assert torch.equal(rows.cpu().t(), torch.arange(6.0).view(2, 3).t() + left), rows
    if rank == 0:
        dist.send(torch.tensor([5, 6], device="cuda"), 1)
    elif rank == 1:
        got = torch.zeros(2, dtype=torch.int64, device="cuda")
        assert dist.recv(got, 0) == 0 and got.tolist() == [5, 6]
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_every_dtype_go_around(size):  # P11, P13
    run_groups(ring, size)


def batches(rank, size):
    on_gpu(rank, size)
    right, left = (rank + 1) % size, (rank - 1) % size
    # Any order of sends and receives; those of one direction keep theirs.
    for order in ([*range(8)], [4, 5, 6, 7, 0, 1, 2, 3], [0, 4, 1, 5, 2, 6, 3, 7]):
        sent = [torch.full((4 if i else LARGE,), 10.0 * rank + i, device="cuda") for i in range(4)]
        got = [torch.zeros_like(each) for each in sent]
        ops = [dist.P2POp(dist.isend, each, right) for each in sent]
        ops += [dist.P2POp(dist.irecv, each, left) for each in got]
        for work in dist.batch_isend_irecv([ops[i] for i in order]):
            work.wait()
        assert [each.unique().tolist() for each in got] == [[10.0 * left + i] for i in range(4)]
    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match="in one batch"):
            dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1, device=f"cuda:{i}"), right) for i in (0, 1)])
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_a_batch_has_any_order_of_sends_and_receives(size):  # P11
    run_groups(batches, size)


def scheduled(rank, size):
    """As a pipeline does it: what is to come is asked for before it can be sent, and meanwhile the GPU computes."""
    on_gpu(rank, size)
    peer = 1 - rank
    got = torch.zeros(LARGE, device="cuda")
    coming = dist.irecv(got, peer)
    x = torch.ones(LARGE, device="cuda") * (rank + 1)  # not behind what comes
    assert x[-1].item() == rank + 1
    if rank == 0:
        assert not coming.is_completed()  # the other one sends when it has this one's
        dist.isend(x, peer).wait()
        coming.wait()
        assert got.unique().tolist() == [2.0]
    else:
        coming.wait()
        assert got.unique().tolist() == [1.0]
        going = dist.isend(x, peer)
        del x  # its memory stays until it is sent
        other = torch.zeros(LARGE, device="cuda")
        going.wait()
        assert other.sum().item() == 0
    torch.cuda.synchronize()
    assert coming.is_completed() and coming.is_success()
    dist.destroy_process_group()


def test_what_is_computed_does_not_wait_for_messages():
    # A kernel of torch that is loaded when it is first used might wait for the message, and the message for this rank.
    run_groups(scheduled, 2, env={"CUDA_MODULE_LOADING": "EAGER"})


def captured(rank, size):
    on_gpu(rank, size)
    peer = 1 - rank
    x, got = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")

    def exchange():
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, got, peer)]):
            work.wait()

    exchange()  # what the messages need on the GPU is made now
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1 + rank
        exchange()
        got *= 10
    torch.cuda.synchronize()
    for turn in range(1, 4):
        graph.replay()
        torch.cuda.synchronize()
        assert got.tolist() == [10.0 * turn * (1 + peer)] * 8
    del graph
    dist.destroy_process_group()


def test_messages_can_be_captured_and_replayed():
    run_groups(captured, 2)


def refused(rank, size):
    on_gpu(rank, size)
    x = torch.ones(4, device="cuda")
    with pytest.raises(NotImplementedError, match="needs the rank of the sender"):
        dist.recv(x)
    with pytest.raises(ValueError, match="negative"):
        dist.send(x, 1 - rank, tag=-1)
    peer = 1 - rank
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, x + 0, peer)]):
        work.wait()  # nothing was sent before
    dist.destroy_process_group()


def test_what_is_refused_is_not_sent():
    run_groups(refused, 2)


def different(rank, size):
    on_gpu(rank, size)
    x = torch.ones(4 + rank, device="cuda")
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
    work.wait()
    torch.cuda.synchronize()
    with pytest.raises(dist.DistBackendError) as caught:
        for_ever(dist.all_reduce, x)
    assert (torch.ones(3, device="cuda") + 1).tolist() == [2.0] * 3  # the GPU can be used
    dist.destroy_process_group()
    return str(caught.value)


def test_messages_that_differ_are_told():  # F2
    for text in run_groups(different, 2):
        assert "sends 16 bytes of float32 with tag 0" in text and "receives 20 bytes of float32" in text, text


def dies(rank, size):
    on_gpu(rank, size)
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        (scratch() / "dying").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError) as caught:
        for_ever(dist.recv, x, 1)
    assert (torch.ones(3, device="cuda") + 1).tolist() == [2.0] * 3
    dist.destroy_process_group()
    return str(caught.value)


def test_the_death_of_a_rank_ends_what_waits_for_its_message():
    found = run_groups(dies, 2, expect_exit={1: -signal.SIGKILL})
    assert "rank 1" in found[0] and "died" in found[0], found


# ---- phalanx.collectives ---------------------------------------------------------------------------------------------


def of_ours(rank, size):
    group = on_gloo(rank, size)
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in DTYPES:
        for shape in ((), (3,), (0,), (2, 5000)):
            x, got = drawn(rank, shape, dtype).cuda(), torch.zeros(shape, dtype=dtype, device="cuda")
            version = got._version
            receiving, sending = pc.irecv(got, left, group), pc.isend(x, right, group)
            assert receiving.wait() and sending.wait() and got._version > version
            same(got.view(-1), drawn(left, shape, dtype).view(-1))
    assert _registry.state_of(group).on_gpus
    for order in ([*range(8)], [4, 5, 6, 7, 0, 1, 2, 3]):
        sent = [torch.full((4 if i else LARGE,), 10.0 * rank + i, device="cuda") for i in range(4)]
        got = [torch.zeros_like(each) for each in sent]
        ops = [pc.P2POp(pc.isend, each, right, group) for each in sent]
        ops += [pc.P2POp(pc.irecv, each, left, group) for each in got]
        works = pc.batch_isend_irecv([ops[i] for i in order])
        assert len(works) == 8
        for work in works:
            work.wait()
        assert [each.unique().tolist() for each in got] == [[10.0 * left + i] for i in range(4)]
    # Of both devices in one batch, and inside a body.
    host, there = torch.zeros(2), torch.zeros(2, device="cuda")
    mixed = [pc.P2POp(pc.irecv, host, left), pc.P2POp(pc.irecv, there, left)]
    mixed += [pc.P2POp(pc.isend, torch.full((2,), float(rank), device=at), right) for at in ("cpu", "cuda")]
    for work in pc.batch_isend_irecv(mixed):
        work.wait()
    assert host.tolist() == there.tolist() == [left] * 2
    with pc.coalescing_manager(group, async_ops=True) as cm:
        works = pc.batch_isend_irecv([pc.P2POp(pc.irecv, there, left), pc.P2POp(pc.isend, there + 1, right)])
    cm.wait()
    assert all(work.wait() for work in works) and there.tolist() == [(rank - 2) % size + 1] * 2
    if rank == 0:
        pc.send(torch.tensor([5, 6], device="cuda"), 1)
    elif rank == 1:
        got = torch.zeros(2, dtype=torch.int64, device="cuda")
        assert pc.recv(got, 0) == 0 and got.tolist() == [5, 6]
    with pytest.raises(UnsupportedError, match="PHX_ANY_RANK is not allowed"):
        pc.recv(there)
    pc.enable_group(group)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_our_messages_of_gpus_go_through_the_core(size):  # P11, P12
    run_ranks(of_ours, size)


def functional(rank, size):
    group, peer = on_gloo(rank, size), 1 - rank
    x, got = torch.full((5,), float(rank), device="cuda"), torch.zeros(5, device="cuda")
    sent, coming = pc.batch_p2p_ops_inplace(["isend", "irecv"], [peer, peer], [0, 0], [x, got], group)
    assert (coming + 1).tolist() == [peer + 1.0] * 5 and (sent + 0).tolist() == x.tolist()
    begun = torch.ops.phalanx.batch_p2p_ops(["irecv", "isend"], [peer, peer], [1, 1], [x, x], group.group_name)
    assert (torch.ops.phalanx.wait_tensor(begun[0]) * 2).tolist() == [2.0 * peer] * 5
    coming = pc.irecv_inplace(got, peer, 2, group)
    sent = pc.isend_inplace(x + 7, peer, 2, group)
    assert (coming + 0).tolist() == [peer + 7.0] * 5
    assert (sent + 0).tolist() == [rank + 7.0] * 5
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def test_functional_messages_of_gpus():  # P12
    run_ranks(functional, 2)


def ours_differ(rank, size):
    group = on_gloo(rank, size)
    x = torch.ones(4, device="cuda")
    (pc.isend(x, 1, tag=1) if rank == 0 else pc.irecv(x, 0, tag=2)).wait()
    torch.cuda.synchronize()
    with pytest.raises(PhalanxError) as caught:
        for_ever(lambda: pc.wait_tensor(pc.all_reduce(x, "sum", group)))
    assert isinstance(caught.value, MismatchError), caught.value
    dist.destroy_process_group()
    return str(caught.value)


def test_our_messages_with_other_tags_are_told():  # F2
    for text in run_ranks(ours_differ, 2):
        assert "with tag 1" in text and "with tag 2" in text, text
