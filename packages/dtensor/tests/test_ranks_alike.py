"""What is refused is refused on every rank, whatever it has of the tensors; and indices out of range are."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from phalanx.core import MismatchError
from phalanx.dtensor import DTensor, Partial, Replicate, Shard, SizedShard, distribute_tensor, strict
from phalanx.dtensor.experimental import local_map
from ranks import run_ranks


def outcome(function):
    """What a call comes to: the error without what it says of this rank, or the placements and shape of the result."""
    try:
        result = function()
    except Exception as error:
        return type(error).__name__
    return (str(result.placements), tuple(result.shape)) if isinstance(result, DTensor) else str(result)


def refused_writes(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    found = {}
    for rows in (8, 6, 9, 3):
        for name, view in {
            "view": lambda d: d.view(2, d.shape[0] // 2, 6)[1] if d.shape[0] % 2 == 0 else d[:1],
            "rows": lambda d: d[:3],
            "select": lambda d: d[1],
            "flat": lambda d: d.flatten(),
            "transposed": lambda d: d.t(),
            "columns": lambda d: d[:, 1:3],
            "column": lambda d: d[:, 1],
            "view of view": lambda d: d.t()[1:].t(),
            "diagonal": lambda d: d.diagonal(),
        }.items():
            whole = torch.ones(rows, 6)
            d = distribute_tensor(whole.clone(), mesh, [Shard(0)])
            found[rows, name] = outcome(lambda view=view, d=d: view(d).zero_())
            if found[rows, name] != "RuntimeError":
                view(whole).zero_()
                assert torch.equal(d.full_tensor(), whole), (rows, name)
            dist.barrier()
    return found


def test_a_write_into_a_view_is_refused_on_all_ranks_or_on_none():
    first, *others = run_ranks(refused_writes, 4, start_torch=True)
    assert all(one == first for one in others)
    assert first[8, "view"] == first[6, "view"] == first[3, "select"] == "RuntimeError"
    assert first[9, "transposed"] != "RuntimeError" and first[3, "columns"] != "RuntimeError"


def outside_the_mesh(rank, world_size):
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 2])

    def some(placement=Shard(0)):  # noqa: B008
        return DTensor.from_local(torch.ones(4, 6), mesh, [placement])

    def under_strict():
        with strict():
            return some(Shard(0)) + DTensor.from_local(torch.ones(8, 3), mesh, [Shard(1)])

    other = some(Replicate())
    return {
        "copied view": outcome(lambda: some().flatten()[1:3].zero_()),
        "view": outcome(lambda: some().t()[1:].zero_()),
        "strict": outcome(under_strict),
        "equal": outcome(lambda: some().equal(some())),
        "other": outcome(lambda: some().equal(other)),
    }


def test_a_rank_outside_the_mesh_refuses_what_the_others_refuse():
    found = run_ranks(outside_the_mesh, 3, start_torch=True)
    assert found[0] == found[1] == found[2]
    assert found[0]["copied view"] == "RuntimeError" and found[0]["equal"] == "True"
    assert found[0]["strict"] == "StrictError" and found[0]["view"] != "RuntimeError"


# ---- indices out of range --------------------------------------------------------------------------------------------


LOOKUPS = {
    "embedding": lambda i, x: functional.embedding(i, x),
    "index_select": lambda i, x: x.index_select(0, i),
    "index": lambda i, x: x[i],
    "gather": lambda i, x: x.gather(0, i.unsqueeze(1)),
    "take": lambda i, x: x.take(i),
    "index_add": lambda i, x: x.index_add(0, i, x[:2]),
    "index_copy": lambda i, x: x.index_copy(0, i, x[:2]),
    "index_fill": lambda i, x: x.index_fill(0, i, 3.0),
    "index_put": lambda i, x: x.index_put((i,), x[:2]),
    "scatter": lambda i, x: x.scatter(0, i.unsqueeze(1), 3.0),
    "scatter_add": lambda i, x: x.scatter_add(0, i.unsqueeze(1), x),
    "one_hot": lambda i, x: functional.one_hot(i, 10),
    "embedding_bag": lambda i, x: functional.embedding_bag(i.unsqueeze(0), x),
    "cross_entropy": lambda i, x: functional.cross_entropy(x.t()[:2], i),
    "nll_loss": lambda i, x: functional.nll_loss(x.t()[:2], i),
}


def looked_up(rank, world_size, shape):
    mesh = dist.init_device_mesh("cpu", shape)
    table = torch.arange(1.0, 31).view(10, 3)  # ranks of four have no column
    kinds = (Shard(0), Shard(1), Replicate(), Partial())
    placings = [[one] for one in kinds] if len(shape) == 1 else [[a, b] for a in kinds[:3] for b in kinds[:3]]
    whole = [Replicate()] * len(shape)
    found = []
    for (name, function), bad, placements in itertools.product(LOOKUPS.items(), (1, -1, 10, 40, -40), placings):
        index = torch.tensor([1, bad])
        try:
            wanted = function(index, table)
        except Exception as error:
            wanted = error
        term = [Replicate() if isinstance(one, Partial) else one for one in placements]
        source = distribute_tensor(table, mesh, term)
        if term != placements:
            source = DTensor.from_local(table / world_size, mesh, placements)
        case = name, bad, str(placements)
        try:
            made = function(distribute_tensor(index, mesh, whole), source)
            got = made.full_tensor()
        except (IndexError, RuntimeError, ValueError) as error:
            assert isinstance(wanted, Exception), (case, error)
            kind = IndexError if isinstance(wanted, IndexError) else RuntimeError
            assert isinstance(error, (kind, IndexError)), (case, error, wanted)
            found.append((case, "raises"))
        else:
            assert not isinstance(wanted, Exception), (case, wanted, got)
            torch.testing.assert_close(got, wanted, msg=str(case))
            found.append((case, "right"))
    return found


@pytest.mark.parametrize("shape", [(2,), (4,), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_an_index_out_of_range_is_the_error_of_one_process_on_every_rank(shape):
    first, *others = run_ranks(looked_up, 2 if shape == (2,) else 4, shape, start_torch=True, timeout=120)
    assert all(one == first for one in others)


def targets_of_one_row(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (2, 2))
    scores = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0), Shard(1)])
    found = []
    for target in ([0, 1, 2, 9], [9, 1, 2, 3], [0, 1, 2, 5]):
        labels = distribute_tensor(torch.tensor(target), mesh, [Shard(0), Replicate()])
        for reduction in ("mean", "sum", "none"):
            found.append(outcome(lambda r=reduction, t=labels: functional.cross_entropy(scores, t, reduction=r)))
    return found


def test_a_target_that_only_some_ranks_have_is_refused_by_all():
    first, *others = run_ranks(targets_of_one_row, 4, start_torch=True)
    assert all(one == first for one in others)
    assert first[:6] == ["IndexError"] * 6 and "IndexError" not in first[6:]


# ---- what ranks say of their tensors ---------------------------------------------------------------------------------


def checked(rank, world_size, shape):
    mesh = dist.init_device_mesh("cpu", shape)
    changes = {
        "dtype": lambda x: x.double(),
        "shape": lambda x: x[:2],
        "ndim": lambda x: x[0],
        "requires_grad": lambda x: x.detach(),
        "stride": lambda x: x.t(),
        "nothing": lambda x: x,
    }
    found = {}
    for kind in (Shard(0), Replicate(), Partial()):
        for name, change in changes.items():
            x = torch.randn(3, 3, requires_grad=True)
            x = change(x) if rank == world_size - 1 else x
            placements = [kind] * len(shape)
            found[str(kind), name] = outcome(lambda x=x, p=placements: DTensor.from_local(x, mesh, p, run_check=True))
    x = torch.ones(3, 3)
    for name, given in {
        "placements": lambda: {"placements": [Shard(rank % 2)] * len(shape)},
        "whole": lambda: {"placements": [Replicate()] * len(shape), "shape": (3, 3) if rank else (4, 3)},
        "grad": lambda: {"placements": [Replicate()] * len(shape), "grad_placements": [Partial()] if rank else None},
        "sized": lambda: {"placements": [SizedShard(0, [2] * shape[0]), *[Replicate()] * (len(shape) - 1)]},
    }.items():
        found[name] = outcome(lambda g=given: DTensor.from_local(x, mesh, run_check=True, **g()))
    return found


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_run_check_compares_all_that_a_spec_holds_and_raises_on_every_rank(shape):
    first, *others = run_ranks(checked, 2 * len(shape), shape, start_torch=True)
    assert all(one == first for one in others)
    fine = {key for key, one in first.items() if one != "ValueError"}
    assert fine == {(kind, "nothing") for kind in ("S(0)", "R", "P(sum)")}, first


def wrong_sizes(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    made = local_map(lambda local: local[: 2 + rank], out_placements=[Shard(0)])(x)
    with pytest.raises(MismatchError, match=r"give from_local shape=.*SizedShard\(dim, sizes\).*run_check=True"):
        made.full_tensor()


def test_a_mismatch_of_sizes_says_what_can_be_given():
    run_ranks(wrong_sizes, 2, start_torch=True)


def rows_of_other_sizes(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    outer, inner = mesh.get_coordinate()
    x = distribute_tensor(torch.arange(10.0), mesh, [Shard(0), Shard(0)])  # uneven, so that sizes are exchanged
    found = {}
    for name, sizes in {
        "chunks": ((2, 1), (2, 2)),
        "alike": ((1, 3), (1, 3)),
        "other in each row": ((1, 3), (3, 1)),
        "one row of chunks": ((2, 2), (1, 3)),
    }.items():
        before = sum(sizes[0][:inner]) if outer == 0 else sum(sizes[0]) + sum(sizes[1][:inner])
        piece = torch.arange(float(before), before + sizes[outer][inner])
        run = local_map(lambda local, piece=piece: piece, out_placements=[Shard(0), Shard(0)])
        found[name] = outcome(lambda run=run: run(x))
        if found[name] != "ValueError":
            total = sum(map(sum, sizes))
            assert run(x).full_tensor().tolist() == list(range(total)), name
    # Two dims of one tensor.
    y = distribute_tensor(torch.arange(15.0).view(3, 5), mesh, [Shard(0), Shard(1)])
    made = local_map(lambda local: local * 1, out_placements=[Shard(0), Shard(1)])(y)
    assert torch.equal(made.full_tensor(), y.full_tensor())
    return found


def test_pieces_of_other_sizes_in_each_row_are_one_tensor_or_refused_by_all():
    first, *others = run_ranks(rows_of_other_sizes, 4, start_torch=True)
    assert all(one == first for one in others)
    assert [name for name, one in first.items() if one == "ValueError"] == ["other in each row", "one row of chunks"]
