"""Losses and softmax of scores whose classes are sharded, against one process, without gathering the scores."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from phalanx.dtensor import DTensor, Partial, Replicate, Shard, SizedShard, StrictError, distribute_tensor, strict
from phalanx.dtensor._redistribute import comm
from phalanx.dtensor.parallel import loss_parallel
from ranks import run_ranks


@contextlib.contextmanager
def nothing_gathered():
    """No tensor of more than `largest` elements is sent within."""
    kept = comm._all_gather, comm._all_to_all, comm._shard_dim_alltoall

    def refuse(x, *args):
        raise AssertionError(f"{x.shape} is gathered")

    comm._all_gather = comm._all_to_all = comm._shard_dim_alltoall = refuse
    try:
        yield
    finally:
        comm._all_gather, comm._all_to_all, comm._shard_dim_alltoall = kept


def close(ours, theirs, **kwargs):
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    torch.testing.assert_close(ours.detach(), theirs.detach(), **kwargs)


def target_placements(placements):
    return [
        Replicate() if p == Shard(1) else Shard(p.dim - (p.dim > 1)) if isinstance(p, Shard) else p for p in placements
    ]


def losses(mesh, shape, placements, dtype=torch.float64):
    """Every reduction, weights or not, label smoothing or not, an ignored target."""
    torch.manual_seed(1)
    classes = shape[1]
    scores = torch.randn(shape, dtype=dtype)
    target = torch.randint(classes, (shape[0], *shape[2:]))
    target.view(-1)[1] = -100
    target.view(-1)[2] = 4
    weight = torch.rand(classes, dtype=dtype) + 0.1
    for reduction, weighted, smoothing, ignored in itertools.product(
        ("mean", "sum", "none"), (False, True), (0.0, 0.1), (-100, 4)
    ):
        if ignored == 4:
            if smoothing:
                continue
            target = target.masked_fill(target == -100, 0)
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
        x = scores.clone().requires_grad_()
        wanted = functional.cross_entropy(x, target, weight if weighted else None, **options)
        (wanted * 1.5).sum().backward()
        own = distribute_tensor(scores, mesh, placements).requires_grad_()
        given = distribute_tensor(target, mesh, target_placements(placements))
        with loss_parallel(), nothing_gathered() if not smoothing else contextlib.nullcontext():
            loss = functional.cross_entropy(own, given, weight if weighted else None, **options)
            (loss * 1.5).sum().backward()
        close(loss, wanted)
        close(own.grad, x.grad)
        if not smoothing:
            assert own.grad.placements == tuple(placements), own.grad.placements
            if reduction == "none":
                assert loss.placements == tuple(target_placements(placements))
            else:
                kinds = [Partial() if p not in (Shard(1), Replicate()) else Replicate() for p in placements]
                assert loss.placements == tuple(kinds)


def one_dim(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    losses(mesh, (6, 8), [Shard(1)])
    losses(mesh, (3, 5, 2), [Shard(1)])  # uneven; on 4 ranks the last one has no class
    sizes = (5, 0) if world_size == 2 else (1, 0, 3, 1)
    x = torch.randn(4, 5, dtype=torch.float64)
    target = torch.tensor([0, 4, 2, 2])
    own = DTensor.from_local(x.split(sizes, 1)[rank].contiguous(), mesh, [SizedShard(1, sizes)], shape=(4, 5))
    with loss_parallel():
        close(functional.cross_entropy(own, target), functional.cross_entropy(x, target))
    # One line of scores alone.
    x, target = torch.randn(5, dtype=torch.float64), torch.tensor(3)
    own = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    x.requires_grad_()
    with loss_parallel():
        loss = functional.cross_entropy(own, target)
    loss.backward()  # outside of the context
    functional.cross_entropy(x, target).backward()
    close(loss, functional.cross_entropy(x, target))
    close(own.grad, x.grad)
    # Low precision is computed as torch does; and all targets ignored give NaN, as there.
    x = torch.randn(4, 6).bfloat16()
    own = distribute_tensor(x, mesh, [Shard(1)])
    assert functional.log_softmax(own, 1).dtype == torch.bfloat16
    close(functional.log_softmax(own, 1), functional.log_softmax(x, 1), rtol=0.01, atol=0.01)
    with loss_parallel():
        assert functional.cross_entropy(own.float(), torch.full((4,), -100)).full_tensor().isnan()


def softmax(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    inf = torch.inf
    x = torch.randn(3, 5, dtype=torch.float64) * 300
    x[0, 2:] = -inf
    for function, dim in itertools.product((functional.softmax, functional.log_softmax), (1, -1)):
        own = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        other = x.clone().requires_grad_()
        with nothing_gathered():
            y = function(own, dim)
            assert y.placements == (Shard(1),)
            factor = torch.linspace(1, 2, 15, dtype=torch.float64).reshape(3, 5)
            (y.nan_to_num(neginf=0.0) * distribute_tensor(factor, mesh, [Shard(1)])).sum().backward()
        z = function(other, dim)
        (z.nan_to_num(neginf=0.0) * factor).sum().backward()
        close(y, z)
        close(own.grad, other.grad)
    for line in ([-inf] * 5, [1, inf, 2, 3, 4]):
        x = torch.tensor([line])
        for function in (functional.softmax, functional.log_softmax):
            close(function(distribute_tensor(x, mesh, [Shard(1)]), 1), function(x, 1), equal_nan=True)


def refusals(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    own = distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match="got mixed distributed and non-distributed"):
        functional.cross_entropy(own, torch.zeros(4, dtype=torch.int64))
    with loss_parallel():
        with pytest.raises(IndexError, match="target 6 is out of bounds: there are 6 classes"):
            functional.cross_entropy(own, torch.tensor([0, 6, 1, 2]))
        with pytest.raises((RuntimeError, ValueError), match="batch"):
            functional.cross_entropy(own, torch.tensor([0, 1]))
        with pytest.raises(StrictError, match="along a sharded dim would communicate"), strict():
            functional.cross_entropy(own, torch.zeros(4, dtype=torch.int64))


def on_a_line(rank, world_size):
    one_dim(rank, world_size)
    softmax(rank, world_size)
    refusals(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_of_sharded_classes_are_those_of_one_process(world_size):
    run_ranks(on_a_line, world_size, start_torch=True, timeout=120)


def two_dims(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    losses(mesh, (5, 7), [Shard(0), Shard(1)])
    losses(mesh, (5, 7), [Shard(1), Replicate()])
    losses(mesh, (3, 5, 4), [Shard(2), Shard(1)])
    # Both mesh dims cut the classes; a plain target is the whole.
    x, target = torch.randn(4, 9, dtype=torch.float64), torch.tensor([0, 8, 3, 3])
    for placements in ([Shard(1), Shard(1)], [Shard(0), Shard(1)]):
        with loss_parallel():
            close(
                functional.cross_entropy(distribute_tensor(x, mesh, placements, src_data_rank=0), target),
                functional.cross_entropy(x, target),
            )


def test_losses_of_sharded_classes_and_batches():
    torch.manual_seed(5)
    run_ranks(two_dims, 4, start_torch=True, timeout=120)
