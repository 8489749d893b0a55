"""Compiled functions on real ranks over their lives: training, other shapes, caches, packages, ranks that differ."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import phalanx.collectives as pc
import phalanx.inductor_plugin as plugin
from phalanx.inductor_plugin import Route, clear_reports, reports
from ranks import run_ranks, scratch

ALL = {"phalanx.zero_copy_bytes": 0}  # whatever the size


def join(rank, size):
    store = dist.FileStore(str(scratch() / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return dist.group.WORLD.group_name


def data(seed, *sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lines():
    return [line for report in reports() for line in report.collectives]


# ---- training --------------------------------------------------------------------------------------------------------


class Mlp(torch.nn.Module):
    """A tensor-parallel block by hand: columns, then rows, with the gradient of the input reduced."""

    def __init__(self, rank, size, group):
        super().__init__()
        self.group = group
        self.up = torch.nn.Parameter(data(1, 16, 32).chunk(size, 1)[rank].clone())
        self.down = torch.nn.Parameter(data(2, 32, 16).chunk(size, 0)[rank].clone())

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


def training(rank, size):
    group = join(rank, size)
    torch._dynamo.reset()
    clear_reports()
    model = Mlp(rank, size, group)
    compiled = torch.compile(model, backend="phalanx", options=ALL, fullgraph=True)
    up, down = data(1, 16, 32).requires_grad_(), data(2, 32, 16).requires_grad_()
    for step in range(4):
        x, mine = (data(step + 5, 8, 16).requires_grad_() for _ in range(2))
        (((x @ up).relu() @ down).sin().sum()).backward()
        compiled(mine).sin().sum().backward()
        torch.testing.assert_close(mine.grad, x.grad)
        torch.testing.assert_close(model.up.grad, up.grad.chunk(size, 1)[rank])
        torch.testing.assert_close(model.down.grad, down.grad.chunk(size, 0)[rank])
    assert [report.graph.split()[-1] for report in reports()] == ["forward", "backward"]
    assert {line.route for line in lines()} == {Route.ZERO_COPY}
    dist.destroy_process_group()


def test_forward_and_backward_give_the_gradients_of_one_process():
    run_ranks(training, 2, timeout=250)


# ---- shapes, graphs, caches ------------------------------------------------------------------------------------------


def with_effects(rank, size):
    group = join(rank, size)

    def function(x):
        y = (x * 2).relu()
        torch.ops.aten._print("first")
        y = y + 1
        torch.ops.aten._print("second")
        z = fc.all_reduce(y, "sum", group) + fc.all_reduce(y.t().contiguous(), "max", group).t()
        torch.ops.aten._print("third")
        return z

    x = data(rank, 4, 4)
    compiled = torch.compile(function, backend="phalanx", options=ALL)
    printed = scratch() / f"printed.{rank}"
    stdout = os.dup(1)
    with printed.open("wb") as file:
        os.dup2(file.fileno(), 1)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), function(x))
        os.dup2(stdout, 1)
    os.close(stdout)
    assert printed.read_text().split() == ["first", "second", "third"] * 4
    assert {line.route for line in lines()} == {Route.ZERO_COPY}
    dist.destroy_process_group()


@pytest.mark.slow
def test_ops_with_effects_stay_in_their_order():
    run_ranks(with_effects, 2, timeout=280)


def other_shapes(rank, size):
    group = join(rank, size)
    torch._dynamo.reset()
    clear_reports()
    w = data(1, 8, 8)

    def function(x):
        y = fc.all_reduce(x @ w, "sum", group)
        return fc.all_gather_tensor((y + 1).relu(), 0, group).sum(1)

    compiled = torch.compile(function, backend="phalanx", options=ALL, dynamic=True, fullgraph=True)
    for rows in (4, 6, 300, 2, 301, 4):
        x = data(rank + rows, rows, 8)
        torch.testing.assert_close(compiled(x), function(x))
    assert len(reports()) == 1  # one graph for all
    assert {line.route for line in lines()} == {Route.ZERO_COPY}
    static = torch.compile(function, backend="phalanx", options=ALL, dynamic=False)
    for rows in (4, 6, 4):  # a graph for each
        x = data(rank + rows, rows, 8)
        torch.testing.assert_close(static(x), function(x))
    dist.destroy_process_group()


@pytest.mark.slow
def test_one_graph_serves_every_shape_and_its_arenas_grow():  # I3
    run_ranks(other_shapes, 2, timeout=250)


def several_graphs(rank, size):
    group = join(rank, size)
    torch._dynamo.reset()
    half = dist.new_group([rank])
    pair = dist.new_group(list(range(size)))

    def first(x):
        return fc.all_reduce(x.relu(), "sum", group) * 2

    def second(x):
        return fc.all_reduce(x.sin(), "max", pair) + fc.all_reduce(x.cos(), "sum", half)

    def none(x):
        return x.relu() * 3

    compiled = [torch.compile(each, backend="phalanx", options=ALL) for each in (first, second, none)]
    for i in range(3):
        for each, eager in zip(compiled, (first, second, none), strict=True):
            x = data(rank + i, 6, 6)
            torch.testing.assert_close(each(x), eager(x))
    dist.destroy_process_group()


@pytest.mark.slow
def test_several_graphs_and_groups_in_one_process():
    run_ranks(several_graphs, 2, timeout=250)


def from_the_cache(rank, size, expect_hit):
    from torch._dynamo.utils import counters

    group = join(rank, size)

    def function(x):
        return fc.all_reduce(x.relu(), "sum", group) + 1

    counters.clear()
    compiled = torch.compile(function, backend="phalanx", options=ALL)
    for i in range(2):
        x = data(rank + i, 6, 6)
        torch.testing.assert_close(compiled(x), function(x))
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    assert (hits > 0) == expect_hit, dict(counters)
    assert bool(reports()) != expect_hit
    # Other options are another graph.
    other = torch.compile(function, backend="phalanx", options={"phalanx.bucket_bytes": 0})
    clear_reports()
    x = data(rank, 6, 6)
    torch.testing.assert_close(other(x), function(x))
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_later_process_takes_the_graph_from_the_cache(tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run_ranks(from_the_cache, 2, False, timeout=250, env=env)
    run_ranks(from_the_cache, 2, True, timeout=250, env=env)


def one_has_it_cached(rank, size):
    """Rank 0 compiles, rank 1 does not: they meet when the graph runs."""
    group = join(rank, size)

    def function(x):
        return fc.all_reduce(x.relu(), "sum", group) + 1

    compiled = torch.compile(function, options=plugin.options(zero_copy_bytes=0))  # stock Inductor
    x = data(rank, 6, 6)
    torch.testing.assert_close(compiled(x), sum(data(r, 6, 6).relu() for r in range(size)) + 1)
    assert pc.is_core_group(group)
    dist.destroy_process_group()


@pytest.mark.slow
def test_stock_inductor_takes_the_pass_as_an_option(tmp_path):
    for _ in range(2):  # compiled, then from the cache
        run_ranks(one_has_it_cached, 2, timeout=250, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})


# ---- ahead of time ---------------------------------------------------------------------------------------------------


def package(rank, size):
    group = join(rank, size)

    class Model(torch.nn.Module):
        def forward(self, x, w):
            y = fc.all_reduce(x @ w, "sum", group)
            return fc.all_gather_tensor(y.relu(), 0, group) + 1

    model, x, w = Model(), data(rank, 4, 8), data(7, 8, 8)
    exported = torch.export.export(model, (x, w))
    path = str(scratch() / f"model-{rank}.pt2")
    clear_reports()
    torch._inductor.aoti_compile_and_package(
        exported, package_path=path, inductor_configs=plugin.options(zero_copy_bytes=0)
    )
    assert {line.route for line in lines()} == {Route.ZERO_COPY}
    loaded = torch._inductor.aoti_load_package(path)
    for i in range(3):
        torch.testing.assert_close(loaded(x + i, w), model(x + i, w))
    dist.destroy_process_group()


@pytest.mark.thorough
def test_a_package_made_ahead_of_time_runs(tmp_path):
    # Ranks that share a cache may pack a file that another is still writing.
    run_ranks(
        package, 2, timeout=280, env=[{"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(rank))} for rank in range(2)]
    )


# ---- ranks that differ -----------------------------------------------------------------------------------------------


def different_graphs(rank, size):
    group = join(rank, size)

    def function(x):
        y = fc.all_reduce(x.relu(), "sum", group) + 1
        return (fc.all_reduce(y * 2, "max", group) if rank == 1 else fc.all_reduce(y * 2, "min", group)) + 1

    compiled = torch.compile(function, backend="phalanx", options=ALL)
    with pytest.raises(RuntimeError, match="compiled different graphs") as caught:
        compiled(data(rank, 6, 6))
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.slow
def test_ranks_that_compiled_different_graphs_all_raise_naming_both():  # I10
    for text in run_ranks(different_graphs, 2, timeout=200):
        assert "graph " in text
        assert "Collective 2 is the first that differs" in text
        assert "'all_reduce(min) float64[6, 6]" in text
        assert "'all_reduce(max) float64[6, 6]" in text
        assert "on group rank 0" in text


def dead_peer(rank, size):
    import os

    group = join(rank, size)

    def function(x):
        return fc.all_reduce(x.relu(), "sum", group) + 1

    compiled = torch.compile(function, backend="phalanx", options=ALL)
    compiled(data(rank, 6, 6))
    if rank == 1:
        os._exit(7)
    x = data(rank, 6, 6)
    with pytest.raises(RuntimeError, match="rank 1"):
        compiled(x)


@pytest.mark.slow
def test_a_dead_rank_is_an_error_within_the_compiled_graph():
    run_ranks(dead_peer, 2, timeout=200, expect_exit={1: 7})


def threads(rank, size):
    """Two threads run functions on groups of their own at the same time.

    They are compiled one after the other: torch 2.11 dies where two threads compile at once.
    """
    import threading

    join(rank, size)
    torch._dynamo.reset()
    failures = []

    def check(compiled, i, call):
        wanted = sum(data(r + call, 5, 5).relu() + i for r in range(size)) + 1
        torch.testing.assert_close(compiled(data(rank + call, 5, 5)), wanted)

    def made(i):
        name = dist.new_group(list(range(size))).group_name

        def function(x):
            return fc.all_reduce(x.relu() + i, "sum", name) + 1

        compiled = torch.compile(function, backend="phalanx", options=ALL)
        check(compiled, i, 0)
        return compiled

    def work(compiled, i):
        try:
            for call in range(1, 50):
                check(compiled, i, call)
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=(made(i), i)) for i in range(2)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    assert not failures, failures
    dist.destroy_process_group()


@pytest.mark.slow
def test_threads_run_compiled_functions_at_the_same_time():
    run_ranks(threads, 2, timeout=250)
