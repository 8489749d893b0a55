"""Every way from one tuple of placements to another, run for all ranks of a mesh in one process, against slices of the
whole tensor that are worked out here without the package's own arithmetic.
"""

import itertools
import math
import random

import pytest
import torch

from phalanx.dtensor import AbstractMesh, Partial, Replicate, Shard, SizedShard, StridedShard
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._redistribute import planner
from phalanx.dtensor._redistribute.local_steps import Place, action
from phalanx.dtensor._redistribute.planner import Planner
from phalanx.dtensor._rules.cost import default_model

R, P = Replicate(), Partial

# ---- what each rank must have, by hand -------------------------------------------------------------------------------


def chunks(indices, count):
    """As torch.chunk cuts: pieces of ceil(n / count), the last ones shorter or empty."""
    length = math.ceil(len(indices) / count)
    return [indices[i * length : (i + 1) * length] for i in range(count)]


def cut(indices, placement, ranks, at):
    if isinstance(placement, Shard):
        return chunks(indices, ranks)[at]
    if isinstance(placement, SizedShard):
        begin = sum(placement.sizes[:at])
        return indices[begin : begin + placement.sizes[at]]
    firsts = chunks(indices, placement.split_factor)
    return [index for first in firsts for index in chunks(first, ranks)[at]]


def sliced(whole, mesh_shape, placements, coordinate):
    """What a rank has of a tensor of which nothing is Partial."""
    indices = [list(range(size)) for size in whole.shape]
    for placement, ranks, at in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, (Shard, SizedShard, StridedShard)):
            indices[placement.dim] = cut(indices[placement.dim], placement, ranks, at)
    for dim, own in enumerate(indices):
        whole = whole.index_select(dim, torch.tensor(own, dtype=torch.long))
    return whole


REDUCE = {
    "sum": lambda terms: sum(terms[1:], terms[0]),
    "avg": lambda terms: sum(terms[1:], terms[0]) / len(terms),
    "max": lambda terms: torch.stack(terms).amax(0),
    "min": lambda terms: torch.stack(terms).amin(0),
    "product": lambda terms: math.prod(terms[1:], start=terms[0]),
    "bxor": lambda terms: terms[0] ^ terms[1] if len(terms) == 2 else terms[0] ^ terms[1] ^ terms[2],
}


def reduced(terms, mesh_shape, placements):
    """The value of terms {coordinate: tensor}: Partials of later mesh dims first."""
    for mesh_dim in reversed(range(len(mesh_shape))):
        if isinstance(placements[mesh_dim], Partial):
            rest = [range(1) if at == mesh_dim else range(size) for at, size in enumerate(mesh_shape)]
            for start in itertools.product(*rest):
                row = [(*start[:mesh_dim], i, *start[mesh_dim + 1 :]) for i in range(mesh_shape[mesh_dim])]
                value = REDUCE[placements[mesh_dim].reduce_op]([terms[one] for one in row])
                terms = {**terms, **dict.fromkeys(row, value)}
    return terms


def locals_of(mesh_shape, placements, shape, dtype=torch.float64):
    """Local tensors of all ranks, and the whole value."""
    generator = torch.Generator().manual_seed(7)
    terms = {}
    for coordinate in itertools.product(*map(range, mesh_shape)):
        # Ranks that differ only where nothing is Partial have the same term.
        key = tuple(c for c, p in zip(coordinate, placements, strict=True) if isinstance(p, Partial))
        if key not in terms:
            # Averages of these over the ranks are exact.
            terms[key] = torch.randint(-4, 5, shape, generator=generator).mul(144).to(dtype)
    term_at = {
        coordinate: terms[tuple(c for c, p in zip(coordinate, placements, strict=True) if isinstance(p, Partial))]
        for coordinate in itertools.product(*map(range, mesh_shape))
    }
    value = reduced(term_at, mesh_shape, placements)[(0,) * len(mesh_shape)]
    return {at: sliced(term, mesh_shape, placements, at) for at, term in term_at.items()}, value


# ---- all ranks in one process ----------------------------------------------------------------------------------------


def collect(call, inputs, order):
    """What a collective gives each rank of a row: `order` has the coordinates in the order of the group."""
    count = len(order)
    given = [inputs[at] for at in order]
    if call.name == "all_reduce":
        results = [REDUCE[call.op](given)] * count
    elif call.name == "all_gather":
        assert len({one.shape for one in given}) == 1  # the collective asks for it
        results = [torch.cat(given, call.dim)] * count
    elif call.name == "all_gather_v":
        assert tuple(one.size(call.dim) for one in given) == call.sizes
        results = [torch.cat(given, call.dim)] * count
    elif call.name == "reduce_scatter_v":
        results = list(REDUCE[call.op](given).split(call.sizes, call.dim))
    elif call.name == "reduce_scatter":
        assert given[0].size(call.dim) % count == 0
        results = list(REDUCE[call.op](given).chunk(count, call.dim))
    elif call.name == "all_to_all_v":
        assert tuple(one.size(call.dim) for one in given) == call.sizes
        parts = [one.split(call.target_sizes, call.target_dim) for one in given]
        results = [torch.cat([part[i] for part in parts], call.dim) for i in range(count)]
    else:
        assert call.name == "all_to_all"
        assert given[0].size(call.target_dim) % count == 0
        parts = [one.chunk(count, call.target_dim) for one in given]
        results = [torch.cat([part[i] for part in parts], call.dim) for i in range(count)]
    return {at: result.contiguous() for at, result in zip(order, results, strict=True)}


def exchanged(calls, inputs):
    """The same for an exchange; ranks are known by their numbers."""
    results = {}
    for me, call in calls.items():
        parts = []
        for peer, count in zip(call.peers, call.received, strict=True):
            other = calls[peer]
            position = other.peers.index(me)
            begin = sum(other.sent[:position])
            assert other.sent[position] == count
            parts.append(inputs[peer][begin : begin + count])
        results[me] = torch.cat(parts)
    return results


def run_all(steps, mesh_shape, shape, dtype, values, backwards=False):
    """Run steps on all ranks; with `backwards`, groups have their ranks in the opposite order."""
    orders = tuple(tuple(range(size))[:: -1 if backwards else 1] for size in mesh_shape)
    numbers = tuple(range(math.prod(mesh_shape)))[:: -1 if backwards else 1]
    ranks = list(itertools.product(*map(range, mesh_shape)))
    number = dict(zip(ranks, numbers, strict=True))
    for step in steps:
        actions = {at: action(step, Place(shape, dtype, mesh_shape, at, orders, numbers)) for at in ranks}
        buffers = {at: actions[at].before(v) if actions[at].before else v for at, v in values.items()}
        calls = {at: one.call for at, one in actions.items()}
        if any(call is not None for call in calls.values()):
            # Ranks of one row make the same call; those of another row may make another.
            exchanges = {number[at]: call for at, call in calls.items() if call and call.name == "exchange"}
            found = exchanged(exchanges, {number[at]: buffer for at, buffer in buffers.items()})
            others = {at: None if number[at] in exchanges else call for at, call in calls.items()}
            buffers = one_mesh_dim(others, buffers, mesh_shape, orders)
            buffers = {at: found.get(number[at], buffer) for at, buffer in buffers.items()}
        values = {at: actions[at].after(b) if actions[at].after else b for at, b in buffers.items()}
    return values


def one_mesh_dim(calls, buffers, mesh_shape, orders):
    results = dict(buffers)
    mesh_dim = next((call.mesh_dim for call in calls.values() if call is not None), None)
    if mesh_dim is None:
        return results
    for start in itertools.product(*(range(1) if i == mesh_dim else range(n) for i, n in enumerate(mesh_shape))):
        row = [(*start[:mesh_dim], i, *start[mesh_dim + 1 :]) for i in range(mesh_shape[mesh_dim])]
        own = {calls[at] for at in row}
        assert len(own) == 1  # every rank of a group makes the same call
        call = own.pop()
        if call is not None:
            found = collect(call, {i: buffers[at] for i, at in enumerate(row)}, orders[mesh_dim])
            results.update({at: found[i] for i, at in enumerate(row)})
    return results


def check(mesh_shape, source, target, shape, dtype=torch.float64, backwards=False, steps=None):
    values, whole = locals_of(mesh_shape, source, shape, dtype)
    before = {at: value.clone() for at, value in values.items()}
    if steps is None:
        steps = Planner(shape, dtype, mesh_shape, default_model(mesh_shape)).plan(source, target)
    assert not steps or (steps[0].source, steps[-1].target) == (source, target)
    results = run_all(steps, mesh_shape, shape, dtype, values, backwards)
    where = f"{mesh_shape} {shape}: {source} -> {target}\n" + "\n".join(map(str, steps))
    assert all(torch.equal(values[at], before[at]) for at in values), where
    value = whole
    if any(isinstance(one, Partial) for one in target):
        # Terms are checked by what they reduce to.
        for at, local in results.items():
            shards = [R if isinstance(one, Partial) else one for one in target]
            assert local.shape == sliced(whole, mesh_shape, shards, at).shape, where
        results = reduced(results, mesh_shape, target)
        target = tuple(R if isinstance(one, Partial) else one for one in target)
    for at, local in results.items():
        assert torch.equal(local, sliced(value, mesh_shape, target, at)), f"{where}\nat {at}"


def placements_for(size, ranks, partials=True):
    """The placements of one mesh dim for a tensor of shape (size, 4)."""
    some = [size // 3, *([0] * (ranks - 2)), size - size // 3]
    found = [R, Shard(0), Shard(1), SizedShard(0, some), StridedShard(0, 2)]
    return [*found, P("sum"), P("max"), P("avg")] if partials else found


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [12, 7, 2, 1, 0])
def test_one_mesh_dim_every_pair(size, ranks, backwards):  # D4, D6
    for source, target in itertools.product(placements_for(size, ranks), repeat=2):
        check((ranks,), (source,), (target,), (size, 4), backwards=backwards)


def valid(shape, mesh_shape, placements):
    try:
        DTensorSpec(AbstractMesh(mesh_shape), placements, shape)
    except ValueError:
        return False
    return True


def tuples(shape, mesh_shape):
    all_of_them = itertools.product(*(placements_for(shape[0], ranks) for ranks in mesh_shape))
    return [placed for placed in all_of_them if valid(shape, mesh_shape, placed)]


@pytest.mark.parametrize("mesh_shape", [(2, 2), pytest.param((2, 3), marks=pytest.mark.thorough)])
def test_two_mesh_dims_every_pair(mesh_shape):  # D4
    for source, target in itertools.product(tuples((7, 4), mesh_shape), repeat=2):
        check(mesh_shape, source, target, (7, 4))


@pytest.mark.parametrize(
    "mesh_shape", [(2, 3), *(pytest.param(shape, marks=pytest.mark.thorough) for shape in ((2, 2), (3, 2)))]
)
@pytest.mark.parametrize(
    "size", [pytest.param(12, marks=pytest.mark.thorough), pytest.param(3, marks=pytest.mark.slow)]
)
def test_two_mesh_dims_every_pair_of_other_sizes(size, mesh_shape):
    for source, target in itertools.product(tuples((size, 4), mesh_shape), repeat=2):
        check(mesh_shape, source, target, (size, 4), backwards=True)


def sampled(mesh_shape, count):
    choice = random.Random(11)
    shards = [Shard(0), Shard(1), Shard(2), StridedShard(0, 2), StridedShard(2, 3)]
    for _ in range(count):
        shape = (choice.choice([1, 5, 8]), choice.choice([3, 4]), choice.choice([2, 7]))
        source = tuple(choice.choice([R, *shards, P("sum"), P("avg"), P("max"), P("min")]) for _ in mesh_shape)
        target = tuple(choice.choice([R, *shards, P("sum"), P("max")]) for _ in mesh_shape)
        yield source, target, shape


def test_three_mesh_dims():
    for source, target, shape in sampled((2, 3, 2), 60):
        check((2, 3, 2), source, target, shape)


def test_the_way_of_a_search_that_gives_up(monkeypatch):
    monkeypatch.setattr(planner, "_MOST_STATES", 0)
    for source, target, shape in sampled((2, 2, 2), 60):
        check((2, 2, 2), source, target, shape)


def test_an_exchange_whose_bytes_are_not_counted(monkeypatch):
    monkeypatch.setattr(planner, "_MOST_COUNTED", 0)
    for source, target, shape in sampled((2, 3), 150):
        check((2, 3), source, target, shape)
