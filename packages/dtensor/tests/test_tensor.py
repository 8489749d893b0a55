"""DTensor itself: made from local tensors and from whole ones, taken apart, redistributed, and what gradients do."""

import warnings

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx.dtensor import DTensor, Partial, Replicate, Shard, SizedShard, distribute_module, distribute_tensor
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor.debug import CommDebugMode
from ranks import run_ranks

R = Replicate()


def whole(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


# ---- made and taken apart -------------------------------------------------------------------------------------------


def made(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    # D1
    local = torch.full((2, 3), float(rank))
    spec = DTensorSpec(mesh, (Shard(0),), (2 * size, 3), (3, 1), torch.float32)
    x = DTensor(local, spec, requires_grad=False)
    y = DTensor(local, mesh, [Shard(0)])
    assert x._spec is y._spec is spec and x.to_local().data_ptr() == local.data_ptr()
    assert DTensor(local, mesh, [Shard(-2)], shape=(2 * size, 3), dtype=torch.float32)._spec is spec
    with pytest.warns(UserWarning, match="requires_grad=True, but the local tensor has False: use DTensor.from_local"):
        assert DTensor(local, spec, requires_grad=True).requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DTensor(local.clone().requires_grad_(), spec).requires_grad
    with CommDebugMode() as mode:  # D1: without communication
        text = repr(x)
        str(x)
    assert mode.get_total_counts() == 0 and "placements=(Shard(dim=0),)" in text and f"shape=({2 * size}, 3)" in text
    # D9
    for name in ("device_mesh", "placements"):
        with pytest.raises(AttributeError):
            setattr(x, name, None)
    with pytest.raises(AttributeError, match="cannot be changed"):
        x._spec.placements = ()
    # D2: Replicate is the default, on the mesh around
    for z in (DTensor.from_local(local, mesh), DTensor.from_local(local, mesh, [R])):
        assert z.placements == (R,) and z.shape == (2, 3)
    with mesh:  # D9
        assert DTensor.from_local(local).device_mesh is mesh
        assert distribute_tensor(whole(4, 2), placements=[Shard(0)]).device_mesh is mesh
        assert distribute_module(torch.nn.Linear(1, 1)).weight.device_mesh is mesh
    z = DTensor.from_local(local, mesh, [R], run_check=True)  # D2: the values of the first rank
    assert z.to_local().unique().tolist() == [0.0] and local.unique().tolist() == [float(rank)]
    z = DTensor.from_local(local, mesh, [Shard(0)], run_check=True)
    assert torch.equal(z.to_local(), local)
    for bad, text in (
        (torch.ones(2 + rank, 3), "give shape= of the whole tensor, and SizedShard"),
        (torch.ones(2, 3).to((torch.float32, torch.int32)[rank]), "dtype"),
    ):
        with pytest.raises(ValueError, match=text):
            DTensor.from_local(bad, mesh, [Shard(0)], run_check=True)
    grown = torch.ones(2, requires_grad=True)
    z = DTensor.from_local(grown * (rank + 1), mesh, [R], run_check=True)
    assert z.to_local().tolist() == [1.0, 1.0]
    z.to_local().sum().backward()
    assert grown.grad.tolist() == [rank + 1.0] * 2
    # Uneven parts need the shape of the whole.
    part = whole(5, 2)[rank * 3 : rank * 3 + 3]
    z = DTensor.from_local(part, mesh, [Shard(0)], shape=(5, 2), stride=(2, 1))
    assert z.shape == (5, 2) and torch.equal(z.full_tensor(), whole(5, 2))
    with pytest.raises(ValueError, match=r"this rank's part of .* has shape .*write SizedShard for other sizes"):
        DTensor.from_local(part[:1], mesh, [Shard(0)], shape=(5, 2))
    column = torch.ones(3, 2).t()  # its stride is that of a transposed whole
    assert DTensor.from_local(column, mesh, [Shard(0)]).stride() == column.stride() or size > 1
    # D6
    for placements, parts in (
        ([Shard(0)], whole(5, 3).tensor_split(2)),
        ([Shard(1)], whole(5, 3).tensor_split(2, 1)),
        ([SizedShard(0, (1, 4))], whole(5, 3).split((1, 4))),
        ([Shard(0)], whole(1, 3).split((1, 0))),
        (None, (whole(2, 2), whole(2, 2))),
    ):
        source = torch.cat(parts, 0 if placements != [Shard(1)] else 1) if placements else whole(2, 2)
        z = distribute_tensor(source, mesh, placements)
        assert torch.equal(z.to_local(), parts[rank]), (placements, z)
        assert torch.equal(z.full_tensor(), source) and z.shape == source.shape
    mine = torch.full((4,), float(rank))
    assert distribute_tensor(mine, mesh, [Shard(0)]).full_tensor().tolist() == [0.0] * 4
    assert distribute_tensor(mine, mesh, [Shard(0)], src_data_rank=1).full_tensor().tolist() == [1.0] * 4
    with CommDebugMode() as mode:
        assert distribute_tensor(mine, mesh, [Shard(0)], src_data_rank=None).to_local().tolist() == [float(rank)] * 2
    assert mode.get_total_counts() == 0
    z = distribute_tensor(whole(4, 2).requires_grad_(), mesh, [Shard(0)])
    assert z.requires_grad and z.is_leaf and distribute_tensor(z, mesh, [Shard(0)]) is z
    p = distribute_tensor(whole(3), mesh, [Partial()])
    assert torch.equal(p.full_tensor(), whole(3))


def test_tensors_are_made_from_local_and_from_whole_ones():  # D1 D2 D6 D9
    run_ranks(made, 2, start_torch=True)


# ---- gradients ------------------------------------------------------------------------------------------------------


def gradients(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    # D3: the gradient of to_local is a DTensor of the original placements
    for placement, grad_placement in ((Shard(0), Shard(0)), (R, R), (Partial(), R)):
        local = whole(2, 2).requires_grad_()
        x = DTensor.from_local(local, mesh, [placement])
        seen = []
        x.register_hook(seen.append)
        (x.to_local() * 3).sum().backward()
        assert type(seen[0]) is DTensor and seen[0].placements == (grad_placement,)
        assert local.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]] and type(local.grad) is torch.Tensor
    # What the ranks do with it differs: the gradient is a sum.
    x = distribute_tensor(whole(2, 2), mesh, [R]).requires_grad_()
    (x.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert x.grad.placements == (Partial(),) and x.grad.full_tensor().unique().tolist() == [3.0]
    # D5: gradients of from_local come back in its placements
    for placement in (Shard(0), Shard(1), R, Partial()):
        local = (whole(2, 2) + rank).requires_grad_()
        x = DTensor.from_local(local, mesh, [placement])
        y = x.redistribute(placements=[R])
        weight = whole(*y.shape) + 1
        (y.to_local() * weight).sum().backward()
        want = weight.chunk(size, placement.dim)[rank] if isinstance(placement, Shard) else weight
        assert torch.equal(local.grad, want), placement
    local = whole(2, 2).requires_grad_()
    x = DTensor.from_local(local, mesh, [Partial()], grad_placements=[Partial()])
    x.backward(DTensor.from_local(torch.full((2, 2), rank + 1.0), mesh, [Partial()]))
    assert local.grad.unique().tolist() == [rank + 1.0]
    # A gradient that is whole becomes terms, where terms are asked for.
    local = whole(2, 2).requires_grad_()
    DTensor.from_local(local, mesh, [R], grad_placements=[Partial()]).sum().backward()
    dist.all_reduce(local.grad)
    assert local.grad.unique().tolist() == [1.0]
    for call in (
        lambda: DTensor.from_local(local, mesh, [R], grad_placements=[Shard(0)]),
        lambda: x.to_local(grad_placements=[Shard(0)]),
    ):
        with pytest.raises(
            ValueError, match="grad_placements .* another shape than the local tensor.*write the same shards"
        ):
            call()
    # full_tensor
    x = distribute_tensor(whole(4, 2), mesh, [Shard(0)]).requires_grad_()
    (x.full_tensor() * (whole(4, 2) + 1)).sum().backward()
    assert x.grad.placements == (Shard(0),) and torch.equal(x.grad.full_tensor(), whole(4, 2) + 1)
    x.grad = None
    (x.full_tensor(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert x.grad.full_tensor().unique().tolist() == [3.0]
    # No gradient reaches what nothing is made of.
    x = DTensor.from_local(torch.ones(2, requires_grad=True), mesh, [R])
    assert torch.autograd.grad(x.to_local().detach().requires_grad_().sum(), x, allow_unused=True) == (None,)
    with torch.no_grad():
        assert not x.to_local().requires_grad and not x.redistribute(placements=[Shard(0)]).requires_grad
        assert not DTensor.from_local(torch.ones(2, requires_grad=True), mesh, [R]).requires_grad


def twice(rank, size):
    """Every path: f(x) = sum((path(x))^3), f' = 3 x^2, and the gradient of sum(f') is 6 x."""
    mesh = dist.init_device_mesh("cpu", (size,))
    w = whole(4, 2) + 1
    paths = {
        "redistribute": lambda x: x.redistribute(placements=[Shard(1)]),
        "to replicate": lambda x: x.redistribute(placements=[R]),
        "there and back": lambda x: x.redistribute(placements=[Shard(1)]).redistribute(placements=[Shard(0)]),
        "async": lambda x: x.redistribute(placements=[R], async_op=True),
        "to_local": lambda x: DTensor.from_local(x.to_local() * 1, mesh, [Shard(0)]),
        "full_tensor": lambda x: distributed(x.full_tensor(), mesh),
    }
    for name, path in paths.items():
        x = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
        y = (path(x) ** 3).sum().redistribute(placements=[R]).to_local()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        assert type(first) is DTensor and first.placements == (Shard(0),), name
        torch.testing.assert_close(first.full_tensor(), 3 * w**2, msg=name)
        first.sum().full_tensor().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 6 * w, msg=name)
        assert x.grad.placements == (Shard(0),)
    local = w.chunk(size)[rank].clone().requires_grad_()
    x = DTensor.from_local(local, mesh, [Shard(0)])
    (first,) = torch.autograd.grad((x**3).sum().full_tensor(), local, create_graph=True)
    first.sum().backward()
    torch.testing.assert_close(local.grad, 6 * local.detach())


def distributed(tensor, mesh):
    return DTensor.from_local(tensor, mesh, [R])


def test_gradients_come_back_in_the_placements_of_what_they_are_of():  # D3 D5
    run_ranks(gradients, 2, start_torch=True)


def test_gradients_have_gradients():  # D11
    run_ranks(twice, 2, start_torch=True)


# ---- redistribute ---------------------------------------------------------------------------------------------------


def moved(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    x = distribute_tensor(whole(4, 6), mesh, [Shard(0)]).requires_grad_()
    before = x.to_local().detach().clone()
    # D4: out of place
    y = x.redistribute(placements=[Shard(1)])
    assert y is not x and torch.equal(x.to_local(), before) and y.placements == (Shard(1),)
    assert torch.equal(y.to_local(), whole(4, 6).chunk(size, 1)[rank])
    assert y.redistribute(mesh, [Shard(-1)]).placements == (Shard(1),)
    assert x.detach().redistribute(placements=[Shard(0)]).to_local().data_ptr() == x.to_local().data_ptr()
    # async_op: the first use waits
    y = x.detach().redistribute(placements=[R], async_op=True)
    assert torch.equal(y.to_local() + 0, whole(4, 6)) and torch.equal((y * 1).to_local(), whole(4, 6))
    pending = DTensor.from_local(torch.ones(3), mesh, [Partial()]).redistribute(placements=[R], async_op=True)
    assert isinstance(pending._local_tensor, pc.AsyncCollectiveTensor)
    assert pending.to_local().tolist() == [float(size)] * 3 and pending.full_tensor().tolist() == [float(size)] * 3
    # Dtypes of both directions
    seen = []
    y = x.redistribute(placements=[R], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    assert y.dtype == torch.bfloat16 and y.to_local().dtype == torch.bfloat16
    x.register_hook(seen.append)
    y.to_local().float().sum().backward()
    assert seen[0].dtype == torch.float32 and x.grad.dtype == torch.float32 and x.grad.placements == (Shard(0),)
    assert x.grad.full_tensor().unique().tolist() == [1.0]
    # D4: errors
    with pytest.raises(RuntimeError, match=r"placements are needed: write redistribute\(placements=\[...\]\)"):
        x.redistribute()
    with pytest.raises(RuntimeError, match=r"cannot be made Partial; write Replicate\(\) or Shard\(dim\)"):
        x.redistribute(placements=[Partial()])
    with pytest.raises(ValueError, match=r"2 placements .* for a mesh of 1 dims"):
        x.redistribute(placements=[R, R])
    with pytest.raises(IndexError, match="has 2, so write -2 to 1"):
        x.redistribute(placements=[Shard(2)])


def test_redistribute_moves_out_of_place():  # D4
    run_ranks(moved, 2, start_torch=True)


def outside(rank, size):
    """A mesh of some of the ranks: the others hold nothing, and follow."""
    mesh = dist.DeviceMesh("cpu", [0, 2])
    inside = rank != 1
    x = distribute_tensor(whole(5, 2), mesh, [Shard(0)])
    y = DTensor.from_local(torch.full((2, 2), float(rank)), mesh, [Shard(0)])  # D2
    assert x.shape == (5, 2) and y.shape == (4, 2)
    z = torch.relu(x - 3).sum() + 1
    moved = x.redistribute(placements=[Shard(1)])
    if inside:
        index = rank // 2
        assert torch.equal(x.to_local(), whole(5, 2).tensor_split([3])[index])
        assert torch.equal(moved.to_local(), whole(5, 2)[:, index : index + 1])
        assert z.full_tensor().item() == torch.relu(whole(5, 2) - 3).sum().item() + 1
        assert (z > 0).item() is True
    else:
        for one in (x, y, z, moved):
            assert one.to_local().shape == (0,) and one.to_local().dtype == torch.float32
        assert "placements" in repr(x)
        with pytest.raises(RuntimeError, match="outside the mesh"):
            z.item()
    # To the mesh of the others, and back.
    other = dist.DeviceMesh("cpu", [1])
    there = x.redistribute(other, [R])
    assert torch.equal(there.to_local(), whole(5, 2)) if not inside else there.to_local().shape == (0,)
    back = there.redistribute(mesh, [Shard(0)])
    assert torch.equal(back.to_local(), x.to_local())
    if inside:
        w = distribute_tensor(whole(2, 2), mesh, [R]).requires_grad_()
        (x @ w).sum().backward()
        assert torch.equal(w.grad.full_tensor(), whole(5, 2).sum(0)[:, None].expand(2, 2))


def test_ranks_outside_the_mesh_hold_nothing():  # D2
    run_ranks(outside, 3, start_torch=True)


# ---- ops ------------------------------------------------------------------------------------------------------------


def used(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    w = whole(4, 6)
    x = distribute_tensor(w, mesh, [Shard(0)])
    # Values that leave the mesh are of the whole, also where it is a sum of terms.
    term = DTensor.from_local(torch.full((), rank + 0.5), mesh, [Partial()])
    assert term.item() == float(term) == 2.0 and bool(term) is True and int(term) == 2
    low = DTensor.from_local(torch.full((), float(rank)), mesh, [Partial("min")])
    assert low.item() == 0.0 and bool(low) is False
    assert x.sum().item() == w.sum().item() and x.mean().item() == w.mean().item()
    assert bool((x >= 0).all()) and not bool((x < 0).any())
    taken = []
    if x.sum() > 0:  # control flow
        taken.append(1)
    assert taken == [1] and [row.sum().item() for row in x.unbind()] == w.sum(1).tolist()
    assert torch.equal(x, distribute_tensor(w, mesh, [Shard(1)])) and not torch.equal(x, x + 1)
    assert torch.allclose(x, x + 1e-9)
    # In place: the local tensor changes, and what it shares memory with
    local = x.to_local()
    x.add_(1).mul_(2)
    assert torch.equal(local, ((w + 1) * 2).chunk(size)[rank]) and x.placements == (Shard(0),)
    x.copy_(distribute_tensor(w, mesh, [Shard(1)]))
    assert torch.equal(local, w.chunk(size)[rank])
    x[:, 1] = 0
    assert local[:, 1].unique().tolist() == [0.0]
    x[:, 1].add_(5)
    assert local[:, 1].unique().tolist() == [5.0]
    x.zero_()
    assert x.full_tensor().unique().tolist() == [0.0]
    # A view of a view of the same memory
    y = distribute_tensor(w, mesh, [Shard(0)])
    y.t().view(6, 4)[2].fill_(-1)
    assert torch.equal(y.full_tensor()[:, 2], torch.full((4,), -1.0))
    # Where a view needed communication, such a view is a copy, and writing into it is refused.
    y = distribute_tensor(w, mesh, [Shard(0)])
    with pytest.raises(
        RuntimeError, match="writes into a view that needed communication.*Redistribute that tensor before"
    ):
        y[1].add_(1)
    assert torch.equal(y.full_tensor(), w)
    assert torch.equal(y[1].clone().add_(1).full_tensor(), w[1] + 1)
    # So is one of what lies otherwise here than torch says that the whole does, as the gradient of elu.
    lies = distribute_tensor(whole(4, 3, 2), mesh, [Shard(0)]).transpose(1, 2)
    box = distribute_tensor(whole(4, 2, 3), mesh, [Shard(0)])
    gradient = torch.ops.aten.elu_backward(lies, 1.0, 1.0, 1.0, False, box)
    assert torch.equal(gradient.view(8, 3).full_tensor(), whole(4, 3, 2).transpose(1, 2).reshape(8, 3))
    with pytest.raises(RuntimeError, match="needed communication, or another layout"):
        gradient.view(8, 3).add_(1)
    # out=
    out = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)])
    assert torch.add(y, y, out=out) is out and out.placements == (Shard(1),)
    assert torch.equal(out.full_tensor(), 2 * w)
    with pytest.raises(RuntimeError, match="mixed"):
        torch.add(y, y, out=torch.zeros(4, 6))
    # Views
    for view in (
        lambda t: t.t(),
        lambda t: t.reshape(24),
        lambda t: t.view(2, 2, 6),
        lambda t: t.view(4, 2, 3).transpose(0, 1),
        lambda t: t[1:3],
        lambda t: t[:, ::2],
        lambda t: t[-1],
        lambda t: t[..., None].expand(4, 6, 2),
        lambda t: t.permute(1, 0).flatten(),
        lambda t: torch.cat(t.split(2, 1), 0),
        lambda t: torch.stack(t.chunk(2), 2),
        lambda t: t.unflatten(1, (3, 2)).movedim(2, 0),
        lambda t: t.narrow(0, 1, 2).squeeze().unsqueeze(0),
        lambda t: t.diagonal(),
        lambda t: t.unfold(1, 2, 2),
        lambda t: t.roll(1, 0),
        lambda t: (
            t[torch.tensor([0, 3])] if not isinstance(t, DTensor) else t[distribute_tensor(torch.tensor([0, 3]), mesh)]
        ),
    ):
        for placement in (Shard(0), Shard(1), R):
            got = view(distribute_tensor(w, mesh, [placement]))
            want = view(w)
            assert got.shape == want.shape and got.stride() == want.stride(), (placement, got.stride(), want.stride())
            assert torch.equal(got.full_tensor(), want), placement
    # Plain tensors without dims may be mixed in, others not. D8
    assert torch.equal((y * torch.tensor(2.0)).full_tensor(), 2 * w)
    with pytest.raises(RuntimeError, match="got mixed distributed and non-distributed tensors"):
        y * torch.ones(4, 6)


def test_ops_views_and_writes_are_those_of_one_process():  # D8
    run_ranks(used, 2, start_torch=True)


# ---- modules --------------------------------------------------------------------------------------------------------


def modules(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    calls = []

    def partition(name, module, mesh):
        calls.append(name)
        if name == "0":
            module.register_parameter(
                "weight", torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
            )

    def inputs(module, inputs, mesh):
        return (DTensor.from_local(inputs[0], mesh, [R]),)

    def outputs(module, outputs, mesh):
        return outputs.full_tensor()

    torch.manual_seed(rank)  # the first rank's values count
    # In float64: of these gradients nearly all cancels out.
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
    net[1].weight.requires_grad_(False)
    assert distribute_module(net, mesh, partition, inputs, outputs) is net and calls == ["", "0", "1"]
    assert net[0].weight.placements == (Shard(0),) and net[0].bias.placements == net[1].running_mean.placements == (R,)
    assert not net[1].weight.requires_grad and net[0].bias.requires_grad
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
    x = whole(5, 3).double()
    got, want = net(x), alone(x)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, want)
    got.pow(3).sum().backward()
    want.pow(3).sum().backward()
    torch.testing.assert_close(net[0].weight.grad.full_tensor(), alone[0].weight.grad)
    with pytest.raises(RuntimeError, match="distributed before: call it once for each module"):
        distribute_module(net, mesh)


def test_modules_are_distributed_with_hooks():  # D7
    run_ranks(modules, 2, start_torch=True)
