"""Factories: every rank makes its part of a tensor."""

import pytest
import torch

from phalanx.dtensor import (
    AbstractMesh,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    _factories,
    distribute_tensor,
    linspace,
    logspace,
)
from ranks import run_ranks


def _make(rank, world_size):
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    uneven = _factories.full((7, 2), 3, device_mesh=mesh, placements=[Shard(0)])
    square = torch.distributed.init_device_mesh("cpu", (2, 2))
    both = _factories.ones(5, 3, device_mesh=square, placements=[Shard(0), Shard(1)], dtype=torch.float64)
    grown = _factories.zeros((4,), device_mesh=mesh, requires_grad=True)
    (grown * 2).sum().backward()
    with mesh:
        here = _factories.empty(4, 2, placements=[Shard(1)])
    return (
        tuple(uneven.to_local().shape), uneven.dtype, uneven.full_tensor(), both.full_tensor(),
        grown.placements, grown.grad.full_tensor(), tuple(here.shape), here.device_mesh == mesh,
    )  # fmt: skip


def test_tensors_are_made_uneven_and_over_meshes_of_two_dims():
    for rank, (local, dtype, full, both, placements, grad, shape, is_mesh) in enumerate(
        run_ranks(_make, 4, start_torch=True)
    ):
        assert local == ((2, 2, 2, 1)[rank], 2) and dtype == torch.int64
        assert torch.equal(full, torch.full((7, 2), 3))
        assert torch.equal(both, torch.ones(5, 3, dtype=torch.float64))
        assert placements == (Replicate(),) and torch.equal(grad, torch.full((4,), 2.0))
        assert shape == (4, 2) and is_mesh


def _spaces(rank, world_size):
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    for placements in (
        [Shard(0), Shard(0)],
        [Replicate(), Shard(0)],
        [StridedShard(0, split_factor=2), Shard(0)],
        None,
    ):
        for arguments, named in (((-1, 1.0, 11), {}), ((0.0, 9, 4), {"dtype": torch.bfloat16}), ((1j, 2, 5), {}),
                                 ((3, 3, 1), {}), ((0, 7, 0), {}), ((0, 10, 11), {"dtype": torch.int64})):  # fmt: skip
            for ours, theirs in ((linspace, torch.linspace), (logspace, torch.logspace)):
                if ours is logspace and (arguments[1] == 10 or arguments[0] == 1j):
                    continue
                wanted = theirs(*arguments, **named)
                made = ours(*arguments, **named, device_mesh=mesh, placements=placements)
                assert made.dtype is wanted.dtype and torch.equal(made.full_tensor(), wanted)
                assert placements is None or len(placements) == len(made.placements)
    ends = torch.tensor(1.0), distribute_tensor(torch.tensor(3.0), mesh, [Replicate()] * 2)
    grown = logspace(*ends, 3, 2.0, device_mesh=mesh, placements=[Shard(0), Replicate()], requires_grad=True)
    assert grown.requires_grad and grown.full_tensor().tolist() == [2, 4, 8]
    assert grown.to_local().shape == ((2,), (2,), (1,), (1,))[rank]


def test_values_in_equal_steps_are_those_of_torch_whatever_the_placements_are():
    run_ranks(_spaces, 4, start_torch=True)


def test_a_rank_outside_the_mesh_has_an_empty_local_tensor():
    made = _factories.randn(8, 3, device_mesh=AbstractMesh((4,), None), placements=[Shard(0)])
    assert made.shape == (8, 3) and made._local_tensor.shape == (0,)


def test_wrong_arguments_say_what_to_write():
    mesh = AbstractMesh((2,))
    with pytest.raises(ValueError, match="from_local"):
        _factories.zeros(4, device_mesh=mesh, placements=[Partial()])
    with pytest.raises(ValueError, match="same length as the mesh"):
        _factories.zeros(4, device_mesh=mesh, placements=[Shard(0), Shard(0)])
    with pytest.raises(IndexError, match="splits a dim"):
        _factories.ones(4, device_mesh=mesh, placements=[Shard(1)])
    with pytest.raises(TypeError, match="sizes must be ints"):
        _factories.rand(4.0, device_mesh=mesh)
    with pytest.raises(ValueError, match="layout"):
        _factories.zeros(4, device_mesh=mesh, layout=torch.sparse_coo)
    with pytest.raises(RuntimeError, match="float32"):
        _factories.rand(4, device_mesh=mesh, dtype=torch.int64)
    with pytest.raises(ValueError, match="tensors without dims"):
        linspace(torch.zeros(1), 1, 3, device_mesh=mesh)
    with pytest.raises(RuntimeError, match="no mesh was given"):
        _factories.zeros(4)
