"""Index arithmetic gives what torch.chunk gives on tensors of indices, for every placement, mesh and shape."""

from itertools import pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from phalanx.dtensor import AbstractMesh, _layout
from phalanx.dtensor._utils import compute_local_shape_and_global_offset
from phalanx.dtensor.placement_types import Partial, Replicate, Shard, SizedShard, StridedShard, as_torch_placement

# ---- the reference: torch cuts tensors of indices -------------------------------------------------------------------


def chunks(indices, count):
    cut = list(torch.chunk(indices, count))
    return cut + [indices[:0]] * (count - len(cut))


def pieces(indices, placement, count):
    if isinstance(placement, Shard):
        return chunks(indices, count)
    if isinstance(placement, SizedShard):
        return list(torch.split(indices, placement.sizes))
    columns = [chunks(first, count) for first in chunks(indices, placement.split_factor)]
    return [torch.cat([column[index] for column in columns]) for index in range(count)]


def local_indices(shape, mesh_shape, placements, coordinate):
    """For each dim, the global indices that a rank has."""
    indices = [torch.arange(size) for size in shape]
    for count, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        if isinstance(placement, Shard | SizedShard | StridedShard):
            indices[placement.dim] = pieces(indices[placement.dim], placement, count)[index]
    return [found.tolist() for found in indices]


def coordinates(mesh_shape):
    return product(*map(range, mesh_shape))


def listed(runs):
    return [index for start, length in runs for index in range(start, start + length)]


@st.composite
def placements_on(draw, shape, mesh_shape):
    """A SizedShard splits its dim first, so that its sizes fit whatever the others do."""
    chosen, split = [], set()
    for count in mesh_shape:
        kinds = ["replicate", "partial"] + (["shard", "strided", "sized"] if shape else [])
        kind = draw(st.sampled_from(kinds))
        dim = draw(st.integers(0, max(len(shape) - 1, 0)))
        if kind == "sized" and dim not in split:
            ends = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=count - 1, max_size=count - 1)))
            chosen.append(SizedShard(dim, [b - a for a, b in zip([0, *ends], [*ends, shape[dim]], strict=True)]))
        elif kind in ("shard", "sized"):
            chosen.append(Shard(dim))
        elif kind == "strided":
            chosen.append(StridedShard(dim, draw(st.integers(1, 4))))
        else:
            chosen.append(Replicate() if kind == "replicate" else Partial())
            continue
        split.add(dim)
    return tuple(chosen)


@st.composite
def layouts(draw, how_many=1):
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=0, max_size=3)))
    found = []
    for _ in range(how_many):
        mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
        found.append((mesh_shape, draw(placements_on(shape, mesh_shape))))
    return shape, *found


# ---- shapes, offsets and runs ---------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_every_rank_has_the_indices_that_chunk_gives_it(case):
    shape, (mesh_shape, placements) = case
    _layout.check_sizes(shape, mesh_shape, placements)
    shapes = set()
    for coordinate in coordinates(mesh_shape):
        expected = local_indices(shape, mesh_shape, placements, coordinate)
        runs = _layout.local_runs(shape, mesh_shape, placements, coordinate)
        assert [listed(dim_runs) for dim_runs in runs] == expected
        for dim_runs in runs:  # tidy: ascending, not empty, neighbours joined
            assert all(length > 0 for _, length in dim_runs)
            assert all(a + n < b for (a, n), (b, _) in pairwise(dim_runs))
        local = _layout.local_shape(shape, mesh_shape, placements, coordinate)
        assert local == tuple(map(len, expected))
        shapes.add(local)
    if len(shapes) == 1 and 0 not in shape:
        assert _layout.global_shape(shapes.pop(), mesh_shape, placements) == shape


@settings(max_examples=80, deadline=None)
@given(layouts())
def test_shapes_and_offsets_are_those_of_torch(case):
    shape, (mesh_shape, placements) = case
    if any(isinstance(placement, SizedShard) for placement in placements):
        return  # torch has none
    theirs = [as_torch_placement(placement) for placement in placements]
    for coordinate in coordinates(mesh_shape):
        expected = _compute_local_shape_and_global_offset(shape, mesh_shape, coordinate, theirs)
        mesh = AbstractMesh(mesh_shape, coordinate)
        assert compute_local_shape_and_global_offset(shape, mesh, placements) == expected
        assert compute_local_shape_and_global_offset(shape, mesh, placements, skip_offset=True) == (expected[0], ())


def test_a_dim_is_cut_as_written_in_the_docs():
    # 10 over 4: ceil is 3, and the last has what is left; 3 over 4 leaves an empty one.
    assert [_layout.chunk(10, 4, i) for i in range(4)] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert _layout.piece_sizes(3, Shard(0), 4) == (1, 1, 1, 0)
    assert _layout.piece_sizes(5, Shard(0), 4) == (2, 2, 1, 0)
    assert _layout.piece_sizes(8, SizedShard(0, (3, 5)), 2) == (3, 5)
    # Two mesh dims on one tensor dim: the first cuts first; with a StridedShard, the second does.
    both = (Shard(0), Shard(0))
    swapped = (StridedShard(0, 2), Shard(0))
    rows = {c: _layout.local_runs((8,), (2, 2), both, c)[0] for c in coordinates((2, 2))}
    assert rows == {(0, 0): ((0, 2),), (0, 1): ((2, 2),), (1, 0): ((4, 2),), (1, 1): ((6, 2),)}
    rows = {c: _layout.local_runs((8,), (2, 2), swapped, c)[0] for c in coordinates((2, 2))}
    assert rows == {(0, 0): ((0, 2),), (0, 1): ((4, 2),), (1, 0): ((2, 2),), (1, 1): ((6, 2),)}
    assert _layout.piece_runs(8, StridedShard(0, 2), 2, 1) == ((2, 2), (6, 2))
    # Sizes within what an earlier mesh dim left.
    nested = (Shard(0), SizedShard(0, (1, 3)))
    assert [_layout.local_runs((8,), (2, 2), nested, c)[0] for c in coordinates((2, 2))] == [
        ((0, 1),),
        ((1, 3),),
        ((4, 1),),
        ((5, 3),),
    ]


def test_sizes_that_do_not_fit_are_named():
    _layout.check_sizes((8, 4), (2, 2), (Shard(0), SizedShard(0, (1, 3))))
    with pytest.raises(ValueError, match="has 3 sizes, and mesh dim 1 has 2 ranks"):
        _layout.check_sizes((8, 4), (2, 2), (Shard(0), SizedShard(0, (1, 2, 1))))
    with pytest.raises(ValueError, match=r"add up to 7, but dim 0 of shape \(8, 4\) has 8 elements"):
        _layout.check_sizes((8, 4), (2,), (SizedShard(0, (3, 4)),))
    with pytest.raises(
        ValueError, match=r"the piece of dim 0 of shape \(7, 4\) at \(1,\) of the earlier mesh dims has 3"
    ):
        _layout.check_sizes((7, 4), (2, 2), (Shard(0), SizedShard(0, (1, 3))))


@settings(max_examples=80, deadline=None)
@given(layouts(how_many=2))
def test_blocks_carry_every_element_from_one_layout_to_another(case):
    shape, (source_mesh, source), (target_mesh, target) = case
    whole = torch.arange(prod(shape)).view(shape)
    for to in coordinates(target_mesh):
        to_indices = local_indices(shape, target_mesh, target, to)
        to_runs = _layout.local_runs(shape, target_mesh, target, to)
        found = torch.full([len(have) for have in to_indices], -1)
        times = torch.zeros_like(found)
        for at in coordinates(source_mesh):
            # One of the ranks that have the same elements sends.
            if any(index and isinstance(p, Replicate | Partial) for index, p in zip(at, source, strict=True)):
                continue
            local = take(whole, local_indices(shape, source_mesh, source, at))
            for block in _layout.blocks(_layout.local_runs(shape, source_mesh, source, at), to_runs):
                here = tuple(slice(a, a + n) for a, n in zip(block.source, block.shape, strict=True))
                there = tuple(slice(a, a + n) for a, n in zip(block.target, block.shape, strict=True))
                assert prod(block.shape) > 0
                found[there] = local[here]
                times[there] += 1
        assert torch.equal(found, take(whole, to_indices)) and bool((times == 1).all())


def take(whole, indices):
    for dim, have in enumerate(indices):
        whole = whole.index_select(dim, torch.tensor(have, dtype=torch.int64))
    return whole


def test_overlaps_are_positions_in_both():
    assert _layout.overlap(((0, 4),), ((2, 4),)) == [(2, 0, 2)]
    assert _layout.overlap(((0, 2), (6, 2)), ((1, 6),)) == [(1, 0, 1), (2, 5, 1)]
    assert _layout.overlap(((0, 2),), ((2, 2),)) == [] == _layout.overlap((), ((0, 8),))


# ---- strides --------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_strides_are_those_of_torch(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    whole = torch.empty(shape).permute(order)
    assert _layout.contiguous_stride(shape) == torch.empty(shape).stride()
    part = whole
    for dim, size in enumerate(whole.shape):
        part = part.narrow(dim, 0, data.draw(st.integers(min(size, 1), size)))
    got = _layout.stride_like(part.shape, whole.shape, whole.stride())
    if prod(whole.shape):
        # What torch.empty_like gives, but for dims of which no two elements have a distance.
        expected = torch.empty_like(part).stride()
        assert [a for a, n in zip(got, part.shape, strict=True) if n > 1] == [
            b for b, n in zip(expected, part.shape, strict=True) if n > 1
        ]
    same = _layout.global_stride(whole.shape, whole.shape, whole.stride())
    assert all(a == b for a, b, n in zip(same, whole.stride(), whole.shape, strict=True) if n > 1) or 0 in shape


def test_strides_of_wholes_follow_those_of_parts():
    # A transposed part of a transposed whole, dim 1 of 4 cut in 2.
    assert _layout.stride_like((3, 2), (3, 4), (1, 3)) == (1, 3)
    assert _layout.stride_like((3, 2), (3, 4), (4, 1)) == (2, 1)
    assert _layout.stride_like((3, 4), (3, 2), (1, 3)) == (1, 3)
    assert _layout.stride_like((2, 2), (4, 2), (0, 1)) == (0, 1)  # expanded
    # A dim of one element has no place in memory: it counts as inside of earlier ones, as in a contiguous tensor.
    assert _layout.stride_like((4, 2, 3), (4, 1, 3), (1, 1, 4)) == (2, 1, 8)
    assert _layout.global_stride((3, 4), (3, 2), (2, 1)) == (4, 1)
    assert _layout.global_stride((3, 4), (3, 2), (1, 3)) == (1, 3)
    assert _layout.global_stride((6, 2), (3, 2), (1, 3)) == (1, 6)
    # Gaps stay: rows of 2 of a buffer with rows of 4.
    assert _layout.global_stride((6, 2), (3, 2), (4, 1)) == (4, 1)
    assert _layout.global_stride((3, 4), (3, 2), (4, 1)) == (8, 1)


# ---- sizes that are not known yet -----------------------------------------------------------------------------------

MIXED = [
    ((2,), (Shard(0),)),
    ((4,), (Shard(0),)),
    ((3, 2), (Shard(0), Shard(0))),
    ((2, 2), (StridedShard(0, 2), Shard(0))),
    ((2, 3), (Shard(0), StridedShard(0, 2))),
    ((2, 2), (Replicate(), StridedShard(0, 3))),
]


def backed(value):
    env = ShapeEnv()
    symbol = env.create_symbol(value, ConstantSource("n"), dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=value)


@pytest.mark.parametrize(("mesh_shape", "placements"), MIXED)
def test_sizes_with_a_hint_stay_symbolic_and_give_the_same(mesh_shape, placements):
    for value, coordinate in product((5, 12), coordinates(mesh_shape)):
        size = backed(value)
        got = _layout.local_shape((size, 3), mesh_shape, placements, coordinate)
        expected = _layout.local_shape((value, 3), mesh_shape, placements, coordinate)
        assert isinstance(got[0], torch.SymInt) and (int(got[0]), got[1]) == expected
        runs = _layout.local_runs((size, 3), mesh_shape, placements, coordinate)
        assert listed([(int(a), int(n)) for a, n in runs[0]]) == listed(
            _layout.local_runs((value, 3), mesh_shape, placements, coordinate)[0]
        )
        assert _layout.contiguous_stride((3, size))[0] == value


@pytest.mark.parametrize(("mesh_shape", "placements"), MIXED)
def test_sizes_without_a_hint_give_formulas_that_hold_for_every_size(mesh_shape, placements):
    size = ShapeEnv().create_unbacked_symint()
    for coordinate in coordinates(mesh_shape):
        got = _layout.local_shape((size,), mesh_shape, placements, coordinate)[0].node.expr
        runs = _layout.local_runs((size,), mesh_shape, placements, coordinate)[0]
        for value in (0, 1, 2, 5, 7, 12, 13):
            known = {size.node.expr: value}
            assert (int(got.xreplace(known)),) == _layout.local_shape((value,), mesh_shape, placements, coordinate)
            numbers = [[int(n.node.expr.xreplace(known)) for n in run] for run in symbolic(runs)]
            assert listed(numbers) == listed(_layout.local_runs((value,), mesh_shape, placements, coordinate)[0])


def symbolic(runs):
    """Runs with every number a SymInt."""
    some = next(n for run in runs for n in run if isinstance(n, torch.SymInt))
    return [[n if isinstance(n, torch.SymInt) else some - some + n for n in run] for run in runs]
