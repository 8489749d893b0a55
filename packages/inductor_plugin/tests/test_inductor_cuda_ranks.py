"""Lowered graphs of GPUs on real ranks give what eager gives on the host.

Triton's kernels need a GPU, so the graphs run op by op, on the device of the tests where there is no GPU. The last test
compiles them, where there is one.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import fake_torch_cuda
import phalanx.collectives as pc
from c10d_groups import run_groups
from inductor_graphs import traced
from phalanx.inductor_plugin import Route, clear_reports, reports
from ranks import scratch


@pytest.fixture(autouse=True)
def _device():
    fake_torch_cuda.needs_cuda()


def join(rank, size, backend="cpu:phalanx,cuda:phalanx"):
    """Ranks with a GPU each, and a group for both devices. Gives its name."""
    fake_torch_cuda.load()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(str(scratch() / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return dist.group.WORLD.group_name


def data(seed, *sizes, dtype=torch.float32):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(got, wanted):
    got, wanted = (each if isinstance(each, (list, tuple)) else [each] for each in (got, wanted))
    for one, other in zip(got, wanted, strict=True):
        assert one.is_cuda
        # A real GPU adds up products in another order than the host, and here they are factors of later ones.
        real = fake_torch_cuda.is_real() and one.dtype == torch.float32
        torch.testing.assert_close(one.cpu(), other, **({"rtol": 1e-4, "atol": 1e-4} if real else {}))


def check(function, *inputs, calls=3, symbolic=False, **config):
    """The lowered graph gives on the GPU what the function gives on the host, in every call and on any stream."""
    made = traced(function, *(each.cuda() for each in inputs), symbolic=symbolic, **config)
    for call in range(calls):
        given = [each + call for each in inputs]
        wanted = function(*given)
        on_gpu = [each.cuda() for each in given]
        stream = torch.cuda.Stream() if call == calls - 1 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            same(made.module(*on_gpu), wanted)
        for one, other in zip(on_gpu, given, strict=True):
            torch.testing.assert_close(one.cpu(), other)  # inputs stay as they are
    return made


def routes(made):
    return [line.route for line in made.report.collectives]


# ---- values ----------------------------------------------------------------------------------------------------------


def everything(group, size):
    def function(x):
        y = x.relu()
        parts = [
            fc.all_reduce(y + 1, "avg", group),
            *fc.all_reduce_coalesced([y + 2, y + 3], "max", group),
            fc.all_gather_tensor(y + 4, 0, group),
            *fc.all_gather_into_tensor_coalesced([y + 5, y + 6], group),
            fc.reduce_scatter_tensor(y + 7, "sum", 0, group),
            *fc.reduce_scatter_tensor_coalesced([y + 8, y + 9], "sum", [0, 0], group),
            fc.all_to_all_single(y + 10, None, None, group),
            fc.broadcast(y + 11, size - 1, group),
            pc.all_reduce(y + 13, "min", group),
        ]
        return [part * 2 for part in parts]

    return function


def every_collective(rank, size):
    group = join(rank, size)
    x = data(rank, 2 * size, 3 * size)
    for config in ({"zero_copy_bytes": 0}, {"bucket_bytes": 0}):
        made = check(everything(group, size), x, **config)
        assert len(routes(made)) == 9 and Route.FALLBACK not in routes(made)
        assert not any("wait_tensor" in name for name in made.names)
        if "zero_copy_bytes" in config:
            # torch writes out the even split sizes of an all_to_all, and sizes may differ on another rank.
            assert {line.reason for line in made.report.collectives if line.route is not Route.ZERO_COPY} == {"splits"}
            assert routes(made).count(Route.ZERO_COPY) == 8
    dist.destroy_process_group()


@pytest.mark.slow
def test_every_collective_gives_what_eager_gives_on_the_host():  # I8
    run_groups(every_collective, 2, timeout=280)


def block(rank, size):
    group = join(rank, size)
    weights = [data(seed, 16, 16) / 4 for seed in range(3)]

    def function(x, a, b, c):  # several values in one arena, one after another in the same place
        x = fc.all_reduce(x @ a, "sum", group) + x
        y = fc.all_reduce((x @ b).relu() @ c, "sum", group) + x
        z = fc.all_reduce((y * y).t().contiguous().view(-1), "max", group)
        return fc.all_gather_tensor(z.neg(), 0, group) + 1, y  # not sin: of large z it is another with each last bit

    made = check(function, data(rank, 8, 16), *weights, zero_copy_bytes=0)
    assert routes(made) == [Route.ZERO_COPY] * 4
    assert "mm_into_" in made.names and "arena_release_" in made.names
    dist.destroy_process_group()


def test_values_that_share_memory_of_an_arena_stay_apart():  # I3
    run_groups(block, 2, timeout=280)


def growing(rank, size):
    group = join(rank, size)

    def function(x, w):
        return fc.all_gather_tensor(fc.all_reduce(x @ w, "sum", group) + 1, 0, group) * 2

    w = data(9, 8, 8)
    made = traced(function, data(0, 4, 8).cuda(), w.cuda(), symbolic=True, zero_copy_bytes=0)
    assert routes(made) == [Route.ZERO_COPY] * 2
    for rows in (4, 6, 300, 2, 301, 4):
        x = data(rank + rows, rows, 8)
        same(made.module(x.cuda(), w.cuda()), function(x, w))
    dist.destroy_process_group()


def test_one_graph_serves_every_shape_and_its_arenas_grow():  # I3
    run_groups(growing, 2, timeout=280)


# ---- a group whose ranks have not met, and one that is not served ----------------------------------------------------


def met_late(rank, size):
    group = join(rank, size, "gloo")

    def function(x):
        return fc.all_reduce(x.relu(), "sum", group) * 2

    x = data(rank, 40)
    made = traced(function, x.cuda(), zero_copy_bytes=0)
    assert pc.is_core_group(group, device=torch.device("cuda"))
    pc.finalize()  # as in another process, which has the graph from a cache
    assert not pc.is_core_group(group, device=torch.device("cuda"))
    same(made.module(x.cuda()), function(x))
    assert pc.is_core_group(group, device=torch.device("cuda"))
    dist.destroy_process_group()


def test_ranks_of_a_cached_graph_meet_when_it_first_runs():
    run_groups(met_late, 2, timeout=280)


# ---- where there is a GPU --------------------------------------------------------------------------------------------


class Mlp(torch.nn.Module):
    """Columns, then rows, with the gradient of the input reduced."""

    def __init__(self, rank, size, group):
        super().__init__()
        self.group = group
        self.up = torch.nn.Parameter((data(1, 64, 256) / 8).chunk(size, 1)[rank].clone())
        self.down = torch.nn.Parameter((data(2, 256, 64) / 16).chunk(size, 0)[rank].clone())

    def forward(self, x):
        x = Copied.apply(x, self.group)
        return Reduced.apply((x @ self.up).relu() @ self.down, self.group)


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return fc.all_reduce(grad.contiguous(), "sum", ctx.group), None


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return fc.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def compiled(rank, size):
    group = join(rank, size)
    torch._dynamo.reset()
    clear_reports()
    model = Mlp(rank, size, group).cuda()
    fast = torch.compile(model, backend="phalanx", options={"phalanx.zero_copy_bytes": 0}, fullgraph=True)
    # Of a size that keeps results near 1: the sine of large ones would make much of how they were rounded.
    up, down = (data(1, 64, 256) / 8).requires_grad_(), (data(2, 256, 64) / 16).requires_grad_()
    for step in range(4):
        x, mine = data(step + 5, 32, 64).requires_grad_(), data(step + 5, 32, 64).cuda().requires_grad_()
        (((x @ up).relu() @ down).sin().sum()).backward()
        fast(mine).sin().sum().backward()
        torch.testing.assert_close(mine.grad.cpu(), x.grad, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(model.up.grad.cpu(), up.grad.chunk(size, 1)[rank], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(model.down.grad.cpu(), down.grad.chunk(size, 0)[rank], rtol=1e-3, atol=1e-3)
    assert [report.graph.split()[-1] for report in reports()] == ["forward", "backward"]
    assert {line.route for report in reports() for line in report.collectives} == {Route.ZERO_COPY}
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled graphs of GPUs need a GPU and Triton")
def test_a_compiled_mlp_trains_as_one_process_does():
    run_groups(compiled, 2, timeout=400)
