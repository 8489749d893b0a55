"""DTensors on meshes of GPUs give what they give on the CPU: on the device of the tests where there is no GPU."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fake_torch_cuda
from c10d_groups import run_groups
from phalanx.core.random import Kind
from phalanx.dtensor import AbstractMesh, DTensor, Partial, Replicate, Shard, _factories, distribute_tensor
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._random import fill
from phalanx.dtensor._random.fill import Distribution, fill_local
from phalanx.dtensor._random.state import manual_seed
from phalanx.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from ranks import scratch

R = Replicate()
KEY = 0xFEDCBA9876543210


@pytest.fixture(autouse=True)
def _device():
    fake_torch_cuda.needs_cuda()


def meshes(rank, size):
    """Inside a rank: the same ranks as a mesh of the CPU and one of GPUs."""
    fake_torch_cuda.load()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(str(scratch() / "store"), size)
    dist.init_process_group("cpu:phalanx,cuda:phalanx", store=store, rank=rank, world_size=size)
    return init_device_mesh("cpu", (size,)), init_device_mesh("cuda", (size,))


def same(on_gpu, on_cpu):
    """Equal placements and bits."""
    assert on_gpu.placements == on_cpu.placements and on_gpu.shape == on_cpu.shape
    mine, theirs = on_gpu.to_local(), on_cpu.to_local()
    assert mine.is_cuda and mine.stride() == theirs.stride()
    assert torch.equal(mine.cpu(), theirs + 0)


# ---- random numbers --------------------------------------------------------------------------------------------------


def fills(rank, size):
    fake_torch_cuda.load()
    laws = [(kind, dtype) for kind in (Kind.NORMAL, Kind.UNIFORM, Kind.EXPONENTIAL) for dtype in (
        torch.float32, torch.float64, torch.bfloat16, torch.float16)]  # fmt: skip
    cases = [(Distribution(kind, 0.5, 1.0), dtype) for kind, dtype in laws]
    cases += [(Distribution(Kind.BERNOULLI, 0.3, 0.0), torch.bool), (Distribution(None, -5, 11), torch.int64)]
    cases += [(Distribution(Kind.NORMAL, 0.0, 1.0), torch.complex64)]
    for (law, dtype), at, placement in itertools.product(cases, range(2), (Shard(0), Shard(1), R)):
        for stride in (None, (1, 7, 35)):
            spec = DTensorSpec(AbstractMesh((2,), (at,)), (placement,), (7, 5, 4), stride, dtype)
            on_cpu, on_gpu = (
                torch.empty_strided(spec.local_shape, spec.local_stride, dtype=dtype, device=device)
                for device in ("cpu", "cuda")
            )
            fill_local(on_cpu, spec, law, KEY)
            fill_local(on_gpu, spec, law, KEY)
            assert torch.equal(on_gpu.cpu(), on_cpu)
    # On the current stream: what was put on it before is over, and what follows sees the numbers.
    spec = DTensorSpec(AbstractMesh((1,), (0,)), (R,), (1000,), None, torch.float32)
    on_cpu, on_gpu = torch.empty(1000), torch.zeros(1000, device="cuda")
    fill_local(on_cpu, spec, laws and Distribution(Kind.NORMAL, 0.0, 1.0), KEY)
    with torch.cuda.stream(torch.cuda.Stream()):
        fill_local(on_gpu.fill_(7), spec, Distribution(Kind.NORMAL, 0.0, 1.0), KEY)
        assert torch.equal((on_gpu * 2).cpu(), on_cpu * 2)
    # Where the core has no kernels the numbers come from the host.
    fill._fills_on.cache_clear()
    fill.fill, kept = _without_kernels, fill.fill
    assert not fill._fills_on(0)
    fill.fill = kept
    again = torch.zeros(1000, device="cuda")
    fill_local(again, spec, Distribution(Kind.NORMAL, 0.0, 1.0), KEY)
    assert torch.equal(again.cpu(), on_cpu)


def _without_kernels(*args, **kwargs):
    from phalanx.core import UnsupportedError

    raise UnsupportedError("no kernels")


def test_elements_made_on_a_gpu_have_the_bits_of_the_host():  # D10
    run_groups(fills, 1, timeout=240)


def random_ops(rank, size):
    on_cpu, on_gpu = meshes(rank, size)

    def numbers(mesh):
        manual_seed(7, mesh)
        made = [
            _factories.randn(5, 6, device_mesh=mesh, placements=[Shard(0)]),
            _factories.rand(5, 6, device_mesh=mesh, placements=[Shard(1)]),
            _factories.randn(3, 4, device_mesh=mesh, placements=[R]),
        ]
        x = _factories.ones(9, 4, device_mesh=mesh, placements=[Shard(0)])
        made += [torch.nn.functional.dropout(x, 0.4), torch.rand_like(x), torch.randn_like(x), torch.bernoulli(x / 2)]
        made += [torch.randint_like(x, 3, 90), torch.empty_like(x).normal_(1.0, 2.0), torch.empty_like(x).uniform_()]
        made += [torch.empty_like(x).exponential_(), torch.empty_like(x).log_normal_()]
        made += [torch.multinomial(x, 3), torch.multinomial(x, 3, replacement=True)]
        return made

    for one, other in zip(numbers(on_gpu), numbers(on_cpu), strict=True):
        same(one, other)
    dist.destroy_process_group()


def test_random_ops_and_factories_have_the_bits_of_the_cpu():  # D10
    run_groups(random_ops, 2, timeout=280)


def agreeing(rank, size):
    _, mesh = meshes(rank, size)
    torch.manual_seed(rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = _factories.randn(4, 4, device_mesh=mesh, placements=[R])
    assert any("random state" in str(one.message) for one in said) == (rank > 0)
    mine = made.to_local()
    every = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(every, mine)
    assert all(torch.equal(each.cpu(), mine.cpu()) for each in every)
    dist.destroy_process_group()


def test_ranks_with_different_random_states_agree_on_the_first_one():
    run_groups(agreeing, 2, timeout=280)


# ---- values ----------------------------------------------------------------------------------------------------------


def moves(rank, size):
    on_cpu, on_gpu = meshes(rank, size)
    torch.manual_seed(0)
    kinds = [Shard(0), Shard(1), R, Partial(), Partial("max")]
    for shape in ((4, 6), (5, 3), (1, 2)):
        whole = torch.randn(shape)
        for source, target in itertools.product(kinds, kinds):
            if target.is_partial() and target != source:
                continue
            parts = []
            for mesh in (on_cpu, on_gpu):
                local = whole.to(mesh.device_type)
                if source.is_partial():
                    made = DTensor.from_local(local - rank, mesh, [source])
                else:
                    made = distribute_tensor(local, mesh, [source])
                parts.append(made.redistribute(mesh, [target]))
            same(parts[1], parts[0])
            if not source.is_partial():
                assert torch.equal(parts[1].full_tensor().cpu(), whole)
    dist.destroy_process_group()


def test_every_move_gives_what_it_gives_on_the_cpu():  # D4
    run_groups(moves, 2, timeout=280)


def several_ops(mesh):
    torch.manual_seed(0)
    a, b, w = torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 4)

    def on(tensor, placement):
        return distribute_tensor(tensor.to(mesh.device_type), mesh, [placement])

    x, y, r = on(a, Shard(0)), on(b, Shard(0)), on(w, R)
    made = [x + y, x * 2, x.relu(), x @ r, x.t() @ y, x.sum(), x.sum(0), x.mean(1), x.softmax(0), x.softmax(1)]
    made += [on(w, Shard(1)) @ on(w, Shard(0)), torch.cat([x, y], 1), x.view(24), x.max(), x[1:4]]
    made += [torch.nn.functional.layer_norm(x, (4,)), x.cumsum(0), x.argmax(1), x.sort(1).values, x.clone().add_(1)]
    return made


def ops(rank, size):
    on_cpu, on_gpu = meshes(rank, size)
    for one, other in zip(several_ops(on_gpu), several_ops(on_cpu), strict=True):
        assert one.placements == other.placements
        mine = one.full_tensor()
        assert mine.is_cuda
        torch.testing.assert_close(mine.cpu(), other.full_tensor())
    dist.destroy_process_group()


def test_ops_give_what_they_give_on_the_cpu():
    run_groups(ops, 2, timeout=280)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def parallel(rank, size):
    mesh_of_cpu, mesh_of_gpus = meshes(rank, size)
    results = []
    for mesh in (mesh_of_cpu, mesh_of_gpus):
        torch.manual_seed(3)
        model = Mlp().to(mesh.device_type)
        x = torch.randn(5, 8).to(mesh.device_type).requires_grad_()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        manual_seed(5, mesh)
        out = nn.functional.dropout(model(x), 0.2)
        out.square().sum().backward() if not isinstance(out, DTensor) else out.full_tensor().square().sum().backward()
        grads = [each.grad.full_tensor() for each in model.parameters()]
        results.append([x.grad, *grads])
    for one, other in zip(*results, strict=True):
        assert other.is_cuda
        torch.testing.assert_close(other.cpu(), one)
    dist.destroy_process_group()


def test_a_tensor_parallel_mlp_has_the_gradients_of_the_cpu():
    run_groups(parallel, 2, timeout=280)
