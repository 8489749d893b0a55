"""torch.compile, make_fx and fake tensors."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import phalanx.collectives as pc
from ranks import run_ranks


def init_fake(size=4):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())


class Graphs:
    """A backend that keeps the graphs and runs them as they are."""

    def __init__(self):
        self.ops = []

    def __call__(self, module, _):
        nodes = [node for node in module.graph.nodes if "phalanx" in str(node.target)]
        self.ops.append([(str(node.target).removesuffix(".default"), *node.args[1:]) for node in nodes])
        return module.forward


def tracing(rank, _):
    init_fake()
    world, sub = dist.group.WORLD, dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    name = str(sub.group_name)
    x = torch.ones(8, 4)
    for call, op in (
        (lambda x: pc.all_reduce(x, "SUM", sub), ("phalanx.all_reduce", "sum", name)),
        (lambda x: pc.all_gather_tensor(x, 0, sub), ("phalanx.all_gather_into_tensor", 2, name)),
        (lambda x: pc.all_gather_tensor(x, 1, sub), ("phalanx.all_gather_into_tensor", 2, name)),
        (lambda x: pc.reduce_scatter_tensor(x, "avg", 0, sub), ("phalanx.reduce_scatter_tensor", "avg", 2, name)),
        (lambda x: pc.reduce_scatter_tensor(x, "sum", -1, sub), ("phalanx.reduce_scatter_tensor", "sum", 2, name)),
        (lambda x: pc.all_gather_v(x, [8, 1], 0, sub), ("phalanx.all_gather_v", [8, 1], 0, name)),
        (
            lambda x: pc.reduce_scatter_v(x, "sum", [5, 3], 0, sub),
            ("phalanx.reduce_scatter_v", "sum", [5, 3], 5, 0, name),
        ),
        (lambda x: pc.broadcast(x, 1, sub), ("phalanx.broadcast", 1, name)),
        (lambda x: pc.all_to_all_single(x, None, None, sub), ("phalanx.all_to_all_single", [], [], name)),
        (lambda x: pc.shard_dim_alltoall(x, 1, 0, sub), ("phalanx.all_to_all_single", [], [], name)),  # F29
        (lambda x: pc.shard_dim_alltoall(x, 0, 1, sub), ("phalanx.all_to_all_single", [], [], name)),
        (lambda x: pc.all_to_all_single(x, [1, 2], [3, 5], sub), ("phalanx.all_to_all_single", [1, 2], [3, 5], name)),
        (lambda x: pc.all_reduce_(x.clone(), "sum", sub), ("phalanx.all_reduce", "sum", name)),
    ):
        torch._dynamo.reset()
        graphs = Graphs()
        result = torch.compile(call, backend=graphs, fullgraph=True)(x)
        assert graphs.ops == [[op, ("phalanx.wait_tensor",)]], graphs.ops  # F19
        assert type(result) is torch.Tensor
        assert result.shape == call(x).shape
    # Every form of group, and no graph for a group may serve another.
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(lambda x, group: pc.all_reduce(x, "sum", group), backend=graphs, fullgraph=True)
    row, column = str(mesh.get_group(1).group_name), str(mesh.get_group(0).group_name)
    seen = {}
    for group, wanted in (
        (world, str(world.group_name)), (sub, name), (world, str(world.group_name)), ((mesh, 1), row),
        ((mesh, 0), column), ((mesh, "tp"), row), (None, str(world.group_name)),
        (name, name), (str(world.group_name), str(world.group_name)), (sub, name),
    ):  # fmt: skip
        before = len(graphs.ops)
        compiled(x, group)
        if len(graphs.ops) > before:
            seen[type(group), wanted] = graphs.ops[-1][0]
        assert seen[type(group), wanted] == ("phalanx.all_reduce", "sum", wanted)
    for group in ([0, 1], [[0, 1], [2, 3]], dist.group.WORLD):
        torch._dynamo.reset()
        graphs = Graphs()
        torch.compile(lambda x, g=group: pc.all_reduce(x, "sum", g), backend=graphs, fullgraph=True)(x)
        assert graphs.ops[0][0][0] == "phalanx.all_reduce"
    # Dynamic sizes: one graph for all.
    for call in (
        lambda x: pc.all_reduce(x, "sum", sub),
        lambda x: pc.all_gather_tensor(x, 0, sub),
        lambda x: pc.all_gather_tensor(x, 1, sub),
        lambda x: pc.reduce_scatter_tensor(x, "sum", 0, sub),
        lambda x: pc.reduce_scatter_tensor(x, "sum", 1, sub),
        lambda x: pc.broadcast(x, 1, sub),
        lambda x: pc.all_to_all_single(x, None, None, sub),
        lambda x: pc.all_to_all_single(x, [x.size(0) // 2, x.size(0) // 2], [x.size(0), 0], sub),
    ):
        torch._dynamo.reset()
        graphs = Graphs()
        compiled = torch.compile(call, backend=graphs, fullgraph=True, dynamic=True)
        for rows in (8, 12, 20):
            assert compiled(torch.ones(rows, 6)).shape == call(torch.ones(rows, 6)).shape
        assert len(graphs.ops) == 1
    dist.destroy_process_group()


def test_each_function_traces_as_one_op_and_a_wait():  # F19
    run_ranks(tracing, 1, timeout=120)


def other_tracers(rank, _):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    init_fake()
    group = dist.group.WORLD
    graph = make_fx(lambda x: pc.all_gather_tensor(x, 0, group) * 2)(torch.ones(3))
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets[:2] == ["phalanx.all_gather_into_tensor.default", "phalanx.wait_tensor.default"]
    with FakeTensorMode():
        x = torch.empty(8, 3)
        assert pc.all_reduce(x, "sum", group).shape == (8, 3)
        assert pc.all_gather_tensor(x, 1, group).shape == (8, 12)
        assert pc.reduce_scatter_tensor(x, "sum", 0, group).shape == (2, 3)
        with pytest.raises(ValueError, match="unknown reduce op 'median'"):
            pc.all_reduce(x, "median", group)
    assert torch.ops.phalanx.all_gather_into_tensor(torch.empty(2, 3, device="meta"), 4, "0").shape == (8, 3)

    class Module(torch.nn.Module):
        def forward(self, x):
            return pc.all_reduce(x + 1, "sum", group)

    exported = torch.export.export(Module(), (torch.ones(4),))
    assert "phalanx.all_reduce.default" in str(exported.graph)

    @torch.compile(backend="eager", fullgraph=True)
    def wrong(x):
        return pc.all_reduce(x, "median", group)

    with pytest.raises(Exception, match="unknown reduce op 'median'"):
        wrong(torch.ones(2))
    dist.destroy_process_group()


def test_make_fx_export_and_fake_tensors_work():  # F19
    run_ranks(other_tracers, 1)


def block(x, w, group):
    """Waits for results whose memory a compiler would like to use again."""
    a = pc.all_reduce(x @ w, "sum", group)
    b = torch.relu(a) @ w
    c = pc.all_reduce(b, "avg", group)
    d = pc.reduce_scatter_tensor(torch.sin(a @ w) + c, "sum", 1, group)
    e = pc.all_gather_tensor(d * 2, 1, group)
    f = pc.all_to_all_single(e + a, None, None, group)
    return a + c, pc.broadcast(f, 0, group) + e


def runs(rank, size, backend, dynamic):
    group = dist.group.WORLD
    torch.manual_seed(0)
    w = torch.randn(16, 16, dtype=torch.float64) / 8
    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
    first = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    results = compiled(first, w, group)  # the ranks meet inside the graph
    assert pc.is_core_group(group)
    for result, wanted in zip(results, block(first, w, group), strict=True):
        torch.testing.assert_close(result, pc.wait_tensor(wanted))
    for rows in (8, 12) if dynamic else (8,):
        x = torch.randn(rows, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        grads = []
        for function in (block, compiled):
            inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
            one, two = function(*inputs, group)
            (one.sin().sum() * (rank + 1) + (two * two).sum()).backward()
            grads.append([each.grad for each in inputs])
        for result, wanted in zip(*reversed(grads), strict=True):
            torch.testing.assert_close(result, wanted)
    pending = pc.all_reduce(x, "sum", group)  # a pending tensor goes into a graph
    result = torch.compile(lambda y: y * 2, backend=backend, fullgraph=True)(pending)
    torch.testing.assert_close(torch.as_tensor(result), pending.wait() * 2)


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("eager", False),
        pytest.param("aot_eager", True, marks=pytest.mark.slow),
        pytest.param("inductor", False, marks=pytest.mark.slow),
    ],
)
def test_compiled_graphs_compute_what_eager_computes(backend, dynamic, tmp_path):
    # One new cache for both ranks: a rank may get what the other has compiled. CI: torch's warnings become errors.
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "CI": "1"}
    run_ranks(runs, 2, backend, dynamic, start_torch=True, timeout=280, env=env)
