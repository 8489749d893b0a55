"""Functions of torch that make plain tensors inside take DTensors; `data` takes effect; what would crash is refused."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from phalanx.dtensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from ranks import run_ranks

INDEX = torch.tensor([0, 3, 1, 2, 3])
BAGS = torch.tensor([[1, 2], [3, 9]])


def full(result):
    if isinstance(result, (tuple, list)):
        return [full(one) for one in result]
    return result.full_tensor() if isinstance(result, DTensor) else result


FUNCTIONS = {
    "one_hot": (INDEX, lambda i: functional.one_hot(i, 4)),
    "one_hot of as many classes as there are": (INDEX, functional.one_hot),
    "quantile": ("w", lambda w: w.quantile(0.3, dim=0)),
    "quantile of all": ("w", lambda w: w.quantile(0.3)),
    "nanquantile": ("w", lambda w: w.nanquantile(0.3, dim=1)),
    "embedding_bag": ("w", lambda w: functional.embedding_bag(like(w, BAGS), w)),
    "embedding_bag with offsets": (
        "w",
        lambda w: functional.embedding_bag(like(w, BAGS.flatten()), w, like(w, torch.tensor([0, 3])), mode="sum"),
    ),
    "unique": (INDEX, torch.unique),
    "unique with counts": (INDEX, lambda i: torch.unique(i, return_inverse=True, return_counts=True)),
    "unique_consecutive": (INDEX, torch.unique_consecutive),
    "allclose": ("w", lambda w: torch.allclose(w, w * 1)),
    "not allclose": ("w", lambda w: torch.allclose(w, w + 1)),
    "combinations": (INDEX, torch.combinations),
    "matrix_power": ("square", lambda s: torch.linalg.matrix_power(s, 0)),
}


def like(tensor, value):
    """A value beside a tensor: a DTensor, if that is one."""
    return distribute_tensor(value, tensor.device_mesh) if isinstance(tensor, DTensor) else value


def composite_functions(rank, world_size):
    warnings.simplefilter("ignore")
    mesh = dist.init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    values = {"w": torch.randn(10, 4), "square": torch.randn(3, 3)}
    for name, (given, function) in FUNCTIONS.items():
        whole = values[given] if isinstance(given, str) else given
        wanted = function(whole)
        for placement in (Shard(0), Shard(whole.ndim - 1), Replicate()):
            found = full(function(distribute_tensor(whole, mesh, [placement])))
            torch.testing.assert_close(found, full(wanted), msg=f"{name} {placement}", check_dtype=True)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        net = kind(4, 6, num_layers=2)
        x = torch.randn(5, 4, 4)
        wanted = net(x)[0]
        wanted.sum().backward()
        grads = [one.grad.clone() for one in net.parameters()]
        net.zero_grad()
        distribute_module(net, mesh)
        for placement in (Shard(0), Shard(1), Replicate()):
            y = net(distribute_tensor(x, mesh, [placement]))[0]
            y.sum().backward()
            torch.testing.assert_close(y.full_tensor(), wanted)
            for one, grad in zip(net.parameters(), grads, strict=True):
                torch.testing.assert_close(one.grad.full_tensor(), grad)
            net.zero_grad()


@pytest.mark.parametrize("world_size", [2, 4])
def test_functions_that_make_tensors_inside_take_dtensors(world_size):
    run_ranks(composite_functions, world_size, start_torch=True, timeout=120)


def set_data(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    for placement in (Shard(0), Shard(1), Replicate()):
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [placement]))
        parameter.data = distribute_tensor(torch.full((4, 4), 3.0), mesh, [placement])
        assert parameter.requires_grad and parameter.is_leaf
        (parameter * 2).sum().backward()
        assert (parameter * 2).sum().item() == 96.0 and bool((parameter.grad.full_tensor() == 2).all())
        parameter.data.mul_(2)
        assert bool((parameter.full_tensor() == 6).all())
        # Other placements and another shape come with it.
        plain = distribute_tensor(torch.ones(4, 4), mesh, [placement])
        plain.data = distribute_tensor(torch.full((2, 6), 3.0), mesh, [Replicate()])
        assert plain.shape == (2, 6) and plain.placements == (Replicate(),) and plain.sum().item() == 36.0
        with pytest.raises(TypeError, match="can be set to a DTensor only, not to a Tensor: write distribute_tensor"):
            plain.data = torch.ones(2, 6)
        for name, call in {
            "share_memory_": lambda x: x.share_memory_(),
            "apply_": lambda x: x.apply_(abs),
            "map_": lambda x: x.map_(x, max),
        }.items():
            with pytest.raises(RuntimeError, match=rf"{name}: a DTensor has no memory of its own.*write to_local\(\)"):
                call(plain)
        with pytest.raises(RuntimeError, match="share_memory_"):
            distribute_module(nn.Linear(2, 2), mesh).share_memory()


def test_data_takes_effect_and_what_would_crash_is_refused():
    run_ranks(set_data, 2, start_torch=True)


def test_plain_tensors_are_taken_as_before():
    w = torch.randn(5, 4)
    assert torch.equal(torch.vmap(lambda one: one.quantile(0.3))(w), w.quantile(0.3, dim=1))
    assert torch.func.grad(lambda one: one.quantile(0.3))(w).sum() == 1
    compiled = torch.compile(lambda i: functional.one_hot(i, 4), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(INDEX), functional.one_hot(INDEX, 4))
