"""What torch builds on process groups, on the backend `phalanx`, unchanged."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from c10d_groups import join, run_groups
from ranks import scratch


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5))


def data(rank, size):
    torch.manual_seed(1)
    x = torch.randn(2 * size, 6)
    return x[2 * rank : 2 * rank + 2]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_training(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    model, plain = net(), net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    one, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
    for _ in range(2):
        model(data(rank, size)).square().mean().backward()
        one.step()
        one.zero_grad()
        for r in range(size):
            (plain(data(r, size)).square().mean() / size).backward()
        other.step()
        other.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p), q, rtol=1e-5, atol=1e-6)
    half = net()
    fully_shard(half, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    half(data(rank, size)).float().mean().backward()
    assert all(p.grad is not None for p in half.parameters())
    return model


def checkpoint(rank, size, model):
    state = {"model": get_model_state_dict(model), "step": torch.tensor(7)}
    dcp.save(state, checkpoint_id=str(scratch() / "saved"))
    wanted = [full(p).clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    again = {"model": get_model_state_dict(model), "step": torch.tensor(0)}
    dcp.load(again, checkpoint_id=str(scratch() / "saved"))
    set_model_state_dict(model, again["model"])
    assert again["step"].item() == 7
    for p, value in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(full(p), value)
    future = dcp.async_save({"x": torch.full((3,), 1.0)}, checkpoint_id=str(scratch() / "later"))
    future.result()


def tensors(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(35.0).view(5, 7)
    placed = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(placed.to_local(), whole.tensor_split(size, 0)[rank] if size == 2 else placed.to_local())
    turned = placed.redistribute(mesh, [Shard(1)])
    assert torch.equal(turned.redistribute(mesh, [Replicate()]).to_local(), whole)
    partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
    assert torch.equal(partial.redistribute(mesh, [Shard(0)]).full_tensor(), 3 * whole)
    assert torch.equal((placed @ placed.t()).full_tensor(), whole @ whole.t())


def functional(rank, size):
    group = dist.group.WORLD
    x = torch.full((4,), float(rank))
    assert (funcol.all_reduce(x, "sum", group) == 1).all() and x[0] == rank
    assert funcol.all_gather_tensor(x[:1], 0, group).tolist() == [0, 1]
    assert funcol.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group).tolist() == [4 * rank, 4 * rank + 2]
    assert funcol.broadcast(x, 1, group).tolist() == [1] * 4
    swapped = funcol.all_to_all_single(x, [2, 2], [2, 2], group)
    assert swapped.tolist() == [0, 0, 1, 1]
    a, b = funcol.all_reduce_coalesced([x, x + 1], "max", group)
    assert a[0] == 1 and b[0] == 2
    c, d = funcol.all_gather_into_tensor_coalesced([x[:1], x[:2] + 1], group)
    assert c.tolist() == [0, 1] and d.tolist() == [1, 1, 2, 2]
    e, f = funcol.reduce_scatter_tensor_coalesced([torch.arange(2.0), torch.ones(4)], "sum", [0, 0], group)
    assert e.tolist() == [2.0 * rank] and f.tolist() == [2, 2]
    for _ in range(50):
        funcol.all_reduce(torch.ones(100), "sum", group).wait()


def compiled(rank, size):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x):
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    assert f(torch.full((3,), float(rank))).tolist() == [3.0] * 3


def everything(rank, size):
    join(rank, size)
    functional(rank, size)
    tensors(rank, size)
    checkpoint(rank, size, sharded_training(rank, size))
    compiled(rank, size)
    dist.destroy_process_group()


def test_fsdp_dtensor_checkpoints_and_functional_collectives_run_on_it():
    run_groups(everything, 2, timeout=120)
