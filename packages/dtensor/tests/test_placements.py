"""Placements are plain, immutable data, equal to torch's where torch has them."""

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.dtensor.placement_types import (
    REDUCE_OPS,
    Partial,
    Placement,
    Replicate,
    Shard,
    SizedShard,
    StridedShard,
    as_placement,
    as_torch_placement,
    on_dim,
    split_dim,
)

PAIRS = [
    (Shard(1), torch_dtensor.Shard(1)),
    (Shard(-1), torch_dtensor.Shard(-1)),
    (Replicate(), torch_dtensor.Replicate()),
    (Partial(), torch_dtensor.Partial()),
    (Partial("max"), torch_dtensor.Partial("max")),
    (StridedShard(0, 2), TorchStridedShard(0, split_factor=2)),
]
ALL = [*(pair[0] for pair in PAIRS), Shard(0), StridedShard(0, 1), SizedShard(0, (3, 5)), SizedShard(1, (3, 5))]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_placement_and_that_of_torch_are_equal_and_convert_into_each_other(ours, theirs):
    assert ours == theirs and theirs == ours and (ours != theirs) is False and hash(ours) == hash(theirs)
    assert {theirs: "found"}[ours] == {ours: "found"}[theirs] == "found"
    assert as_placement(theirs) is ours and as_placement(ours) is ours
    assert type(as_torch_placement(ours)) is type(theirs) and as_torch_placement(ours) == theirs
    assert as_torch_placement(theirs) == theirs
    assert isinstance(ours, type(theirs)) and isinstance(ours, Placement)


def test_placements_that_differ_are_not_equal():
    for i, a in enumerate(ALL):
        for j, b in enumerate(ALL):
            assert (a == b) is (i == j)
        assert a != "Shard(dim=0)" and a != 0
    torchs = [pair[1] for pair in PAIRS]
    for i, (ours, _) in enumerate(PAIRS):
        for j, theirs in enumerate(torchs):
            assert (ours == theirs) is (theirs == ours) is (i == j)
    assert Partial() != _MaskPartial("sum") and _MaskPartial("sum") != Partial()
    assert SizedShard(0, (4, 4)) != torch_dtensor.Shard(0)


def test_each_says_what_it_is():
    table = {p: (p.is_shard(), p.is_shard(0), p.is_shard(1), p.is_replicate(), p.is_partial()) for p in ALL}
    assert table == {
        Shard(1): (True, False, True, False, False),
        Shard(-1): (True, False, False, False, False),
        Replicate(): (False, False, False, True, False),
        Partial(): (False, False, False, False, True),
        Partial("max"): (False, False, False, False, True),
        # As in torch: what is local of it is no slice.
        StridedShard(0, 2): (False, False, False, False, False),
        Shard(0): (True, True, False, False, False),
        StridedShard(0, 1): (False, False, False, False, False),
        SizedShard(0, (3, 5)): (True, True, False, False, False),
        SizedShard(1, (3, 5)): (True, False, True, False, False),
    }
    assert Partial("max").is_partial("max") and not Partial("max").is_partial("sum")
    assert [split_dim(p) for p in ALL] == [1, -1, None, None, None, 0, 0, 0, 0, 1]
    assert (Shard(3).dim, Partial().reduce_op, StridedShard(1, 4).split_factor) == (3, "sum", 4)
    assert (SizedShard(1, [2, 0]).dim, SizedShard(1, [2, 0]).sizes) == (1, (2, 0))
    assert on_dim(StridedShard(0, 2), 3) is StridedShard(3, 2) and on_dim(SizedShard(0, (1, 2)), 1).dim == 1
    assert on_dim(Shard(0), 2) is Shard(2) and on_dim(Replicate(), 2) is Replicate()


@pytest.mark.parametrize("placement", ALL, ids=str)
def test_a_placement_survives_pickle_copy_and_its_own_text(placement):
    copies = [pickle.loads(pickle.dumps(placement)), copy.copy(placement), copy.deepcopy(placement)]
    copies += [eval(repr(placement)), eval(*_globals(placement.__fx_repr__()))]
    for made in copies:
        assert made == placement and type(made) is type(placement) and hash(made) == hash(placement)
        assert made is placement or isinstance(placement, SizedShard)


def _globals(fx_repr):
    text, names = fx_repr
    return text, dict(names)


@pytest.mark.parametrize("placement", ALL, ids=str)
def test_a_placement_cannot_be_changed(placement):
    before = repr(placement)
    for name in ("dim", "reduce_op", "split_factor", "sizes", "other"):
        with pytest.raises(AttributeError):
            setattr(placement, name, 7)
        with pytest.raises(AttributeError):
            delattr(placement, name)
    assert repr(placement) == before


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="unknown reduce op 'prod'.*product"):
        Partial("prod")
    with pytest.raises(ValueError, match="split_factor must be at least 1"):
        StridedShard(0, 0)
    for sizes in ((), (3, -1)):
        with pytest.raises(ValueError, match="one non-negative int for each rank"):
            SizedShard(0, sizes)
    for make in (lambda: Shard("0"), lambda: Shard(0.5), lambda: SizedShard(0, (1.5,)), lambda: StridedShard(0, 2.0)):
        with pytest.raises(TypeError):
            make()
    # D6
    for wrong in ("shard", None, 0, Shard, _MaskPartial("sum"), Placement()):
        with pytest.raises(RuntimeError, match="unknown placement.*write Shard"):
            as_placement(wrong)
    with pytest.raises(ValueError, match="torch has no placement like SizedShard"):
        as_torch_placement(SizedShard(0, (3, 5)))
    assert [Partial(op).reduce_op for op in REDUCE_OPS] == list(REDUCE_OPS) and Partial(None) is Partial("sum")


def test_threads_that_make_a_placement_get_one_object():
    barrier = threading.Barrier(8)
    made: list[list[object]] = []

    def work() -> None:
        barrier.wait()
        made.append([f(d) for d in range(1000, 1200) for f in (Shard, lambda d: StridedShard(d, 3))])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and all(len({id(item) for item in items}) == 1 for items in zip(*made, strict=True))


def test_torch_takes_ours_and_refuses_what_it_has_not():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(16.0).view(8, 2)
        for placement, local in (
            (Shard(0), whole[4:]),
            (StridedShard(0, 2), torch.cat([whole[2:4], whole[6:]])),
            (Replicate(), whole),
        ):
            made = torch_dtensor.distribute_tensor(whole, mesh, [placement], src_data_rank=None)
            assert torch.equal(made.to_local(), local) and made.placements == (placement,)
        # It would cut equal chunks.
        with pytest.raises(RuntimeError, match="SizedShard not supported"):
            torch_dtensor.DTensor.from_local(whole, mesh, [SizedShard(0, (8, 3))], run_check=False)
        with pytest.raises(RuntimeError, match="unsupported placement"):
            torch_dtensor.distribute_tensor(whole, mesh, [SizedShard(0, (5, 3))])
    finally:
        dist.destroy_process_group()


def test_dynamo_takes_placements_as_constants():
    def f(x, placement):
        sized = SizedShard(0, (3, 5))
        if placement == Shard(1) and not placement.is_partial():
            return x + Shard(1).dim
        if placement.is_partial("max"):
            return x * sized.sizes[1]
        if StridedShard(0, 2) == placement:
            return x - StridedShard(0, 2).split_factor
        return x * (2 if placement.is_replicate() else 3)

    compiled = torch.compile(f, fullgraph=True, backend="eager")
    x = torch.tensor([1.0, 2.0])
    for placement in (Shard(1), Partial("max"), StridedShard(0, 2), Replicate(), Shard(0), torch_dtensor.Shard(1)):
        assert compiled(x, placement).tolist() == f(x, placement).tolist()
