"""Equal specs are one object, on every thread and for equal meshes, and wrong ones say what to write instead."""

import copy
import gc
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_dtensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.dtensor import _dtensor_spec as spec_module
from phalanx.dtensor._dtensor_spec import DTensorSpec, normalize_placements
from phalanx.dtensor._mesh import AbstractMesh, mesh_id
from phalanx.dtensor.placement_types import Partial, Replicate, Shard, SizedShard, StridedShard

MESH = AbstractMesh((2, 3), (1, 2), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def fake_ranks():
    """Rank 5 of a world of 8 that nobody else is in: meshes can be made, and any communication does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def make(**changes):
    fields = {
        "mesh": MESH,
        "placements": (Shard(0), Replicate()),
        "shape": (8, 4),
        "stride": (4, 1),
        "dtype": torch.float32,
    }
    return DTensorSpec(**{**fields, **changes})


# ---- identity -------------------------------------------------------------------------------------------------------


def test_equal_specs_are_one_object_however_they_are_written():
    spec = make()
    again = [
        make(),
        make(mesh=AbstractMesh((2, 3), [1, 2], mesh_dim_names=["dp", "tp"])),
        make(placements=[Shard(0), Replicate()]),
        make(placements=(torch_dtensor.Shard(-2), torch_dtensor.Replicate())),
        make(placements=(Shard(-2), Replicate())),
        make(shape=torch.Size((8, 4)), stride=[4, 1]),
        make(stride=None),
        spec.replace(),
        spec.replace(shape=(8, 4)),
        make(shape=(4, 8), dtype=torch.int64).replace(shape=[8, 4], dtype=torch.float32),
    ]
    assert all(other is spec and other == spec and hash(other) == hash(spec) for other in again)


def test_specs_that_differ_are_different_objects():
    changes = [
        {"mesh": AbstractMesh((2, 3), (0, 2), mesh_dim_names=("dp", "tp"))},
        {"mesh": AbstractMesh((2, 3), (1, 2))},
        {"mesh": AbstractMesh((3, 3), (1, 2), mesh_dim_names=("dp", "tp"))},
        {"mesh": AbstractMesh((2, 3), (1, 2), mesh_dim_names=("dp", "tp"), device_type="cuda")},
        {"placements": (Shard(1), Replicate())},
        {"placements": (Shard(0), Partial())},
        {"placements": (Shard(0), Partial("max"))},
        {"placements": (StridedShard(0, 1), Replicate())},
        {"placements": (SizedShard(0, (4, 4)), Replicate())},
        {"shape": (9, 4)},
        {"stride": (1, 8)},
        {"dtype": torch.float64},
    ]
    specs = [make(), *(make(**change) for change in changes)]
    for i, a in enumerate(specs):
        for j, b in enumerate(specs):
            assert (a is b) is (a == b) is (i == j)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.sampled_from([torch.float32, torch.int8]), st.data())
def test_the_value_of_a_spec_decides_its_identity(shape, dtype, data):
    kinds = [Replicate(), Partial(), *(Shard(dim) for dim in range(-len(shape), len(shape)))]
    first = [data.draw(st.sampled_from(kinds)) for _ in range(2)]
    second = [data.draw(st.sampled_from(kinds)) for _ in range(2)]
    same = all(
        a == b or (a.is_shard() and b.is_shard() and a.dim % len(shape) == b.dim % len(shape))
        for a, b in zip(first, second, strict=True)
    )
    assert (DTensorSpec(MESH, first, shape, None, dtype) is DTensorSpec(MESH, second, shape, None, dtype)) is same


def test_threads_get_one_object():
    barrier = threading.Barrier(8)
    made = []

    def work():
        barrier.wait()
        made.append([make(shape=(size, 4)) for size in range(500, 700)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and all(len(set(map(id, specs))) == 1 for specs in zip(*made, strict=True))


def test_a_spec_is_kept_only_as_long_as_somebody_holds_it():
    gc.collect()
    before = len(spec_module._table)
    mesh = AbstractMesh((7,), (3,))
    held = [DTensorSpec(mesh, (Shard(0),), (size,), None, torch.float32) for size in range(1000, 1100)]
    assert len(spec_module._table) == before + 100
    kept = held[17]
    del held
    gc.collect()
    assert len(spec_module._table) == before + 1
    assert DTensorSpec(mesh, (Shard(0),), (1017,), None, torch.float32) is kept
    del kept
    gc.collect()
    assert len(spec_module._table) == before


def test_what_comes_late_of_a_dead_spec_leaves_the_new_one_alone():
    spec = make(shape=(76, 4))
    dead = next(entry for entry in spec_module._table.values() if entry() is spec)
    del spec
    gc.collect()
    assert dead() is None
    spec = make(shape=(76, 4))
    spec_module._forget(dead)
    assert make(shape=(76, 4)) is spec


def test_specs_that_come_and_go_on_several_threads_stay_one_object_each():
    stop, wrong = threading.Event(), []

    def come_and_go():
        while not stop.is_set():
            make(shape=(77, 4))

    threads = [threading.Thread(target=come_and_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        first, second = make(shape=(77, 4)), make(shape=(77, 4))
        if first is not second:
            wrong.append((first, second))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_spec_survives_pickle_and_copy_as_itself():
    # D1: copied with a DTensor, a spec is the same one, since nobody can change it.
    spec = make(placements=(SizedShard(0, (3, 5)), StridedShard(1, 2)))
    mesh = pickle.loads(pickle.dumps(AbstractMesh((2,), (1,), mesh_dim_names=("tp",))))
    assert mesh == AbstractMesh((2,), (1,), mesh_dim_names=("tp",))
    for other in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert other is spec


def test_a_spec_cannot_be_changed():
    # D9
    spec = make()
    for name in ("mesh", "placements", "shape", "other"):
        with pytest.raises(AttributeError, match="use replace"):
            setattr(spec, name, None)
        with pytest.raises(AttributeError):
            delattr(spec, name)
    assert spec.placements == (Shard(0), Replicate())


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_a_spec_knows_its_shapes_and_shards():
    spec = make()  # 8 rows over 2, at (1, 2)
    assert (spec.ndim, spec.local_shape, spec.local_stride) == (2, (4, 4), (4, 1))
    assert spec.local_runs == (((4, 4),), ((0, 4),))
    assert spec.local_shape_at((0, 0)) == (4, 4) and spec.local_runs_at((0, 0)) == (((0, 4),), ((0, 4),))
    assert (spec.is_sharded, spec.is_replicated, spec.is_partial) == (True, False, False)
    both = make(placements=(Shard(0), Shard(0)), stride=(1, 8))
    assert (both.local_shape, both.local_stride) == ((0, 4), (1, 1))
    assert both.mesh_dims_of(0) == (0, 1) and both.mesh_dims_of(1) == ()
    assert both.local_shape_at((0, 1)) == (2, 4) and both.local_runs == ((), ((0, 4),))
    sized = make(placements=(SizedShard(0, (3, 5)), StridedShard(1, 2)), stride=(1, 8))
    assert (sized.local_shape, sized.local_stride) == ((5, 0), (1, 5))
    partial = make(placements=(Partial(), Replicate()))
    assert (partial.is_sharded, partial.is_replicated, partial.is_partial) == (False, False, True)
    assert make(placements=(Replicate(), Replicate())).is_replicated
    assert make(placements=(Replicate(), Partial()), shape=(), stride=()).local_shape == ()


def test_a_rank_outside_the_mesh_has_nothing():
    # D2
    spec = make(mesh=MESH.at(None))
    assert (spec.local_shape, spec.local_stride, spec.local_runs) == ((0,), (1,), ((), ()))
    assert spec.local_shape_at((1, 0)) == (4, 4)


def test_a_spec_is_printed_without_communication(fake_ranks):
    # D1: a fake process group has no peer that could answer.
    assert str(make()) == "float32[8, 4] (dp: S(0), tp: R)"
    assert repr(make()) == (
        "DTensorSpec(shape=(8, 4), dtype=torch.float32, placements=(Shard(dim=0), Replicate()), mesh=(dp=2, tp=3))"
    )
    mesh = init_device_mesh("cpu", (8,))
    spec = DTensorSpec(mesh, [Shard(0)], (10, 4))
    assert str(spec) == "float32[10, 4] (0: S(0))" and "mesh=(8,)" in repr(spec)
    assert spec.local_shape == (0, 4)  # rank 5 of 8: chunks of 2


def test_sizes_that_are_symbols_compare_by_value():
    env = ShapeEnv()
    n, other = env.create_unbacked_symint(), env.create_unbacked_symint()
    first, second = make(shape=(n, 4)), make(shape=(n, 4))
    assert first == second and hash(first) == hash(second) and first != make() and make() != first
    assert first != make(shape=(n, 4), dtype=torch.int8) and first != make(shape=(other, 4))
    assert isinstance(first.local_shape[0], torch.SymInt) and first.local_shape[1] == 4


# ---- meshes of torch ------------------------------------------------------------------------------------------------


def test_equal_meshes_of_torch_are_one(fake_ranks):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    spec = DTensorSpec(mesh["tp"], (Shard(0),), (8, 4))
    assert spec is DTensorSpec(mesh["tp"], (Shard(0),), (8, 4))  # the submesh is a new object
    assert spec is not DTensorSpec(mesh["dp"], (Shard(0),), (8, 4))
    assert spec.local_shape == (2, 4) and spec.local_runs[0] == ((2, 2),)
    again = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    assert again == mesh and mesh_id(again) == mesh_id(mesh)
    assert DTensorSpec(mesh, (Shard(0), Shard(1)), (8, 4)) is DTensorSpec(again, (Shard(0), Shard(1)), (8, 4))
    assert mesh_id(init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))) != mesh_id(mesh)
    elsewhere = DeviceMesh("cpu", [0, 1])
    assert DTensorSpec(elsewhere, (Shard(0),), (8, 4)).local_shape == (0,)  # D2: rank 5 is not in it


def test_ranks_that_are_threads_have_specs_of_their_own():
    ranks = torch.arange(4).view(2, 2)
    first, second = (DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank) for rank in (0, 3))
    assert first == second  # for torch, which tells its own threads apart in another way
    specs = [DTensorSpec(mesh, (Shard(0), Shard(1)), (5, 3)) for mesh in (first, second)]
    assert specs[0] is not specs[1] and [spec.local_shape for spec in specs] == [(3, 2), (2, 1)]


def test_equal_meshes_are_one_as_long_as_any_of_them_lives(fake_ranks):
    # Each mesh of two dims has groups of its own.
    first, second = init_device_mesh("cpu", (2, 4)), init_device_mesh("cpu", (2, 4))
    assert first.get_group(1) is not second.get_group(1)
    number = mesh_id(first)
    assert mesh_id(second) == number
    del first
    gc.collect()
    third = init_device_mesh("cpu", (2, 4))
    assert mesh_id(second) == mesh_id(third) == number
    del second, third
    gc.collect()
    assert mesh_id(init_device_mesh("cpu", (2, 4))) != number


def test_a_mesh_whose_groups_were_destroyed_is_no_longer_equal_to_new_ones():
    meshes, specs = [], []
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        meshes.append(init_device_mesh("cpu", (8,)))
        specs.append(DTensorSpec(meshes[-1], (Shard(0),), (8, 4)))
        assert DTensorSpec(meshes[-1], (Shard(0),), (8, 4)) is specs[-1]
        dist.destroy_process_group()
    assert specs[0] is not specs[1] and specs[0].mesh is meshes[0] and specs[1].mesh is meshes[1]


# ---- wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        # D4, D6: a placement for each mesh dim
        ({"placements": (Shard(0),)}, ValueError, r"1 placements.*mesh of 2 dims \(dp=2, tp=3\).*write Replicate\(\)"),
        ({"placements": (Shard(0),) * 3}, ValueError, "must have the same length"),
        ({"placements": Shard(0)}, TypeError, r"placements must be a sequence.*write \[Shard\(dim=0\)\]"),
        ({"placements": "S(0)"}, TypeError, "placements must be a sequence"),
        ({"placements": None}, TypeError, "placements must be a sequence"),
        ({"placements": (Shard(2), Replicate())}, IndexError, "Shard.dim=2. splits a dim.*it has 2, so write -2 to 1"),
        ({"placements": (Shard(-3), Replicate())}, IndexError, "write -2 to 1"),
        ({"placements": (StridedShard(5, 2), Replicate())}, IndexError, "StridedShard.*write -2 to 1"),
        (
            {"placements": (Shard(0), Replicate()), "shape": (), "stride": ()},
            IndexError,
            r"no dims: write Replicate\(\)",
        ),
        ({"placements": (Shard(0), "replicate")}, RuntimeError, "unknown placement 'replicate'"),  # D6
        ({"placements": (SizedShard(0, (3, 4)), Replicate())}, ValueError, "add up to 7, but dim 0"),
        ({"placements": (SizedShard(0, (8,)), Replicate())}, ValueError, "1 sizes, and mesh dim 0 has 2 ranks"),
        ({"placements": (Partial("bor"), Replicate())}, ValueError, "is for integers and bools"),
        ({"mesh": (2, 3)}, TypeError, "must be a torch DeviceMesh, not tuple.*init_device_mesh"),
        ({"mesh": None}, TypeError, "must be a torch DeviceMesh"),
        ({"shape": 8}, TypeError, "shape must be a sequence of ints"),
        ({"shape": (-1, 4)}, ValueError, "no size may be negative"),
        ({"stride": (1,)}, ValueError, "needs 2 strides"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch dtype"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_with_what_to_write(changes, error, text):
    with pytest.raises(error, match=text):
        make(**changes)


def test_wrong_grids_are_named():
    for arguments, text in (
        (((2, 0),), "every mesh dim must have a rank or more"),
        (((2, 3), (2, 0)), "which is not in a mesh of shape"),
        (((2, 3), (1,)), "which is not in a mesh of shape"),
    ):
        with pytest.raises(ValueError, match=text):
            AbstractMesh(*arguments)
    with pytest.raises(ValueError, match="needs 2 names"):
        AbstractMesh((2, 3), mesh_dim_names=("tp",))


def test_placements_are_normalised():
    theirs = [torch_dtensor.Shard(-1), torch_dtensor.Partial("max")]
    assert normalize_placements(MESH, theirs, 3) == (Shard(2), Partial("max"))
    assert normalize_placements(MESH, (SizedShard(-2, (1, 2)), StridedShard(-1, 2)), 2) == (
        SizedShard(0, (1, 2)),
        StridedShard(1, 2),
    )
