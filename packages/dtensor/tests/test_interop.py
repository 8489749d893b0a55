"""To and from torch's DTensor; modules, dtypes, numpy."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs

from phalanx.dtensor import (
    AbstractMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    SizedShard,
    StridedShard,
    as_torch_placement,
    distribute_module,
    distribute_tensor,
    from_torch,
    to_torch,
)
from phalanx.dtensor._dtensor_spec import DTensorSpec
from ranks import run_ranks

R = Replicate()


def both_ways(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    whole = torch.arange(15.0).reshape(5, 3)
    for ours, placement in ((Shard(0), theirs.Shard(0)), (R, theirs.Replicate()), (Shard(1), theirs.Shard(1))):
        x = theirs.distribute_tensor(whole, mesh, [placement])
        y = from_torch(x)
        assert type(y) is DTensor and y.placements == (ours,) and y.device_mesh is mesh
        assert y.shape == x.shape and y.stride() == x.stride() and not y.requires_grad
        assert y.to_local().data_ptr() == x.to_local().data_ptr()
        z = to_torch(y)
        assert type(z) is theirs.DTensor and z.placements == (placement,) and z.shape == x.shape
        assert type(z.placements[0]) is type(placement)
        assert z.to_local().data_ptr() == x.to_local().data_ptr()
        assert torch.equal(z.full_tensor(), whole) and torch.equal(y.full_tensor(), whole)
    # Gradients reach the other side, and so do gradients of gradients.
    leaf = theirs.distribute_tensor(whole, mesh, [theirs.Shard(0)]).requires_grad_()
    (from_torch(leaf) ** 3).sum().backward()
    assert type(leaf.grad) is theirs.DTensor and leaf.grad.placements == (theirs.Shard(0),)
    torch.testing.assert_close(leaf.grad.full_tensor(), 3 * whole**2)
    leaf = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
    (to_torch(leaf) ** 3).sum().backward()
    assert type(leaf.grad) is DTensor and leaf.grad.placements == (Shard(1),)
    torch.testing.assert_close(leaf.grad.full_tensor(), 3 * whole**2)
    leaf = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    first = from_torch(to_torch(leaf) * 2) ** 3
    (grad,) = torch.autograd.grad(first.sum(), leaf, create_graph=True)
    grad.sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), 48 * whole)
    # A Partial stays one, and its gradient is replicated.
    term = torch.ones(2, 2).requires_grad_()
    x = DTensor.from_local(term, mesh, [Partial()])
    y = to_torch(x)
    assert y.placements == (theirs.Partial(),) and y.full_tensor().unique().item() == size
    y.redistribute(placements=[theirs.Replicate()]).sum().backward()
    assert term.grad.unique().item() == 1.0
    # A strided shard, as FSDP2 makes it.
    s = to_torch(distribute_tensor(torch.arange(8.0), mesh, [StridedShard(0, 2)]))
    assert s.placements == (as_torch_placement(StridedShard(0, 2)),)
    assert from_torch(s).placements == (StridedShard(0, 2),)
    # Placements of both packages may be mixed.
    x = distribute_tensor(whole, mesh, [theirs.Shard(0)])
    assert x.placements == (Shard(0),) and type(x.placements[0]) is Shard
    assert x.redistribute(placements=[theirs.Replicate()]).placements == (theirs.Replicate(),)
    assert theirs.Shard(0) == Shard(0) and hash(theirs.Shard(0)) == hash(Shard(0))
    # They do not mix in an op, and the error says so, if one of this package is the first tensor: torch's own text
    # is raised by torch's class.
    y, scalar = theirs.distribute_tensor(whole, mesh, [theirs.Shard(0)]), theirs.ones((), device_mesh=mesh)
    text = r"a torch DTensor and a phalanx DTensor cannot be mixed in one op; .*from_torch.*to_torch"
    for op in (
        lambda: x + y,
        lambda: x + scalar,
        lambda: torch.cat([x, y]),
        lambda: x.add_(y),
        lambda: torch.equal(x, y),
        lambda: torch._foreach_add_([x], [y]),
        lambda: torch.add(x, 1, out=y),
    ):
        with pytest.raises(RuntimeError, match=text):
            op()
    with pytest.raises(RuntimeError):
        y + x
    for make in (lambda: DTensor.from_local(y, mesh), lambda: distribute_tensor(y, mesh, [Shard(0)])):
        with pytest.raises(TypeError, match=r"is a torch DTensor: convert it with from_torch\(tensor\)"):
            make()


def test_nothing_is_copied_between_the_two_dtensors():
    run_ranks(both_ways, 2, start_torch=True)


def nobody(placement=R, shape=(4,)):
    spec = DTensorSpec(AbstractMesh((2,)), (placement,), shape, None, torch.float32)
    return DTensor._wrap(torch.ones(spec.local_shape), spec)


def test_what_cannot_go_over_is_refused():
    with pytest.raises(
        TypeError, match=r"from_torch: a torch.distributed.tensor.DTensor is needed, not Tensor.*from_local"
    ):
        from_torch(torch.ones(2))
    with pytest.raises(TypeError, match="from_torch: .* not DTensor"):
        from_torch(nobody())
    with pytest.raises(TypeError, match="to_torch: a phalanx.dtensor.DTensor is needed, not Tensor"):
        to_torch(torch.ones(2))
    with pytest.raises(ValueError, match="AbstractMesh .* make it on a DeviceMesh"):
        to_torch(nobody())


def modules(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    x = distribute_tensor(torch.ones(4, 2), mesh, [SizedShard(0, (1, 3))])
    with pytest.raises(ValueError, match=r"torch has no placement like SizedShard.*redistribute to Shard\(0\) first"):
        to_torch(x)
    # A parameter is a DTensor, and of its kind.
    p = torch.nn.Parameter(x)
    assert isinstance(p, torch.nn.Parameter) and isinstance(p, DTensor) and p.requires_grad and p.is_leaf
    assert p.placements == x.placements and p.to_local().data_ptr() == x.to_local().data_ptr()
    p.data = distribute_tensor(torch.zeros(4, 2), mesh, [SizedShard(0, (1, 3))])
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))

    def shard(name, module, mesh):
        if isinstance(module, torch.nn.Linear):
            for key, one in list(module.named_parameters()):
                module.register_parameter(key, torch.nn.Parameter(distribute_tensor(one.detach(), mesh, [Shard(0)])))

    net = distribute_module(plain, mesh, shard)
    state = {key: one.full_tensor().clone() for key, one in net.state_dict().items()}
    for dtype in (torch.float64, torch.bfloat16):
        net.to(dtype)
        assert net[0].weight.dtype == dtype and net[0].weight.placements == (Shard(0),)
        assert net[0].weight.to_local().dtype == dtype and type(net[0].weight) is DTensor
        assert net[1].running_mean.dtype == dtype and net[1].num_batches_tracked.dtype == torch.int64
        assert net[0].weight.requires_grad and isinstance(net[0].weight, torch.nn.Parameter)
        torch.testing.assert_close(net[0].weight.full_tensor(), state["0.weight"].to(dtype))
    net.float()
    net.load_state_dict({key: distribute_tensor(one, mesh, [R]) for key, one in state.items()})
    assert net[0].weight.placements == (Shard(0),)
    torch.testing.assert_close(net[0].weight.full_tensor(), state["0.weight"])
    net.requires_grad_(False)
    assert not net[0].weight.requires_grad
    assert "placements" not in str(net) and "DTensor" in repr(net[0].weight)
    with pytest.raises(
        RuntimeError, match="mixed distributed and non-distributed tensors.*shape .3, 4.*distribute_tensor"
    ):
        torch.nn.functional.linear(torch.ones(3, 4), net[0].weight)


def test_modules_keep_their_placements():
    run_ranks(modules, 2, start_torch=True)


def test_numpy_and_lists_say_what_to_write():
    for call in (lambda x: x.numpy(), lambda x: x.tolist()):
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            call(nobody())
