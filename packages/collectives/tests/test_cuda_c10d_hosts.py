"""The backend `phalanx` on tensors of GPUs where the ranks of a group are on several hosts: on the device of the tests,
processes that are told to be on different hosts, and gloo in the place of NCCL between them."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fake_torch_cuda
import phalanx.collectives as pc
from c10d_groups import join
from phalanx.collectives import c10d
from ranks import run_ranks, scratch
from staged import NEVER, between_hosts

pytestmark = pytest.mark.usefixtures("_device")


@pytest.fixture(scope="module")
def _device():
    fake_torch_cuda.needs_cuda()
    if fake_torch_cuda.is_real():
        pytest.skip("with a real GPU NCCL does it, between real hosts")


def on(*hosts):
    return [{"PHALANX_HOST_ID": str(7 + host), "PHALANX_C10D": "python"} for host in hosts]


def on_gpu(rank, size, seconds=60, limit=NEVER):
    """Inside a rank: the device, and the default process group."""
    fake_torch_cuda.load()
    between_hosts(limit)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    join(rank, size, seconds=seconds, backend="cpu:phalanx,cuda:phalanx")


def same(got, wanted):
    assert got.is_cuda and got.dtype == wanted.dtype and torch.equal(got.cpu(), wanted), (got.cpu(), wanted)


def drawn(rank, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 10.0 ** (rank - 1)).to(dtype)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def alike(call, *tensors):
    """What a call leaves in tensors of the GPU must be what it leaves in those of the CPU, whose work is the same."""
    given = [each.cuda() for each in tensors]
    call(*tensors)
    call(*given)
    for mine, theirs in zip(given, tensors, strict=True):
        same(mine, theirs)


ALL = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8)


def reductions(rank, size):
    op = dist.ReduceOp
    for dtype in ALL:
        for reduction in (op.SUM, op.AVG, op.PRODUCT, op.MIN, op.MAX):
            for shape in ((), (5,), (400, 7)):
                alike(lambda x, r=reduction: dist.all_reduce(x, r), drawn(rank, shape, dtype))
        for root in (0, size - 1):
            alike(lambda x, r=root: dist.reduce(x, r), drawn(rank, (33,), dtype))
        alike(
            lambda out, x: dist.reduce_scatter_tensor(out, x),
            torch.empty(3, 2, dtype=dtype),
            drawn(rank, (3 * size, 2), dtype),
        )
        alike(
            lambda out, x: dist.reduce_scatter(out, list(x.split([each + 1 for each in range(size)])), op.MAX),
            torch.empty(rank + 1, dtype=dtype),
            drawn(rank, (size * (size + 1) // 2,), dtype),
        )
    for dtype, reduction in ((torch.int32, op.BXOR), (torch.uint16, op.SUM), (torch.uint64, op.MAX)):
        alike(lambda x, r=reduction: dist.all_reduce(x, r), drawn(rank, (9,), dtype))
    alike(lambda x: dist.all_reduce(x, dist._make_nccl_premul_sum(0.3)), drawn(rank, (9,)))
    alike(lambda x: dist.all_reduce(x), drawn(rank, (300_001,)))  # several chunks are on their way at a time
    with pytest.raises(NotImplementedError, match="bxor is not defined for float32"):
        dist.all_reduce(torch.ones(1, device="cuda"), op.BXOR)


def gathers(rank, size):
    for dtype in (*ALL, torch.bool, torch.complex64, torch.float8_e5m2):
        mine = drawn(rank, (4, 3), torch.float32 if dtype == torch.complex64 else dtype).to(dtype)
        alike(lambda x, out: dist.all_gather_into_tensor(out, x), mine, torch.empty(4 * size, 3, dtype=dtype))
    whole = torch.empty(size, 5)
    alike(lambda x, out: dist.all_gather(list(out), x), drawn(rank, (5,)), whole)
    apart = [torch.empty(5) for _ in range(size)]
    alike(lambda x, *out: dist.all_gather(list(out), x), drawn(rank, (5,)), *apart)
    uneven = [torch.empty(each + 1) for each in range(size)]
    alike(lambda x, *out: dist.all_gather(list(out), x), drawn(rank, (rank + 1,)), *uneven)
    for root in range(size):
        alike(lambda x, r=root: dist.broadcast(x, r), drawn(rank, (1000,)))
        out = [torch.empty(7) for _ in range(size if rank == root else 0)]
        alike(lambda x, *out, r=root: dist.gather(x, list(out) or None, r), drawn(rank, (7,)), *out)
        parts = [drawn(each, (7,)) for each in range(size if rank == root else 0)]
        alike(lambda x, *given, r=root: dist.scatter(x, list(given) or None, r), torch.empty(7), *parts)


def exchanges(rank, size):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        alike(
            lambda x, out: dist.all_to_all_single(out, x),
            drawn(rank, (2 * size, 3), dtype),
            torch.empty(2 * size, 3, dtype=dtype),
        )
    alike(lambda x: dist.all_to_all_single(x, x), drawn(rank, (size * 50_000,)))  # in place
    splits = [(rank + each) % 3 for each in range(size)]  # alike both ways, and some nothing
    alike(
        lambda x, out: dist.all_to_all_single(out, x, splits, splits),
        drawn(rank, (sum(splits), 2)),
        torch.empty(sum(splits), 2),
    )
    lists = [drawn(rank * size + each, (rank + each + 1,)) for each in range(size)]
    taken = [torch.empty(rank + each + 1) for each in range(size)]
    alike(lambda *x: dist.all_to_all(list(x[size:]), list(x[:size])), *lists, *taken)


def odd_tensors(rank, size):
    total = float(sum(range(1, size + 1)))
    x = torch.full((4, 6), rank + 1.0, device="cuda")
    dist.all_reduce(x.t()[::2])
    assert x[:, 0].tolist() == [total] * 4 and x[:, 1].tolist() == [rank + 1.0] * 4
    out = torch.full((2 * size,), 7.0, device="cuda")
    out[2 * rank + 1] = rank
    dist.all_gather_into_tensor(out, out[2 * rank : 2 * rank + 2])  # in place
    assert out.tolist() == [each for other in range(size) for each in (7.0, other)]
    shifted = torch.arange(2.0 * size + 1, device="cuda")
    dist.reduce_scatter_tensor(shifted[1:3], shifted[: 2 * size])  # what it writes overlaps what it reads
    assert shifted[1:3].tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
    dist.all_reduce(torch.empty(0, device="cuda"))
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    squared = leaf.square().sum()
    with torch.no_grad():
        dist.broadcast(leaf, 0)
    squared.backward()  # nothing was changed in the eyes of autograd
    assert leaf.grad.tolist() == [2.0] * 3
    with pytest.raises(ValueError, match=r"tensors on .* and .* in one collective"):
        dist.all_gather_into_tensor(torch.empty(2 * size, device="cuda"), torch.ones(2))


def works(rank, size):
    total = float(sum(range(1, size + 1)))
    side = torch.cuda.Stream()
    x = torch.full((1000,), rank + 1.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work = dist.all_reduce(x, async_op=True)
    assert work.wait() is True  # the current stream waits for the other one
    assert (x + 1).tolist() == [total + 1] * 1000
    torch.cuda.synchronize()
    assert work.is_completed() and work.is_success() and work.result()[0] is not None
    with torch.cuda.stream(side):
        work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda done: [2 * each for each in done.value()]).wait()
    assert doubled[0].tolist() == [2 * size * total] * 1000
    on_cpu = dist.all_reduce(torch.ones(3), async_op=True)  # both at the same time
    with dist._coalescing_manager(async_ops=True) as manager:
        for part in x.chunk(3):
            dist.all_reduce(part)
    manager.wait()
    assert x.tolist() == [size * size * total] * 1000
    assert on_cpu.get_future().wait()[0].tolist() == [float(size)] * 3
    tensors = [torch.full((n,), float(rank + n), device="cuda") for n in (3, 0, 400_001, 5)]
    dist.all_reduce_coalesced(tensors)
    assert all((each == total - size + size * each.numel()).all() for each in tensors)
    outs = [torch.empty(size * n, device="cuda") for n in (2, 3)]
    with dist._coalescing_manager():
        for n, out in zip((2, 3), outs, strict=True):
            dist.all_gather_into_tensor(out, torch.full((n,), float(rank), device="cuda"))
    assert [out.tolist() for out in outs] == [[float(each) for each in range(size) for _ in range(n)] for n in (2, 3)]
    dist.barrier(device_ids=[torch.cuda.current_device()])
    dist.barrier()
    c10d.monitored_barrier()


def functional(rank, size):
    """The functional collectives of this package go through the group."""
    group = dist.group.WORLD
    x = torch.full((6,), rank + 1.0, device="cuda")
    assert (pc.all_reduce(x, "sum", group) + 0).tolist() == [sum(range(1, size + 1))] * 6
    assert (pc.all_gather_tensor(x[:1], 0, group) + 0).tolist() == [each + 1.0 for each in range(size)]
    y = torch.ones(2, device="cuda", requires_grad=True)
    (pc.all_reduce(y, "sum", group) * (rank + 1)).sum().backward()
    assert y.grad.tolist() == [float(sum(range(1, size + 1)))] * 2


def messages(rank, size):
    """Between all ranks, within a host and between hosts."""
    others = [each for each in range(size) if each != rank]
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool):
        for n in (1, 70_000):
            values = [
                drawn(each, (n,), torch.bool if dtype == torch.bool else torch.float32).to(dtype)
                for each in range(size)
            ]
            given = values[rank].cuda()
            taken = {each: torch.empty(n, dtype=dtype, device="cuda") for each in others}
            ops = [dist.P2POp(dist.isend, given, each) for each in others]
            ops += [dist.P2POp(dist.irecv, taken[each], each) for each in others]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            for each in others:
                same(taken[each], values[each])
    first, second = torch.empty(2, device="cuda"), torch.empty(4, 2, device="cuda").t()
    if rank == 0:
        dist.send(torch.tensor([1.0, 2.0], device="cuda"), size - 1, tag=3)
        dist.send(torch.arange(8.0, device="cuda").view(4, 2).t(), size - 1, tag=4)  # strided
        later = dist.isend(torch.ones(2, device="cuda"), size - 1)
        dist.all_reduce(first)  # it goes with the next call
        assert later.is_completed() in (True, False)
        later.wait()
    elif rank == size - 1:
        assert dist.recv(first, 0, tag=3) == 0
        second[0, 0] = 1  # what is there before the message
        work = dist.irecv(second, 0, tag=4)
        work.get_future().wait()
        assert first.tolist() == [1.0, 2.0] and second.t().flatten().tolist() == [float(i) for i in range(8)]
        later = dist.irecv(second[:, 0], 0)
        dist.all_reduce(first)
        later.wait()
        assert second[:, 0].tolist() == [1.0, 1.0] and second[:, 1].tolist() == [2.0, 3.0]
    else:
        dist.all_reduce(first)
    with pytest.raises(NotImplementedError, match="names the rank it is from"):
        dist.recv(first)
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:
        taken = torch.empty(3, device="cuda")
        peer = {0: size - 1, size - 1: 0}.get(rank)
        if peer is not None:
            dist.isend(torch.full((3,), float(rank), device="cuda"), peer)
            dist.irecv(taken, peer)
    manager.wait()
    if peer is not None:
        assert taken.tolist() == [float(peer)] * 3


def refused(rank, size):
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph), pytest.raises(NotImplementedError, match="all_reduce on group .* being captured"):
        dist.all_reduce(x)
    dist.all_reduce(x)  # nothing was sent before
    del graph


def everything(rank, size):
    on_gpu(rank, size)
    for part in (reductions, gathers, exchanges, odd_tensors, works, functional, messages, refused):
        part(rank, size)
        dist.barrier()
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(dist.DistBackendError, match="destroyed"):
        group.allreduce([torch.ones(1, device="cuda")])


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 1, 0, 1)])
def test_every_collective_on_gpus_of_several_hosts_gives_the_bits_of_the_cpu(hosts):  # P13
    run_ranks(everything, len(hosts), env=on(*hosts), timeout=240)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def for_ever(call):
    while True:
        call()
        torch.cuda.synchronize()


def lacking(rank, size):
    """One rank cannot: all are told so, and the group serves the CPU as before."""
    on_gpu(rank, size)
    if rank == 1:
        os.environ["PHALANX_CUDA_KERNELS"] = "/nowhere/kernels.fatbin"
    for _ in range(2):
        with pytest.raises(
            NotImplementedError, match="need the core on each GPU, and nccl between .* Rank 1: .*/nowhere"
        ):
            dist.all_reduce(torch.ones(2, device="cuda"))
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [float(size)] * 2
    dist.destroy_process_group()


def test_where_one_rank_cannot_all_of_them_say_which():
    run_ranks(lacking, 2, env=on(0, 1))


def without_nccl(rank, size):
    fake_torch_cuda.load()
    join(rank, size)
    with pytest.raises(NotImplementedError, match="Rank 0: this torch has no NCCL"):
        dist.all_reduce(torch.ones(2, device="cuda"))
    dist.destroy_process_group()


def test_a_torch_without_nccl_is_refused_by_name():
    run_ranks(without_nccl, 2, env=on(0, 1))


def wait_for_all(name, ranks):
    """A process that ends takes unread words with it."""
    (scratch() / f"{name}.{dist.get_rank()}").touch()
    while not all((scratch() / f"{name}.{each}").exists() for each in ranks):
        time.sleep(0.01)


def fails(rank, size, what):
    limit = timedelta(seconds=3) if what == "lonely" else NEVER  # the host waits for messages here, as for no GPU
    on_gpu(rank, size, seconds=3 if what in ("late", "lonely") else 60, limit=limit)
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    dist.all_to_all_single(torch.empty(size, device="cuda"), torch.ones(size, device="cuda"))
    torch.cuda.synchronize()
    wait_for_all("ready", range(size))
    last = size - 1
    if what == "dies" and rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "aborts" and rank == last:
        dist.group.WORLD.abort()
        wait_for_all("told", range(size))
        return ""
    calls = {
        "differs": lambda: dist.broadcast(x, 0) if rank == last else dist.all_reduce(x),
        "exchanges": lambda: (
            dist.gather(x[:1], [torch.empty(1, device="cuda") for _ in range(size)] if rank == 0 else None)
            if rank == last
            else dist.all_to_all_single(torch.empty(size, device="cuda"), torch.ones(size, device="cuda"))
        ),
        "tags": lambda: (
            (dist.send if rank == 0 else dist.recv)(x, last - rank, tag=rank) if rank in (0, last) else dist.barrier()
        ),
        "lonely": lambda: dist.recv(x, last) if rank == 0 else dist.send(x, 0),
    }
    if what in ("late", "lonely") and rank == last:
        wait_for_all("told", range(last))
    with pytest.raises(dist.DistBackendError) as caught:
        for_ever(calls.get(what, lambda: dist.all_reduce(x)))
    for call in (
        dist.all_reduce,
        lambda y: dist.send(y, (rank + size // 2) % size),
        lambda y: dist.all_reduce(y.cpu()),
    ):
        with pytest.raises(dist.DistBackendError, match="revoked by an earlier failure"):
            call(x)
    assert (torch.ones(3, device="cuda") + 1).tolist() == [2.0] * 3  # the GPU can be used
    wait_for_all("told", range(last if what == "dies" else size))
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize("what", ["dies", "aborts", "late"])
def test_a_rank_that_dies_gives_up_or_is_late_is_named_on_all_hosts(what):
    code = {3: -signal.SIGKILL} if what == "dies" else None
    found = run_ranks(fails, 4, what, env=on(0, 0, 1, 1), expect_exit=code, timeout=60)
    assert all("rank 3" in text or "rank(s) 3" in text for text in found[:3]), found


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("differs", ("all_reduce", "broadcast")),
        ("exchanges", ("all_to_all on GPUs", "gather to 0 on GPUs")),
        ("tags", ("tag 0", "tag 1")),
        (
            "lonely",
            ("recv on group '0': timed out after 3000 ms (the timeout of the group): rank 0 still waits for rank(s)",),
        ),
    ],
)
def test_calls_that_do_not_match_are_both_named(what, texts):
    found = run_ranks(fails, 2, what, env=on(0, 1), timeout=60)
    for text in found:
        assert all(each in text for each in texts), found
