"""Which steps a transfer takes, what it says of them, and what it refuses. Nothing is sent here."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.dtensor import AbstractMesh, Partial, Replicate, Shard, SizedShard, StridedShard
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor._torch_compat import hint, ranks_of_mesh

R, P = Replicate(), Partial


@pytest.fixture
def fake_ranks():
    """Rank 1 of a world of 4 that nobody else is in: any communication does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def steps_of(mesh_shape, source, target, shape, coordinate=()):
    mesh = AbstractMesh(mesh_shape, coordinate)
    return plan_redistribute(DTensorSpec(mesh, source, shape), DTensorSpec(mesh, target, shape)).steps


def names(*args):
    return [step.collective for step in steps_of(*args)]


# ---- which steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        (R, R, []),
        (Shard(0), R, ["all_gather"]),
        (Shard(0), Shard(1), ["all_to_all"]),
        (Shard(0), SizedShard(0, (1, 3, 2, 2)), ["all_to_all"]),
        (Shard(0), SizedShard(0, (2, 2, 2, 2)), ["relabel"]),
        (StridedShard(0, 2), R, ["all_gather"]),
        (P(), R, ["all_reduce"]),
        (P("max"), Shard(1), ["reduce_scatter"]),
        (R, Shard(0), ["slice"]),
        (R, P(), ["partial"]),
        (Shard(0), P(), ["all_gather", "partial"]),
        (P(), P("max"), ["all_reduce", "partial"]),
    ],
)
def test_one_mesh_dim_takes_its_collective(source, target, wanted):
    assert names((4,), (source,), (target,), (8, 4)) == wanted


def test_what_one_rank_has_most_of_is_spread_first_and_not_padded_for_all():
    assert names((4,), (SizedShard(0, (4096, 0, 0, 0)),), (R,), (4096, 64)) == ["all_to_all", "all_gather"]
    assert names((4,), (SizedShard(0, (1025, 1024, 1024, 1023)),), (R,), (4096, 64)) == ["all_gather"]


@pytest.mark.parametrize(
    ("source", "target", "shape", "wanted"),
    [
        # The inner split of a dim is undone first.
        ((Shard(0), Shard(0)), (R, R), (512, 512), ["all_gather", "all_gather"]),
        ((Shard(0), Shard(0)), (Shard(0), R), (8, 4), ["all_gather"]),
        ((R, R), (Shard(0), Shard(0)), (8, 4), ["slice", "slice"]),
        # All at once where that is less than one after the other.
        ((Shard(0), Shard(0)), (R, R), (8, 4), ["exchange"]),
        ((Shard(0), Shard(0)), (R, Shard(0)), (8, 4), ["exchange"]),
        ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (8, 4), ["exchange"]),
        # A large sum is scattered first, a small one is not.
        ((P(), P()), (R, R), (8, 4), ["all_reduce", "all_reduce"]),
        ((P(), P()), (R, R), (4096, 256), ["reduce_scatter", "all_reduce", "all_gather"]),
    ],
)
def test_two_mesh_dims_take_the_cheapest_way(source, target, shape, wanted):
    assert names((2, 2), source, target, shape) == wanted


def test_reductions_that_do_not_commute_go_from_the_last_mesh_dim_to_the_first():
    for source in ((P("max"), P("sum")), (P("sum"), P("max")), (P("sum"), P("product"))):
        assert steps_of((2, 2), source, (R, R), (8, 4))[0].mesh_dims == (1,)


def test_a_strided_shard_is_gathered_over_its_own_mesh_dim_alone():
    # FSDP over tensor parallelism: the rows of a rank come from its own column of the mesh.
    (step,) = steps_of((2, 2), (StridedShard(0, 2), Shard(0)), (R, Shard(0)), (8, 4))
    assert (step.collective, step.mesh_dims) == ("exchange", (0,))


def test_mesh_dims_of_one_rank_cost_nothing():
    for source, target in itertools.product((R, Shard(0), SizedShard(0, (8,)), StridedShard(0, 2), P()), repeat=2):
        steps = steps_of((1, 2), (source, Shard(0)), (target, Shard(0)), (8, 4)) if source != target else ()
        assert {step.collective for step in steps} <= {"relabel"}
        assert sum(step.cost_us for step in steps) == 0


def test_every_rank_takes_the_same_steps():
    ways = [((Shard(0), Shard(1)), (Shard(1), Shard(0))), ((P(), Shard(0)), (Shard(0), R)), ((P(), P()), (Shard(1), R))]
    for source, target in ways:
        for shape in ((7, 5), (1, 1), (0, 3), (512, 512)):
            ranks = [None, *itertools.product(range(2), range(3))]
            assert len({steps_of((2, 3), source, target, shape, at) for at in ranks}) == 1


def test_a_large_mesh_is_planned_too():
    mesh = AbstractMesh((8, 8, 8))
    source, target = (Shard(0), Shard(1), P()), (Shard(1), Shard(2), Shard(2))
    way = plan_redistribute(DTensorSpec(mesh, source, (64, 64, 64)), DTensorSpec(mesh, target, (64, 64, 64)))
    assert (way.steps[0].source, way.steps[-1].target) == (source, target)
    assert all(a.target == b.source for a, b in itertools.pairwise(way.steps))


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_a_transfer_prints_a_line_for_each_step():
    mesh = AbstractMesh((2, 2))
    way = plan_redistribute(DTensorSpec(mesh, (P(), Shard(0)), (8, 4)), DTensorSpec(mesh, (R, R), (8, 4)))
    lines = str(way).splitlines()
    assert len(lines) == len(way.steps) == 2
    assert lines[0].startswith("all_reduce     mesh dim 0: (P(sum), S(0)) -> (R, S(0)), 64 bytes per rank, ")
    assert lines[1].startswith("all_gather     mesh dim 1: (R, S(0)) -> (R, R), 64 bytes per rank, ")
    assert way.bytes_moved == 128
    assert way.cost_us == sum(step.cost_us for step in way.steps) > 6
    assert str(plan_redistribute(way.source, way.source)) == "nothing to do"


def test_a_transfer_is_made_once():
    mesh = AbstractMesh((2,))
    specs = [DTensorSpec(mesh, (one,), (8, 4)) for one in (Shard(0), R)]
    assert plan_redistribute(*specs) is plan_redistribute(*specs)


# ---- what it refuses -------------------------------------------------------------------------------------------------


def test_shape_and_dtype_must_be_the_same():
    mesh = AbstractMesh((2,))
    for other in (
        DTensorSpec(mesh, (R,), (4, 8)),
        DTensorSpec(mesh, (R,), (8, 4), None, torch.int64),
        DTensorSpec(mesh, (R,), (32,)),
    ):
        with pytest.raises(ValueError, match="shape and dtype must be the same"):
            plan_redistribute(DTensorSpec(mesh, (R,), (8, 4)), other)


def test_a_mesh_without_ranks_cannot_communicate():
    mesh = AbstractMesh((2,), (1,))
    whole = torch.arange(8.0)
    specs = {one: DTensorSpec(mesh, (one,), (8,)) for one in (R, Shard(0), P())}
    assert torch.equal(plan_redistribute(specs[R], specs[Shard(0)]).run(whole), whole[4:])
    assert torch.equal(plan_redistribute(specs[R], specs[P()]).run(whole), torch.zeros(8))
    with pytest.raises(RuntimeError, match=r"all_gather over an AbstractMesh \(2,\), which has no ranks"):
        plan_redistribute(specs[Shard(0)], specs[R]).run(whole[4:])
    with pytest.raises(ValueError, match="an AbstractMesh has no ranks, so nothing can be sent"):
        plan_redistribute(specs[R], DTensorSpec(AbstractMesh((4,)), (R,), (8,)))


# ---- without data ----------------------------------------------------------------------------------------------------

WAYS = [
    ((Shard(0), R), (R, R)),
    ((Shard(0), Shard(1)), (Shard(1), Shard(0))),
    ((P(), P()), (R, Shard(0))),
    ((R, StridedShard(0, 2)), (R, R)),
    ((R, R), (Shard(0), P())),
    ((Shard(1), SizedShard(0, (1, 7))), (Shard(1), Shard(0))),
]


def test_fake_tensors_get_the_shapes_of_the_target(fake_ranks):
    mesh, column = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [3, 1])
    with FakeTensorMode():  # in which the meshes are looked at for the first time
        for source, target in WAYS:
            given, made = DTensorSpec(mesh, source, (8, 6)), DTensorSpec(mesh, target, (8, 6))
            assert plan_redistribute(given, made).run(torch.empty(given.local_shape)).shape == made.local_shape
        given, made = DTensorSpec(mesh, (Shard(0), R), (8, 6)), DTensorSpec(column, (Shard(1),), (8, 6))
        assert plan_redistribute(given, made).run(torch.empty(given.local_shape)).shape == made.local_shape
    assert ranks_of_mesh(column) == (3, 1)


def moved(mesh, source, target, x):
    rows = x.shape[0] * (2 if source[0].is_shard() else 1)
    return plan_redistribute(DTensorSpec(mesh, source, (rows, 8)), DTensorSpec(mesh, target, (rows, 8))).run(x)


def test_graphs_with_dynamic_sizes_serve_all_sizes_that_divide_evenly(fake_ranks):
    mesh = init_device_mesh("cpu", (2, 2))
    for source, target in (
        ((Shard(0), R), (R, R)),
        ((Shard(0), R), (Shard(1), R)),
        ((R, R), (Shard(0), R)),
        ((P(), R), (Shard(0), R)),
    ):
        call = functools.partial(moved, mesh, source, target)
        graph = make_fx(call, tracing_mode="symbolic")(torch.zeros(DTensorSpec(mesh, source, (8, 8)).local_shape))
        for rows in (8, 12, 40):
            given, made = DTensorSpec(mesh, source, (rows, 8)), DTensorSpec(mesh, target, (rows, 8))
            assert graph(torch.zeros(given.local_shape)).shape == made.local_shape


def test_hints_are_where_they_were():
    seen = []
    make_fx(lambda x: seen.append((x.shape[0], hint(x.shape[0]))), tracing_mode="symbolic")(torch.zeros(24))
    assert type(seen[0][0]) is torch.SymInt, "torch traces otherwise: mend _torch_compat.py"
    assert seen[0][1] == 24, "torch has moved optimization_hint: mend _torch_compat.py"
    assert hint(7) == 7
