"""What the engine derives from a rule, which strategies sizes allow, how a rank's own work differs, what is chosen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.dtensor._layout import chunk, local_shape
from phalanx.dtensor._rules.constraints import OpSizes, nested_chunk
from phalanx.dtensor._rules.cost import CostModel, MeshDimCost, choose
from phalanx.dtensor._rules.engine import combine, derive
from phalanx.dtensor._rules.local_adjustments import local_work, neutral
from phalanx.dtensor._rules.parser import RuleError, parse
from phalanx.dtensor._rules.registry import ArgMeta, find
from phalanx.dtensor._rules.view import reshape_rule
from phalanx.dtensor.placement_types import Partial, Replicate, Shard

aten = torch.ops.aten
R = Replicate()
P = Partial("sum")


def placed(strategies):
    return {(one.inputs, one.outputs) for one in strategies}


def meta(*shape, dtype=torch.float32):
    return ArgMeta(shape, dtype)


def allowed(op, args, mesh_size):
    match = find(op, args)
    return placed(one for one in match.strategies if combine([one], match.facts, [mesh_size]))


def test_matmul_has_five_strategies_beside_the_whole_one():
    found = derive("m k, k n -> m n ; k:sum ; lin 0|1", (2, 2)).strategies
    assert placed(found) == {
        ((R, R), (R,)),
        ((Shard(0), R), (Shard(0),)),
        ((R, Shard(1)), (Shard(1),)),
        ((Shard(1), Shard(0)), (P,)),
        ((P, R), (P,)),
        ((R, P), (P,)),
    }
    assert found[0].inputs == (R, R)


def test_a_dim_of_size_one_broadcasts_whole_while_the_other_is_cut():
    assert ((Shard(0), R), (Shard(0),)) in allowed(aten.mul.Tensor, (meta(4, 3), meta(1, 3)), 2)
    assert ((Shard(0), Shard(0)), (Shard(0),)) not in allowed(aten.mul.Tensor, (meta(4, 3), meta(1, 3)), 2)
    assert ((R, Shard(0)), (Shard(1),)) in allowed(aten.mul.Tensor, (meta(4, 1), meta(3)), 2)
    both = allowed(aten.mul.Tensor, (meta(4, 3), meta(4, 3)), 2)
    assert ((Shard(0), Shard(0)), (Shard(0),)) in both
    assert ((Shard(0), R), (Shard(0),)) not in both


def test_strategies_of_a_new_shape_are_the_same_objects():
    first = find(aten.mm.default, (meta(4, 5), meta(5, 6)))
    second = find(aten.mm.default, (meta(40, 50), meta(50, 60)))
    assert first.strategies is second.strategies


def test_a_whole_factor_is_never_cut_and_an_unreduced_one_neither():
    assert placed(derive("a x! -> a x!", (2,)).strategies) == {((R,), (R,)), ((Shard(0),), (Shard(0),))}
    assert placed(derive("a b -> a", (2,)).strategies) == {((R,), (R,)), ((Shard(0),), (Shard(0),))}


def test_the_bias_of_a_contraction_is_partial_where_the_contraction_is_cut():
    found = allowed(aten.addmm.default, (meta(6), meta(4, 8), meta(8, 6)), 2)
    assert ((P, Shard(1), Shard(0)), (P,)) in found
    assert ((R, Shard(1), Shard(0)), (P,)) not in found
    assert ((P, P, R), (P,)) in found


def test_partials_of_sums_do_not_pass_through_what_is_affine():
    match = find(aten.add.Tensor, (meta(4), 1.0))
    assert ((P,), (P,)) not in placed(match.strategies)
    assert ((Partial("max"),), (Partial("max"),)) in placed(match.strategies)


def test_order_turns_round_in_falling_ops_and_is_lost_beside_infinities_and_where_ints_wrap():
    assert ((Partial("max"),), (Partial("min"),)) in placed(find(aten.neg.default, (meta(4),)).strategies)
    assert ((Partial("max"),), (Partial("min"),)) in placed(find(aten.rsub.Scalar, (meta(4), 2)).strategies)
    assert ((Partial("max"),), (Partial("min"),)) not in placed(find(aten.rsub.Scalar, (meta(4), 2, -1)).strategies)
    # A tensor may hold -inf where a term of the maximum is inf.
    assert ((Partial("max"), R), (Partial("max"),)) not in placed(find(aten.add.Tensor, (meta(4),) * 2).strategies)
    assert ((Partial("max"),), (Partial("max"),)) not in placed(find(aten.add.Tensor, (meta(4), torch.inf)).strategies)
    narrow = meta(4, dtype=torch.uint8)
    assert ((Partial("max"),), (Partial("max"),)) not in allowed(aten.add.Tensor, (narrow, 1), 2)
    assert ((P, P), (P,)) not in allowed(aten.add.Tensor, (meta(4, dtype=torch.bool),) * 2, 2)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ([4, 6], [24], "f0 f1 -> (f0 f1)"),
        ([24], [4, 6], "(f0 f1) -> f0 f1"),
        ([4, 6], [2, 12], "(f0 f1) f2 -> f0 (f1 f2)"),
        ([6, 4], [4, 6], "(f0 f1!) f3! -> (f0 f2!) f4!"),
        ([4, 1, 6], [4, 6], "f0 1 f1 -> f0 f1"),
        ([], [1, 1], " -> 1 1"),
        ([3, 0, 2], [3, 2, 0], "f0 f1! f2! -> f0 f3! f4!"),
    ],
)
def test_a_reshape_says_which_dims_split_and_merge(before, after, text):
    assert reshape_rule(before, after)[0] == text


def test_the_outer_factor_of_a_merge_is_cut_where_chunks_line_up_the_inner_one_where_it_is_alone():
    cut_first = ((Shard(0),), (Shard(0),))
    cut_second = ((Shard(1),), (Shard(0),))
    assert cut_first in allowed(aten.view.default, (meta(4, 6), [24]), 2)
    assert cut_first not in allowed(aten.view.default, (meta(3, 6), [18]), 2)
    assert cut_second not in allowed(aten.view.default, (meta(4, 6), [24]), 2)
    assert cut_second in allowed(aten.view.default, (meta(1, 6), [6]), 4)
    assert cut_first in allowed(aten.view.default, (meta(24), [4, 6]), 4)
    assert cut_first not in allowed(aten.view.default, (meta(24), [4, 6]), 3)


def test_a_mesh_of_two_dims_takes_one_strategy_for_each_and_refuses_what_does_not_combine():
    match = find(aten.view.default, (meta(4, 6), [24]))
    rows = next(one for one in match.strategies if one.inputs == (Shard(0),))
    assert combine([rows, rows], match.facts, [2, 2])
    assert not combine([rows, rows], match.facts, [2, 3])
    relu = find(aten.relu.default, (meta(4, 6),))
    highest, lowest = (next(s for s in relu.strategies if s.inputs == (Partial(op),)) for op in ("max", "min"))
    assert combine([highest, highest], relu.facts, [2, 2])
    # A maximum of minima is not a minimum of maxima.
    assert not combine([highest, lowest], relu.facts, [2, 2])


def test_a_mean_is_scaled_by_the_share_of_the_rank_and_nothing_adds_nothing():
    match = find(aten.mean.dim, (meta(5, 3), [0]))
    rows = next(one for one in match.strategies if one.inputs == (Shard(0),))
    assert rows.outputs == (P,)
    shares = []
    for rank in range(4):
        work = local_work(match.rule, [rows], match.facts, [(3,)], [4], [rank])
        shares.append(dict(work.scales)[0])
    assert shares == [0.4, 0.4, 0.2, 0.0]
    done = work.finish([torch.full((3,), torch.nan)])
    assert torch.equal(done[0], torch.zeros(3))


def test_a_maximum_of_nothing_is_filled_with_what_a_maximum_does_not_notice():
    match = find(aten.amax.default, (meta(5, 3), [0]))
    rows = next(one for one in match.strategies if one.inputs == (Shard(0),))
    works = [local_work(match.rule, [rows], match.facts, [(3,)], [4], [rank]) for rank in range(4)]
    assert [work.fills for work in works] == [None, None, None, "max"]
    assert works[3].filled([torch.float32])[0].tolist() == [-torch.inf] * 3
    assert neutral("min", torch.int8) == 127 and neutral("max", torch.bool) is False


def test_sizes_among_the_arguments_become_local_ones():
    match = find(aten.view.default, (meta(8, 3), [4, 2, 3]))
    rows = next(one for one in match.strategies if one.inputs == (Shard(0),))
    work = local_work(match.rule, [rows], match.facts, [(4, 2, 3)], [4], [2])
    assert work.sizes == ((1, [1, 2, 3]),)
    norm = find(aten.native_group_norm.default, (meta(5, 4, 2), None, None, 5, 4, 2, 2, 1e-5))
    batch = next(one for one in norm.strategies if one.inputs == (Shard(0),))
    work = local_work(norm.rule, [batch], norm.facts, [(5, 4, 2), (5, 2), (5, 2)], [2], [1])
    assert work.sizes == ((3, 2),)


def test_what_is_not_read_stays_as_it_is():
    assert find(aten.new_zeros.default, (meta(4, 5), [3])).strategies[0].inputs == (None,)
    choice = choose(find(aten.new_zeros.default, (meta(4, 5), [3])), [(Shard(1),)], CostModel((MeshDimCost(4),)))
    assert choice.cost_us == 0 and choice.outputs == ((R,),)
    # The gradient of a loss begins with ones of its shape: the loss is not reduced for it.
    choice = choose(find(aten.ones_like.default, (meta(),)), [(P,)], CostModel((MeshDimCost(4),)))
    assert choice.cost_us == 0 and choice.outputs == ((R,),)


def test_an_output_that_does_not_depend_on_a_factor_is_whole_where_it_is_cut():
    found = derive("n o, n c -> o c, o ; n:sum ; c:same", (2, 2)).strategies
    assert ((R, Shard(1)), (Shard(1), R)) in placed(found)
    assert ((Shard(0), Shard(0)), (P, P)) in placed(found)
    assert not any(one.inputs == (Shard(1), R) and one.outputs[1] == R for one in found)


def test_a_full_factor_is_cut_only_where_every_rank_gets_a_part():
    expanded = derive("a -> a ; full a", (1,))
    rows = expanded.strategies[1]

    def may(size, *mesh):
        return combine([rows] * len(mesh), OpSizes(expanded.inputs, [(size,)], [torch.float32]), mesh)

    assert may(3, 3) and not may(4, 3) and not may(2, 3)
    # 7 over 2 is 4 and 3: the first of these leaves a rank of three with nothing.
    assert not may(7, 2, 3) and may(6, 2, 3)


def test_a_rule_for_other_ranks_is_refused():
    with pytest.raises(RuleError, match="needs 2 dims in input 0, and the call has 3"):
        derive("m k, k n -> m n ; k:sum", (3, 2))
    with pytest.raises(RuleError, match="is for 2 tensors, and the call has 1"):
        derive("m k, k n -> m n ; k:sum", (2,))


@given(st.integers(0, 40), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_chunks_are_those_of_torch_chunk_and_nest(size, counts):
    pieces = {(): torch.arange(size)}
    for count in counts:
        grown = {}
        for at, piece in pieces.items():
            parts = list(torch.chunk(piece, count)) if len(piece) else []
            parts += [piece[:0]] * (count - len(parts))
            grown.update({(*at, index): part for index, part in enumerate(parts)})
        pieces = grown
    for at, piece in pieces.items():
        assert nested_chunk(size, list(zip(counts, at, strict=True))) == len(piece)
        assert local_shape((size, 3), counts, [Shard(0)] * len(counts), at) == (len(piece), 3)


@given(st.integers(1, 24), st.integers(1, 6), st.integers(1, 5))
def test_chunks_of_a_merged_dim_line_up_exactly_where_the_condition_says(outer, inner, ranks):
    expanded = derive("a b -> (a b)", (2,))
    facts = OpSizes(expanded.inputs, [(outer, inner)], [torch.float32])
    rows = next(one for one in expanded.strategies if one.inputs == (Shard(0),))
    same = all(chunk(outer * inner, ranks, rank)[1] == inner * chunk(outer, ranks, rank)[1] for rank in range(ranks))
    assert combine([rows], facts, [ranks]) == same


# ---- choice ---------------------------------------------------------------------------------------------------------

LINE = CostModel((MeshDimCost(4),))
GRID = CostModel((MeshDimCost(2), MeshDimCost(2)))


def chosen(op, args, placements, model=LINE):
    choice = choose(find(op, args), placements, model)
    return choice.inputs, choice.outputs


@pytest.mark.parametrize(
    ("op", "args", "now", "inputs", "output"),
    [
        (aten.mm.default, (meta(64, 64),) * 2, [R, Shard(1)], [R, Shard(1)], Shard(1)),
        (aten.mm.default, (meta(64, 64),) * 2, [Shard(1), Shard(0)], [Shard(1), Shard(0)], P),
        (aten.mm.default, (meta(64, 64),) * 2, [P, R], [P, R], P),
        (aten.addmm.default, (meta(64), *(meta(64, 64),) * 2), [R, Shard(1), Shard(0)], [P, Shard(1), Shard(0)], P),
        (aten.add.Tensor, (meta(64, 64),) * 2, [R, R], [R, R], R),
        (aten.add.Tensor, (meta(64, 64),) * 2, [P, R], [P, P], P),
        (aten.add.Tensor, (meta(64, 64),) * 2, [P, Shard(0)], [Shard(0), Shard(0)], Shard(0)),
        (aten.relu.default, (meta(64, 64),), [P], [Shard(0)], Shard(0)),
    ],
)
def test_the_cheapest_strategy_is_chosen_for_where_the_inputs_are(op, args, now, inputs, output):
    assert chosen(op, args, [(one,) for one in now]) == (tuple((one,) for one in inputs), ((output,),))


def test_each_mesh_dim_is_chosen_by_its_own_placements():
    inputs, outputs = chosen(aten.mm.default, (meta(64, 64),) * 2, [(Shard(0), R), (R, Shard(1))], GRID)
    assert inputs == ((Shard(0), R), (R, Shard(1)))
    assert outputs == ((Shard(0), Shard(1)),)


def test_a_combination_that_sizes_forbid_gives_way_to_the_next_cheapest():
    # 3 rows of 6 do not line up with halves of 18: the rows have to be gathered.
    inputs, outputs = chosen(aten.view.default, (meta(3, 6), [18]), [(Shard(0),)], CostModel((MeshDimCost(2),)))
    assert (inputs, outputs) == (((R,),), ((R,),))


def test_what_is_written_into_keeps_its_placement():
    with pytest.raises(ValueError, match=r"writes into a tensor of placements \['P\(sum\)'\]"):
        chosen(aten.add_.Tensor, (meta(8), 1.0), [(P,)])
    assert chosen(aten.mul_.Tensor, (meta(8), meta(8)), [(P,), (R,)]) == (((P,), (R,)), ((P,),))
    inputs, outputs = chosen(aten.add_.Tensor, (meta(8), meta(8)), [(Shard(0),), (R,)])
    assert (inputs, outputs) == (((Shard(0),), (Shard(0),)), ((Shard(0),),))


def test_the_rule_text_of_a_call_is_shown_by_its_match():
    match = find(aten.sum.dim_IntList, (meta(4, 5), [1], True))
    assert match.rule is parse("d0 d1 -> d0 1 ; d1:sum ; lin 0")
