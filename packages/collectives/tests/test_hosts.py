"""Groups whose ranks are on several hosts: processes that are told to be on different ones, joined by UCX.

test_hosts_network.py runs `everything` between network namespaces.
"""

import gc
import importlib.util
import logging
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fake_torch_cuda
import phalanx.collectives as pc
from c10d_groups import everybody_is_done, join, needs_ucx, run_groups
from phalanx.core import InvalidArgumentError, MismatchError, PeerDeadError, UnsupportedError
from ranks import run_ranks, scratch

LAYOUTS = [(0, 1, 0, 1), (0, 0, 1)]  # the host of each rank
WITHOUT_UCX = {"PHALANX_UCX": "/nonexistent/libucp.so.0"}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _ucx(request):
    if "without_ucx" not in request.node.name:
        needs_ucx()


def on(*hosts, **more):
    return [{"PHALANX_HOST_ID": str(7 + host), **more} for host in hosts]


layouts = pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: f"{len(hosts)} ranks")


def drawn(rank, shape, dtype):
    """Small whole numbers: their sums and products are exact in any order."""
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def served(group, hosts=2):
    """The core serves the group, on so many hosts."""
    assert pc.enable_group(group) and pc.core_group(group).hosts == hosts
    return group


# ---- what the core serves --------------------------------------------------------------------------------------------


def calls(group, rank, size, count, dtype):
    """What every collective of torch.distributed leaves, by name. Nothing where a rank gets nothing."""
    x = drawn(rank, (count,), dtype)
    rows = drawn(rank, (size, count), dtype)
    made = lambda *shape: torch.zeros(shape, dtype=dtype)  # noqa: E731
    apart = lambda: [made(count) for _ in range(size)]  # noqa: E731
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        y = x.clone()
        dist.all_reduce(y, op, group=group)
        yield f"all_reduce {op}", [y]
    for root in range(size):
        y, z, parts = x.clone(), x.clone(), apart() if rank == root else None
        dist.broadcast(y, root, group=group)
        dist.reduce(z, root, group=group)
        dist.gather(x, parts, root, group=group)
        dist.scatter(mine := made(count), list(rows) if rank == root else None, root, group=group)
        yield f"to and from {root}", [y, mine, *([z, *parts] if parts else [])]
    dist.all_gather(parts := apart(), x, group=group)
    dist.all_gather_into_tensor(whole := made(size * count), x, group=group)
    dist.reduce_scatter_tensor(mine := made(count), rows.view(-1), group=group)
    dist.reduce_scatter(other := made(count), list(rows), group=group)
    dist.all_to_all_single(exchanged := made(size * count), rows.view(-1), group=group)
    yield "blocks", [*parts, whole, mine, other, exchanged]
    got, given = [each + 1 for each in range(size)], [rank + 1] * size
    dist.all_to_all_single(uneven := made(sum(got)), drawn(rank, (sum(given),), dtype), got, given, group=group)
    yield "uneven", [uneven]
    dist.all_gather_object(objects := [None] * size, {"rank": rank}, group=group)
    dist.barrier(group)
    yield "objects", [torch.tensor([each["rank"] for each in objects])]


def compared_with_gloo(rank, size):
    gloo = dist.new_group(backend="gloo")
    for count, dtype in ((7, torch.bfloat16), (3001, torch.int64), (1, torch.uint8), (150_003, torch.float32)):
        theirs = calls(gloo, rank, size, count, dtype)
        for (name, mine), (_, wanted) in zip(calls(None, rank, size, count, dtype), theirs, strict=True):
            for one, other in zip(mine, wanted, strict=True):
                assert torch.equal(one, other), (name, count, dtype)


def same_bits(rank, size):
    """Floats have one sum, on all ranks of all hosts."""
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank - 1)
    parts = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(parts, values)
    for dtype in (torch.float32, torch.bfloat16):
        x = values.to(dtype, copy=True)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        wanted = torch.stack([part.to(dtype).double() for part in parts]).mean(0)
        # Sums of hosts are rounded to the dtype. The values go up to 1,000, which cancel in part.
        atol = 4.0 if dtype == torch.bfloat16 else 1e-3
        torch.testing.assert_close(x.double(), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=atol)
        dist.all_gather(every := [torch.empty_like(x) for _ in range(size)], x)
        assert all(torch.equal(each, x) for each in every)


def in_flight(rank, size):
    """Many asynchronous calls at once, and messages between all ranks beside them, small and large."""
    counts = [3, 70_000, 1, 400_000, 64]
    sums = [dist.all_reduce(x := torch.full((n,), float(rank + n)), async_op=True) for n in counts * 3]
    sent = [torch.full((n,), 100.0 * rank + n) for n in counts]
    got = {(peer, n): torch.empty(n) for peer in range(size) if peer != rank for n in counts}
    ops = [dist.P2POp(dist.irecv, got[peer, n], peer, tag=i) for (peer, n), i in zip(got, [*range(5)] * size)]  # noqa: B905
    ops += [dist.P2POp(dist.isend, x, peer, tag=i) for peer in range(size) if peer != rank for i, x in enumerate(sent)]
    for work in [*reversed(sums), *dist.batch_isend_irecv(ops)]:
        work.wait()
    assert x.tolist() == [float(sum(range(size)) + size * 64)] * 64
    assert [work.result()[0][0].item() for work in sums] == [sum(range(size)) + float(size * n) for n in counts * 3]
    assert all((x == 100.0 * peer + n).all() for (peer, n), x in got.items())
    if rank == 0:
        total = torch.zeros(1)
        assert sorted(dist.recv(total, tag=9) for _ in range(size - 1)) == [*range(1, size)]
    else:
        dist.send(torch.ones(1), 0, tag=9)


def functional(rank, size):
    group = served(dist.group.WORLD)
    x = torch.arange(2.0 * size) + 10 * rank
    inputs = [torch.arange(2.0 * size) + 10 * each for each in range(size)]
    total = sum(inputs)
    assert torch.equal(pc.all_reduce(x, "sum", group) + 0, total)
    assert torch.equal(pc.all_gather_tensor(x.view(2, -1), 1, group) + 0, torch.cat([y.view(2, -1) for y in inputs], 1))
    assert torch.equal(pc.reduce_scatter_tensor(x, "sum", 0, group) + 0, total.chunk(size)[rank])
    assert torch.equal(pc.broadcast(x, 1, group) + 0, inputs[1])
    for length in (16, 30_000):  # columns, which lie in rows of the whole tensor
        wide = [torch.arange(3.0 * size * length).view(3, -1) % 7 + each for each in range(size)]
        cuts = [length - 9, length + 9, *[length] * (size - 2)]
        assert torch.equal(
            pc.all_gather_v(wide[rank].split(cuts, 1)[rank], cuts, 1, group) + 0,
            torch.cat([y.split(cuts, 1)[each] for each, y in enumerate(wide)], 1),
        )
        assert torch.equal(pc.reduce_scatter_v(wide[rank], "sum", cuts, 1, group) + 0, sum(wide).split(cuts, 1)[rank])
        moved = torch.cat([y.chunk(size, 1)[rank] for y in wide])
        assert torch.equal(pc.shard_dim_alltoall(wide[rank], 0, 1, group) + 0, moved)
        back = pc.shard_dim_alltoall(moved, 1, 0, group, "", [length] * size, [3] * size)
        assert torch.equal(back + 0, wide[rank])
    exchanged = torch.cat([y.chunk(size)[rank] for y in inputs])
    assert torch.equal(pc.all_to_all_single(x, None, None, group) + 0, exchanged)
    several = pc.all_reduce_coalesced([x, x.int()], "max", group)
    assert all(torch.equal(each + 0, inputs[-1].to(each.dtype)) for each in several)
    with pc.coalescing_manager(group):
        a, b = pc.all_reduce(x, "sum", group), pc.all_gather_tensor(x[:1], 0, group)
    assert torch.equal(a + 0, total) and b.tolist() == [10.0 * each for each in range(size)]
    y = torch.ones(3, requires_grad=True)
    (pc.all_reduce(y, "sum", group) * (rank + 1)).sum().backward()
    assert y.grad.tolist() == [sum(range(1, size + 1))] * 3
    graph = torch.compile(lambda z: pc.all_reduce(z * 2, "sum", group) + 1, fullgraph=True, backend="aot_eager")
    assert graph(torch.ones(2)).tolist() == [2.0 * size + 1] * 2
    work = pc.isend(x, (rank + 1) % size, group)
    assert pc.recv(got := torch.empty(2 * size), (rank - 1) % size, group) == (rank - 1) % size
    assert work.wait() and torch.equal(got, inputs[rank - 1])
    pc.barrier(group)


def trains(rank, size):
    """A step of DistributedDataParallel has gloo's gradients, and the same bits on all ranks."""
    gradients = []
    for group in (None, dist.new_group(backend="gloo")):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
        ddp(torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)
        dist.all_gather(every := [torch.empty_like(mine) for _ in range(size)], mine)
        assert all(torch.equal(each, mine) for each in every)


def subgroups(rank, size):
    """Groups of the ranks of one host, and of one rank of each host."""
    dist.all_gather_object(ids := [None] * size, pc.core_group(dist.group.WORLD).world.host_id)
    near = [[each for each in range(size) if ids[each] == host] for host in dict.fromkeys(ids)]
    far = [list(each) for each in zip(*near)]  # noqa: B905
    for lists, hosts in ((near, 1), (far, 2)):
        for ranks in lists:
            group = dist.new_group(ranks)
            if rank in ranks:
                dist.all_reduce(x := torch.tensor([1 << rank]), group=group)
                assert x.item() == sum(1 << each for each in ranks)
                served(group, hosts)


def refuses_what_needs_shared_memory(rank, size):
    group = served(dist.group.WORLD)
    core = pc.core_group(group)
    with pytest.raises(UnsupportedError, match="host"):
        core.rendezvous(core.world.alloc(4096))
    assert (pc.all_reduce(torch.ones(1), "sum", group) + 0).item() == size


PARTS = [compared_with_gloo, same_bits, in_flight, functional, trains, subgroups, refuses_what_needs_shared_memory]


def everything(rank, size):
    """All of it on the default group, which is of the backend `phalanx`."""
    assert dist.group.WORLD._get_backend(CPU).name() == "phalanx"
    served(dist.group.WORLD)
    for part in PARTS:
        part(rank, size)
        dist.barrier()


def joined(rank, size):
    join(rank, size)
    everything(rank, size)
    dist.destroy_process_group()


@layouts
def test_two_hosts_compute_what_one_does(hosts):
    run_groups(joined, len(hosts), env=on(*hosts), timeout=120)


def programs(name):
    """The functions of another file of tests."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_after_another(rank, size, names):
    """Programs for one host, each with a default group of its own."""
    folder = scratch()
    for i, name in enumerate(names):
        os.environ["PHX_TEST_SCRATCH"] = str(folder / str(i))
        scratch().mkdir(exist_ok=True)
        file, _, function = name.partition(".")
        getattr(programs(file), function)(rank, size)
        gc.collect()  # what errors that were caught refer to
    os.environ["PHX_TEST_SCRATCH"] = str(folder)


THREE = ["test_c10d_calls.everything", "test_c10d_messages.everything", "test_c10d_life.come_and_go"]
TWO = [f"test_c10d_life.{name}" for name in ("threads", "beside_gloo", "sequence_numbers", "unfinished")]
TWO += [f"test_c10d_failures.{name}" for name in ("disagree", "aborted", "ended_when_it_has_just_met")]
TWO += ["test_c10d_torch.everything", "test_c10d_ddp.everything"]  # the latter replaces parts of torch


@pytest.mark.slow
@pytest.mark.parametrize(("names", "hosts"), [(THREE, (0, 0, 1)), (TWO, (0, 1))], ids=["3 ranks", "2 ranks"])
def test_the_programs_of_one_host_run_on_two(names, hosts):  # P1 to P6, P11, P17 to P25, P29, P30
    run_groups(one_after_another, len(hosts), names, env=on(*hosts), timeout=240)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def different_calls(rank, size, backend):
    join(rank, size, backend=backend)
    group = served(dist.group.WORLD)
    sum_up = (lambda x: pc.all_reduce(x, "sum", group).sum()) if backend == "gloo" else dist.all_reduce
    with pytest.raises((MismatchError, dist.DistBackendError)) as caught:
        sum_up(torch.ones(2 + rank // 2))
    assert all(part in str(caught.value) for part in ("all_reduce", "float32, 2", "float32, 3")), caught.value
    with pytest.raises(RuntimeError, match="all_reduce"):  # names the first cause
        sum_up(torch.ones(2))
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_different_calls_on_different_hosts_are_named_on_all_ranks(backend):
    run_groups(different_calls, 4, backend, env=on(0, 0, 1, 1))


def dies(rank, size):
    join(rank, size)
    group = served(dist.group.WORLD)
    dist.barrier()
    everybody_is_done(rank, range(size), "barrier")  # what fails the group ends the calls of ranks that are not as far
    future = dist.irecv(torch.ones(1), 0 if rank == 3 else 3).get_future()
    everybody_is_done(rank, range(size), "receive")
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 3"):
        dist.all_reduce(torch.ones(5))
    with pytest.raises(RuntimeError, match="rank 3"):
        future.wait()
    with pytest.raises(PeerDeadError, match="rank 3"):
        pc.check_group(group)
    everybody_is_done(rank, range(3))
    dist.destroy_process_group()


def test_a_killed_rank_is_named_on_all_ranks_of_both_hosts():
    run_groups(dies, 4, env=on(0, 0, 1, 1), expect_exit={3: -signal.SIGKILL})


def refused(rank, size):
    join(rank, size, seconds=3600)
    dist.barrier()
    everybody_is_done(rank, range(size), "barrier")
    wrong = rank == 1
    with pytest.raises((InvalidArgumentError, dist.DistBackendError)) as caught:
        dist.all_gather_into_tensor(torch.empty(4 * size + wrong), torch.ones(4))
    assert isinstance(caught.value, InvalidArgumentError) == wrong
    assert wrong or ("rank 1 " in str(caught.value) and "refused its own call" in str(caught.value)), caught.value
    everybody_is_done(rank, range(size))
    dist.destroy_process_group()


@layouts
def test_all_hosts_learn_at_once_that_a_rank_refused_its_call(hosts):
    run_groups(refused, len(hosts), env=on(*hosts))


# ---- what torch serves -----------------------------------------------------------------------------------------------


def warnings_here():
    """What this package warns of from now on."""
    told, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("phalanx.collectives").addHandler(handler)
    return told


def told_once(told, rank, *parts):
    """One line of the first rank, which every other rank leaves to it."""
    assert len(told) == (rank == 0) and all(part in line for line in told for part in parts), told


def without_ucx(rank, size, backend):
    told = warnings_here()
    join(rank, size, backend=backend)
    group = dist.group.WORLD
    assert group._get_backend(CPU).name() == "gloo" and pc.enable_group(group) is False
    told_once(told, rank, "gloo" if backend == "phalanx" else "goes through torch.distributed", "UCX")
    dist.all_reduce(x := torch.full((3,), float(rank)))
    assert x.tolist() == [float(sum(range(size)))] * 3
    assert torch.equal(pc.all_reduce(x, "sum", group) + 0, x * size)
    y = torch.ones(2, requires_grad=True)
    (pc.all_reduce(y, "sum", group) * (rank + 1)).sum().backward()
    assert y.grad.tolist() == [sum(range(1, size + 1))] * 2
    near = dist.new_group([0, 1])  # which share a host
    if rank < 2:
        assert near._get_backend(CPU).name() == backend and pc.enable_group(near)
        dist.all_reduce(x, group=near)
        assert torch.equal(pc.all_reduce(x, "max", served(near, 1)) + 0, x)
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_without_ucx_gloo_serves_and_one_line_says_what_to_install(backend):
    run_groups(without_ucx, 3, backend, env=on(0, 0, 1, **WITHOUT_UCX))


def with_nccl(rank, size, backend):
    """A Gloo backend in the place of NCCL's: this shows what is asked of it, and not what it does."""
    from phalanx.collectives import _torch_compat

    def stand_in(options, given):
        store = dist.PrefixStore("nccl", options.store)
        return dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)

    _torch_compat.has_nccl, _torch_compat._make_nccl = lambda: True, stand_in
    join(rank, size, backend=backend)
    group = dist.group.WORLD
    assert [group._get_backend(device).name() for device in (CPU, CUDA)] == ["phalanx", "gloo"]
    assert dist.get_backend_config(group) == ("cpu:phalanx,cuda:phalanx" if backend == "phalanx" else backend)
    dist.all_reduce(x := torch.ones(3))
    assert x.tolist() == [float(size)] * 3
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["phalanx", "cpu:phalanx,cuda:nccl"])
def test_a_group_on_several_hosts_has_nccl_beside_the_core(backend):
    run_groups(with_nccl, 2, backend, env=on(0, 1))


def cuda_tensors(rank, size):
    from phalanx.collectives import _transport

    fake_torch_cuda.load()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    join(rank, size, backend="gloo")
    group, told, asked = served(dist.group.WORLD), warnings_here(), []
    _transport.C10dTransport.start = lambda self, op, tensor, *args: asked.append(op.name) or tensor.clone()  # no NCCL
    assert pc.all_reduce(torch.ones(2, device="cuda"), "sum", group).shape == (2,)
    assert asked == ["all_reduce"] and not pc.enable_group(group, device=CUDA)
    told_once(told, rank, "tensors of GPUs go through torch.distributed: its ranks are on 2 hosts", "cuda:nccl")
    assert (pc.all_reduce(torch.ones(2), "sum", group) + 0).tolist() == [float(size)] * 2
    dist.destroy_process_group()


def test_tensors_of_gpus_go_through_torch_distributed():
    fake_torch_cuda.needs_cuda()
    run_ranks(cuda_tensors, 2, env=on(0, 1))


# ---- test_hosts_network.py runs this file under torchrun -------------------------------------------------------------


def call_for_ever(call):
    while True:
        call()


def cut(rank, size, folder):
    """Calls until somebody takes the cable away."""
    (folder / f"ready.{rank}").touch()
    with pytest.raises(dist.DistBackendError) as caught:
        call_for_ever(lambda: dist.all_reduce(torch.ones(4096)))
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2))
    (folder / f"writing.{rank}").write_text(str(caught.value))
    (folder / f"writing.{rank}").rename(folder / f"error.{rank}")  # there at once with all that is in it
    os._exit(0)  # torch.distributed cannot be destroyed in good order without the network


def main(folder, what):
    dist.init_process_group("phalanx", timeout=timedelta(seconds=4 if what == "cut" else 60))
    rank, size = dist.get_rank(), dist.get_world_size()
    if what == "cut":
        cut(rank, size, folder)
    everything(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
