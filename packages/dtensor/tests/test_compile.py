"""DTensors in compiled functions: what users call, guards, caches, dynamic sizes."""

import copy
import pickle

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from phalanx.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from phalanx.dtensor._compile import Context, cache_key
from ranks import run_ranks


class Counting:
    """A backend that counts the graphs it gets, and hands them on."""

    def __init__(self, backend):
        self.backend = torch._dynamo.lookup_backend(backend)
        self.count = 0

    def __call__(self, module, inputs):
        self.count += 1
        return self.backend(module, inputs)


def check(function, inputs, backend="aot_eager", **options):
    """Values and gradients of a function, compiled without a graph break, are those of eager."""
    torch._dynamo.reset()
    found = []
    for called in (function, torch.compile(function, backend=backend, fullgraph=True, **options)):
        given = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
        result = called(*given)
        local = result.to_local() if isinstance(result, DTensor) else result
        if result.requires_grad:
            (local.sin() * 3).sum().backward()
        found.append((result, [one.grad for one in given]))
    (wanted, wanted_grads), (result, grads) = found
    same(result, wanted)
    for one, other in zip(grads, wanted_grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            same(one, other)


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, DTensor):
        assert (one.placements, one.shape, one.device_mesh) == (other.placements, other.shape, other.device_mesh)
        one, other = one.to_local(), other.to_local()
    torch.testing.assert_close(one, other)


def calls(rank, size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    rows, columns, whole = [Shard(0)], [Shard(1)], [Replicate()]

    def made(*shape, placements=whole):
        tensor = torch.randn(*shape, dtype=torch.float64)
        return distribute_tensor(tensor, mesh, placements).requires_grad_()

    x, w = made(7, 4, placements=rows), made(4, 6, placements=columns)  # 7: the shards are uneven
    mine = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    for backend in ("eager", "aot_eager"):
        check(lambda x, w: (x @ w).relu().sum(0), (x, w), backend)  # moves an input
        check(lambda x: x.redistribute(placements=whole) * 2, (x,), backend)
        check(lambda x: x.redistribute(mesh, [Shard(1)]) * 2, (x,), backend)  # the mesh is an input of the graph
        check(lambda x: x.to_local() * 2, (x,), backend)
        check(lambda x: DTensor.from_local(x, mesh, rows) * 2, (mine,), backend)
        check(lambda x: x.sum(0).to_local(grad_placements=[Partial()]), (x,), backend)
        check(lambda x: x.sum(0).full_tensor() * 2, (x,), backend)  # of a Partial
        check(lambda x: (x.mean(1) * x.placements[0].dim) if x.placements[0].is_shard() else x, (x,), backend)
    check(lambda x: x.redistribute(x.device_mesh, [Replicate()]), (x,))
    check(lambda x: x.redistribute(mesh["tp"], placements=(Shard(-1),)), (x,))
    check(lambda x: DTensor.from_local(x, mesh["tp"], (Partial(),)).redistribute(placements=columns), (mine,))
    check(lambda x: DTensor.from_local(x, device_mesh=mesh, placements=[Partial()], grad_placements=whole), (mine,))
    check(lambda x: DTensor.from_local(x, mesh).redistribute(placements=rows).to_local(), (mine,))
    check(lambda x: DTensor.from_local(x, mesh, whole, shape=(4, 6), stride=(6, 1)) + 1, (mine,))
    check(lambda x: distribute_tensor(x.detach(), mesh, rows) * 2, (mine,))  # takes the values of rank 0
    check(lambda x: distribute_tensor(x.detach(), mesh, [Shard(-1)], src_data_rank=None) * 2, (mine,))
    check(lambda x, y: torch.cat([x, y.redistribute(placements=rows)]).softmax(-1), (x, made(7, 4)))
    check(lambda x: x.clone().add_(1).mul_(2), (x,))

    def leaf(x):
        return distribute_tensor(x, mesh, rows)

    def compared(x):
        return DTensor.from_local(x, mesh, rows, run_check=True)

    for function, text in ((leaf, "a compiled function cannot make a leaf"), (compared, "write run_check=False")):
        with pytest.raises(Exception, match=text):
            torch.compile(function, backend="eager", fullgraph=True)(mine)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_users_call_is_one_graph_with_the_values_and_gradients_of_eager(size):  # D2, D3, D4, D5, D6
    run_ranks(calls, size, start_torch=True, timeout=280)


def guards(rank, size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    tensor = torch.arange(24.0).view(4, 6)
    backend = Counting("aot_eager")
    compiled = torch.compile(lambda x: (x * 2).sum(), backend=backend, fullgraph=True)
    for placements, count in (([Shard(0)], 1), ([Shard(0)], 1), ([Shard(1)], 2), ([Replicate()], 3), ([Shard(0)], 3)):
        x = distribute_tensor(tensor, mesh, placements)
        assert compiled(x).full_tensor() == 552
        assert backend.count == count
    # An equal mesh is the same; another one is not.
    equal = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    assert compiled(distribute_tensor(tensor, equal, [Shard(0)])).full_tensor() == 552
    assert backend.count == 3
    other = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    result = compiled(distribute_tensor(tensor, other, [Shard(0)]))
    assert (backend.count, result.device_mesh.mesh_dim_names) == (4, ("dp",))
    # What guards and caches keep.
    context = distribute_tensor(tensor, mesh, [Shard(0)]).__tensor_flatten__()[1]
    assert copy.deepcopy(context) is context
    assert pickle.loads(pickle.dumps(context)) is context
    assert context is Context(mesh, (Shard(0),), torch.float32, False)
    x = distribute_tensor(tensor, mesh, [Shard(0)])
    assert cache_key(x) == cache_key(distribute_tensor(tensor + 1, mesh, [Shard(0)]))
    others = distribute_tensor(tensor, mesh, [Shard(1)]), distribute_tensor(tensor, other, [Shard(0)])
    assert len({cache_key(one) for one in (x, *others)}) == 3
    return cache_key(x)


def test_graphs_serve_only_the_placements_mesh_and_rank_that_they_were_made_for():
    keys = run_ranks(guards, 2, start_torch=True, timeout=200)
    assert len(set(keys)) == 2  # a graph has in it what its rank does


def sizes(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    rows, whole = [Shard(0)], [Replicate()]

    def gathered(x, w):
        return (DTensor.from_local(x, mesh, rows) @ w).redistribute(placements=whole).to_local()

    def mean(x, w):
        return (DTensor.from_local(x, mesh, rows) @ w).relu().mean().full_tensor()

    def views(x, w):
        return (x.view(-1, 2, 4).transpose(0, 1).reshape(2, -1) @ x.flatten()[: x.shape[0] * 4, None]).relu()

    def with_size(x, w):
        return ((x @ w).view(x.shape[0], 2, 3) + x.shape[0]).sum(-1).to_local()

    w = distribute_tensor(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), mesh, whole)
    for call, local in ((gathered, True), (mean, True), (views, False), (with_size, False)):
        torch._dynamo.reset()
        backend = Counting("aot_eager")
        compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
        for length in (4, 6, 10, 5):
            x = torch.randn(length, 8, generator=torch.Generator().manual_seed(length + rank * local))
            x = x if local else distribute_tensor(x, mesh, rows)
            same(compiled(x, w), call(x, w))
            # Where the shards that come in are uneven, a graph may be for their sizes alone.
            assert backend.count == (1 if local or length != 5 else backend.count)
    # A dim that the user declares dynamic may not be one size only.
    torch._dynamo.reset()

    def doubled(x):
        return (DTensor.from_local(x, mesh, rows) * 2).sum(1).to_local()

    x = torch.ones(5, 8)
    torch._dynamo.mark_dynamic(x, 0)
    assert torch.equal(torch.compile(doubled, backend="eager", fullgraph=True)(x), torch.full((5,), 16.0))


@pytest.mark.slow
def test_one_graph_serves_several_sizes():
    run_ranks(sizes, 2, start_torch=True, timeout=280)


def uneven(x, y):
    """What differs between ranks: the pieces, and where they lie in the whole."""
    return (x + y.redistribute(placements=[Shard(0)])).cos().redistribute(placements=[Shard(1)]) * 2


def compiles(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    x, y = (distribute_tensor(torch.randn(5, 3), mesh, [one]).requires_grad_() for one in (Shard(0), Replicate()))
    for _ in range(2):  # the second time from the cache
        check(uneven, (x, y), "inductor")


@pytest.mark.thorough
def test_ranks_that_share_a_cache_on_disk_run_graphs_of_their_own(tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    run_ranks(compiles, 2, start_torch=True, timeout=280, env=env)
