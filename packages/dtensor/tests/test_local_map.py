"""local_map: functions of plain tensors on local tensors."""

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx.core import UnsupportedError
from phalanx.dtensor import DTensor, Partial, Replicate, Shard, SizedShard, distribute_tensor
from phalanx.dtensor.experimental import local_map
from ranks import run_ranks

ROWS, COLUMNS, WHOLE = [Shard(0)], [Shard(1)], [Replicate()]


def close(ours, theirs):
    torch.testing.assert_close(ours.full_tensor().detach() if isinstance(ours, DTensor) else ours, theirs.detach())


def functions(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    torch.manual_seed(1)
    w, x = torch.randn(12, 8), torch.randn(8, 16)

    @local_map(out_placements=WHOLE, in_placements=(None, COLUMNS, ROWS))
    def product(group, left, right):
        """Its text stays."""
        assert not isinstance(left, DTensor)
        return pc.all_reduce(torch.mm(left, right), "sum", group)

    assert product.__doc__ == "Its text stays." and product.__name__ == "product"
    close(product(mesh.get_group(), distribute_tensor(w, mesh, COLUMNS), distribute_tensor(x, mesh, ROWS)), w @ x)
    # Without a DTensor it is the function itself.
    assert torch.equal(local_map(torch.mm, WHOLE)(w, x), w @ x)

    # A Partial output, nested inputs, keyword inputs, several outputs, one of them no tensor; gradients.
    def several(pair, *, factor):
        left, right = pair["a"], pair["b"]
        return {"sum": (left * right).sum() * factor, "count": 3, "twice": left * 2}

    ours = [distribute_tensor(one, mesh, ROWS).requires_grad_() for one in (w, w + 1)]
    theirs = [one.clone().requires_grad_() for one in (w, w + 1)]
    mapped = local_map(several, ([Partial()], None, ROWS), in_placements=(ROWS, ROWS))
    found = mapped({"a": ours[0], "b": ours[1]}, factor=3)
    wanted = several({"a": theirs[0], "b": theirs[1]}, factor=3)
    assert found["count"] == 3 and found["sum"].placements == (Partial(),)
    close(found["sum"], wanted["sum"])
    close(found["twice"], wanted["twice"])
    (found["sum"] + found["twice"].sum()).backward()
    (wanted["sum"] + wanted["twice"].sum()).backward()
    for one, other in zip(ours, theirs, strict=True):
        close(one.grad, other.grad)
    # Inputs are brought where they are wanted, if asked to; placements of gradients.
    replicated = distribute_tensor(w, mesh, WHOLE).requires_grad_()
    row_sum = local_map(lambda a, b: (a * b).sum(1), ROWS, (WHOLE, ROWS), ([Partial()], ROWS), redistribute_inputs=True)
    cut = distribute_tensor(w, mesh, COLUMNS)

    def rows_of(t):
        return t.chunk(world_size)[rank]

    mine = local_map(lambda a, b: rows_of(a) * b, ROWS, (WHOLE, ROWS), ([Partial()], ROWS), redistribute_inputs=True)
    mine(replicated, cut).sum().backward()
    close(replicated.grad, w)
    assert row_sum is not None
    # A tuple of placements for one output, and None, which is Replicate.
    close(local_map(lambda a: a + 1, (Shard(0),))(distribute_tensor(w, mesh, ROWS)), w + 1)
    assert local_map(lambda a: a + 1)(distribute_tensor(w, mesh, WHOLE)).placements == (Replicate(),)
    # Uneven shards: outputs have the pieces that came out.
    odd = torch.randn(5, 3)
    own = distribute_tensor(odd, mesh, ROWS)
    y = local_map(lambda a: a * 2, ROWS)(own)
    assert y.placements == (Shard(0),) and y.shape == (5, 3)
    close(y, odd * 2)
    y = local_map(lambda a: torch.cat((a, a)), ROWS)(own)
    assert y.placements == (SizedShard(0, (6, 4)),) and y.shape == (10, 3)
    close(y, torch.cat([part for half in odd.chunk(2) for part in (half, half)]))


def refusals(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    other = dist.init_device_mesh("cpu", (1, world_size))
    x = distribute_tensor(torch.ones(4, 4), mesh, ROWS)

    def keep(*args):
        return args[0]

    with pytest.raises(ValueError, match="in_placements has 1 entries, and keep is called with 2"):
        local_map(keep, ROWS, (ROWS,))(x, x)
    with pytest.raises(ValueError, match="in_grad_placements has 2 entries"):
        local_map(keep, ROWS, None, (ROWS, ROWS))(x)
    with pytest.raises(
        ValueError, match=r"input 0 of keep has placements \[Shard\(dim=0\)\].*write redistribute_inputs=True"
    ):
        local_map(keep, ROWS, (COLUMNS,))(x)
    with pytest.raises(TypeError, match="input 0 of keep is a DTensor, and its entry of in_placements is None"):
        local_map(keep, ROWS, (None,))(x)
    with pytest.raises(TypeError, match="entry of in_grad_placements is None"):
        local_map(keep, ROWS, None, (None,))(x)
    with pytest.raises(TypeError, match="input 1 of keep is int, not a tensor, and (in|out)_placements has"):
        local_map(keep, ROWS, (ROWS, ROWS))(x, 3)
    with pytest.raises(ValueError, match="input 1 of keep is on mesh"):
        local_map(keep, ROWS)(x, distribute_tensor(torch.ones(4), other, [Replicate(), Replicate()]))
    with pytest.raises(ValueError, match="out_placements is for 1 outputs, and <lambda> returned 2"):
        local_map(lambda a: (a, a), ROWS)(x)
    with pytest.raises(TypeError, match="output 0 of <lambda> is int, not a tensor, and (in|out)_placements has"):
        local_map(lambda a: 3, ROWS)(x)
    with pytest.raises(TypeError, match="output 0 of <lambda> is a DTensor"):
        local_map(lambda a: x, ROWS)(x)
    with pytest.raises(UnsupportedError, match="local_map: spmd_types=True"):  # torch 2.14
        local_map(keep, ROWS, spmd_types=True)


def both(rank, world_size):
    functions(rank, world_size)
    refusals(rank, world_size)


def test_functions_of_plain_tensors_run_on_local_tensors():
    run_ranks(both, 2, start_torch=True)
