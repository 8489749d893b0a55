"""The barrier as a function and as an op: eager, in graphs, over every transport."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import phalanx.collectives as pc
from c10d_groups import apart, join, run_groups
from phalanx.core import FileStore, MismatchError, World
from ranks import run_ranks, scratch

STORE = dist.distributed_c10d._get_default_store


def all_come(group, rank, size, turn):
    """After a barrier every rank sees what the others did before it."""
    STORE().set(f"{turn}/{rank}", b"came")
    result = pc.barrier(group)
    assert STORE().check([f"{turn}/{other}" for other in range(size)])
    assert type(result) is torch.Tensor and result.shape == (0,)


def everywhere(rank, size):
    group = dist.group.WORLD
    mesh = init_device_mesh("cpu", (size,))
    for turn, form in enumerate((group, None, group.group_name, list(range(size)), mesh, (mesh, 0))):
        all_come(form, rank, size, turn)
    x = torch.full((2, 3), float(rank)).t()
    y = pc.barrier(group, x)
    assert torch.equal(y, x) and y.is_contiguous() and y.data_ptr() != x.data_ptr()
    later = pc.all_reduce(x, "sum", group)
    assert torch.equal(pc.barrier(group, later), torch.full((3, 2), float(sum(range(size)))))  # it is complete
    raw = torch.ops.phalanx.all_reduce(x, "sum", group.group_name)
    assert torch.equal(torch.ops.phalanx.barrier(raw, group.group_name), later + 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pc.barrier(group)
    assert any(event.name == "phalanx::barrier" for event in profile.events())
    leaf = torch.ones(2, requires_grad=True)
    (pc.barrier(group, leaf) * 3).sum().backward()
    assert leaf.grad.tolist() == [3.0, 3.0]
    for call, error, text in (
        (lambda: pc.barrier([0, 0]), ValueError, "rank 0 is listed twice"),
        (lambda: pc.barrier(group, 3), TypeError, "must be a torch.Tensor or None, not int"),
    ):
        with pytest.raises(error, match=text):
            call()
    with pc.coalescing_manager(group):
        z = pc.all_reduce(x, "sum", group)
        with pytest.raises(RuntimeError, match="call the barrier after the with block"):
            pc.barrier(group)
    assert torch.equal(z + 0, later + 0)
    if size > 2:  # of some of the ranks only: here, the first and the last
        some = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            pc.barrier(some)
        dist.destroy_process_group(some)


@pytest.mark.parametrize("by", ["core", "torch"])
def test_nobody_passes_before_all_have_come(by):  # P12, P14
    run_ranks(everywhere, 3, start_torch=True, env=apart(3) if by == "torch" else None, timeout=90)


def on_the_core(rank, size):
    group = dist.group.WORLD
    core = pc.core_group(group)
    before = core.sequence
    pc.barrier(group)
    assert core.sequence == before + 1
    with pc.coalescing_manager(group, async_ops=True) as cm:
        pc.all_reduce(torch.ones(4), "sum", group)
    pc.barrier(group)  # in order with the others
    assert cm.works[0].is_completed()
    other = partial(pc.all_reduce_, torch.ones(1), "sum", group) if rank else partial(pc.barrier, group)
    with pytest.raises(MismatchError, match="barrier"):
        other()


def without_process_groups(rank, size):
    with World(rank, size, FileStore(scratch() / "store"), timeout_ms=60_000) as world:
        group = world.create_group("tp", range(size))
        assert pc.barrier(group, torch.ones(2)).tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match="there are no process groups"):
            pc.barrier()
        group.barrier()


def test_on_a_group_of_the_core_it_is_one_of_the_cores_calls():  # P12
    run_ranks(on_the_core, 2, start_torch=True)
    run_ranks(without_process_groups, 2)


class Graphs:
    """A backend that keeps the graphs and runs them as they are."""

    def __init__(self):
        self.ops = []

    def __call__(self, module, _):
        self.ops.append([node for node in module.graph.nodes if "phalanx" in str(node.target)])
        return module.forward


def unused(x, group):
    pc.barrier(group)
    return x + 1


def between(x, group):
    """Each of these calls needs what the one before it gave."""
    a = pc.barrier(group, pc.all_reduce(x, "sum", group))
    b = pc.barrier(group, pc.all_gather_tensor(a * 2, 0, group))
    return pc.broadcast(b.sin(), 1, group), a


def compiled(rank, size):
    group = dist.group.WORLD
    x = torch.arange(4.0) + rank
    graphs = Graphs()
    assert torch.equal(torch.compile(unused, backend=graphs, fullgraph=True)(x, group), x + 1)
    ((node,),) = graphs.ops
    assert str(node.target).removesuffix(".default") == "phalanx.barrier"
    assert node.args[1] == group.group_name
    core = pc.core_group(group)
    for backend in ("aot_eager", "inductor"):
        torch.compiler.reset()
        graph = torch.compile(unused, backend=backend, fullgraph=True)
        for _ in range(2):
            before = core.sequence
            assert torch.equal(graph(x, group), x + 1)
            assert core.sequence == before + 1  # it is not dropped, though nobody uses what it gives
        graph = torch.compile(between, backend=backend, fullgraph=True, dynamic=True)
        wanted = [pc.wait_tensor(each) for each in between(x, group)]
        for turn in range(4):
            # One rank compiled, the other eager: were they out of order, the core would say so.
            found = (graph if rank == turn % 2 else between)(x, group)
            for one, two in zip(found, wanted, strict=True):
                torch.testing.assert_close(pc.wait_tensor(one), two)
        leaf = torch.ones(3, requires_grad=True)
        torch.compile(lambda t: pc.barrier(group, t * 2), backend=backend, fullgraph=True)(leaf).sum().backward()
        assert leaf.grad.tolist() == [2.0] * 3
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = core.sequence
    with FakeTensorMode():
        assert pc.barrier(group, torch.empty(2, 3)).shape == (2, 3)
    exported = torch.export.export(Module(), (torch.ones(4),))
    assert "phalanx.barrier.default" in str(exported.graph)
    assert core.sequence == before  # nothing was sent


class Module(torch.nn.Module):
    def forward(self, x):
        return pc.barrier(dist.group.WORLD, x + 1) * 2


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_it_compiles_into_one_graph_and_stays_there():  # P12
    run_ranks(compiled, 2, start_torch=True, timeout=300)


def checked(rank, size):
    name = dist.group.WORLD.group_name
    torch.library.opcheck(torch.ops.phalanx.barrier.default, (torch.rand(3, requires_grad=True), name))


def test_opcheck_finds_nothing():  # P12
    run_ranks(checked, 1, start_torch=True)


def by_device(rank, size):
    join(rank, size, backend="cpu:phalanx,cuda:gloo")  # CUDA is never touched here
    group = dist.group.WORLD
    counter = group._get_backend(torch.device("cpu")) if type(group) is dist.ProcessGroup else group
    before = counter._get_sequence_number_for_group()
    dist.barrier()
    dist.barrier(async_op=True).wait()
    assert counter._get_sequence_number_for_group() == before + 2
    all_come(group, rank, size, "phalanx")
    dist.destroy_process_group()


def test_torchs_barrier_reaches_the_backend_of_the_device():  # P14
    run_groups(by_device, 2)


def other_backend(rank, size):
    """A group that the core does not serve: torch's barrier on the device of the tensor."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    assert pc.barrier(None, torch.ones(3)).tolist() == [1.0] * 3
    assert pc.barrier().shape == (0,)
    dist.destroy_process_group()


def test_a_group_of_another_backend_has_it_too():  # P12, P14
    run_ranks(other_backend, 1)
