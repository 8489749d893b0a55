"""What the pass makes of graphs: routes, places in the arena, waits that are gone. Nothing is compiled or sent."""

import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch._subclasses.fake_tensor import FakeTensorMode

import phalanx.collectives as pc
from inductor_graphs import fake_group, lowered, names
from phalanx.inductor_plugin import REASONS, Config, Route, StrictError
from phalanx.inductor_plugin._eligibility import GroupFacts
from phalanx.inductor_plugin._passes import GraphPass


@pytest.fixture
def group():
    with fake_group() as name:
        yield name


def offsets(graph):
    return [node.args[1] for node in graph.nodes if getattr(node.target, "_opname", "") == "arena_view"]


def routes(made):
    return [line.route for report in made.reports for line in report.collectives]


def reasons(made):
    return [line.reason for report in made.reports for line in report.collectives]


X, W = torch.randn(8, 4), torch.randn(4, 16)


def test_a_pointwise_producer_writes_into_the_arena(group):  # I2
    made = lowered(lambda x, w: fc.all_reduce(torch.relu(x @ w), "sum", group) + 1, X, W, zero_copy_bytes=0)
    assert names(made.graph) == [
        *("symm_arena", "aten.mm", "aten.relu", "arena_view", "aten.as_strided", "aten.copy_", "ordered.all_reduce_"),
        "aten.add",
    ]
    assert routes(made) == [Route.ZERO_COPY]
    (report,) = made.reports
    assert (report.copied_before, report.copied_after) == (8 * 16 * 4, 0)


@pytest.mark.parametrize("kind", ["mm", "addmm", "bmm"])
def test_a_product_is_computed_into_the_arena_through_views(group, kind):  # I4
    x, w = (torch.randn(3, 8, 4), torch.randn(3, 4, 16)) if kind == "bmm" else (X, W)
    bias = torch.randn(16)

    def function(x, w, bias):
        product = {"mm": torch.mm, "bmm": torch.bmm}[kind](x, w) if kind != "addmm" else torch.addmm(bias, x, w)
        return fc.all_reduce(product.view(-1), "sum", group) * 2

    made = lowered(function, x, w, bias, zero_copy_bytes=0)
    found = names(made.graph)
    assert f"{kind}_into_" in found
    assert f"aten.{kind}" not in found
    assert "aten.copy_" not in found
    assert routes(made) == [Route.ZERO_COPY]


def test_a_result_of_the_graph_never_lies_in_the_arena(group):
    for function in (
        lambda x: fc.all_reduce(x.relu(), "sum", group),
        lambda x: fc.all_reduce(x.relu(), "sum", group).view(-1),
        lambda x: fc.all_reduce(x.relu(), "sum", group)[1:],
        lambda x: fc.all_reduce(x.relu(), "sum", group).index_put((torch.tensor([0]),), x[:1]),  # perhaps in place
    ):
        made = lowered(function, X, zero_copy_bytes=0)
        assert "ordered.all_reduce" in names(made.graph)
        assert "ordered.all_reduce_" not in names(made.graph)
        assert routes(made) == [Route.ZERO_COPY]


def test_small_values_go_through_the_slots_in_place(group):  # I5
    made = lowered(lambda x: fc.all_reduce(x.relu(), "sum", group) + 1, X)
    assert names(made.graph) == ["symm_arena", "aten.relu", "ordered.all_reduce_", "aten.add"]
    assert (routes(made), reasons(made)) == ([Route.SLOTS], ["small"])


def test_blocking_forms_are_lowered_as_the_others(group):  # I8
    ours = torch.ops.phalanx
    made = lowered(lambda x: ours.blocking_all_reduce(x.relu(), "sum", group) + 1, X)
    assert names(made.graph) == ["symm_arena", "aten.relu", "ordered.all_reduce_", "aten.add"]
    assert (routes(made), reasons(made)) == ([Route.SLOTS], ["small"])
    made = lowered(lambda x: sum(ours.blocking_all_reduce_coalesced([x + 1, x + 2], "sum", group)), X)
    assert "ordered.all_reduce_coalesced_" in names(made.graph)
    made = lowered(lambda x: ours.blocking_all_reduce(x.relu(), "sum", group), X, served=False)
    assert names(made.graph) == ["aten.relu", "blocking_all_reduce"]


def test_inputs_of_the_graph_and_values_in_use_are_not_written_over(group):
    made = lowered(lambda x: fc.all_reduce(x, "sum", group) + x, X)
    assert names(made.graph) == ["symm_arena", "ordered.all_reduce", "aten.add"]

    def used_twice(x):
        y = x.relu()
        return fc.all_reduce(y, "sum", group) + y

    assert "ordered.all_reduce" in names(lowered(used_twice, X).graph)
    assert "ordered.all_reduce" in names(lowered(lambda x: fc.all_reduce(x.relu()[::2], "sum", group) + 1, X).graph)
    made = lowered(lambda x: fc.all_reduce(x, "sum", group) + x, X, zero_copy_bytes=0)
    assert reasons(made) == ["graph-input"]


def test_every_collective_of_torch_is_lowered_and_no_wait_stays(group):  # I8
    def everything(x):
        y = x.relu()
        parts = [
            fc.all_reduce(y + 1, "avg", group),
            *fc.all_reduce_coalesced([y + 2, y + 3], "max", group),
            fc.all_gather_tensor(y + 4, 0, group),
            *fc.all_gather_into_tensor_coalesced([y + 5, y + 6], group),
            fc.reduce_scatter_tensor(y + 7, "sum", 0, group),
            *fc.reduce_scatter_tensor_coalesced([y + 8, y + 9], "sum", [0, 0], group),
            fc.all_to_all_single(y + 10, None, None, group),
            fc.broadcast(y + 11, 0, group),
            torch.ops._dtensor.shard_dim_alltoall(y + 12, 0, 1, group),
        ]
        return sum(part.sum() for part in parts)

    made = lowered(everything, X, zero_copy_bytes=0, bucket_bytes=0)
    found = names(made.graph)
    assert not [name for name in found if "wait" in name or name.startswith(("_c10d", "_dtensor"))]
    sent = [name.removeprefix("ordered.") for name in found if name.startswith("ordered.")]
    assert sent == [
        *("all_reduce_", "all_reduce_coalesced_", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast_"),
        "all_to_all_single",
    ]
    assert set(routes(made)) <= {Route.ZERO_COPY, Route.SLOTS}
    assert routes(made).count(Route.SLOTS) <= 1  # torch gives all_to_all_single splits


def test_our_collectives_are_lowered_like_torchs(group):  # I8
    for module in (fc, pc):
        made = lowered(lambda x, all_reduce=module.all_reduce: all_reduce(x.relu(), "sum", group) + 1, X)
        assert names(made.graph) == ["symm_arena", "aten.relu", "ordered.all_reduce_", "aten.add"]


def test_waits_for_waits_are_looked_through(group):
    def function(x):
        done = torch.ops._c10d_functional.wait_tensor(fc.all_reduce(x.relu(), "sum", group))
        return torch.ops._c10d_functional.wait_tensor(done) * 2

    assert names(lowered(function, X).graph) == ["symm_arena", "aten.relu", "ordered.all_reduce_", "aten.mul"]


def test_results_of_a_collective_may_be_the_input_of_the_next(group):
    def function(x):
        y = fc.all_reduce(fc.all_reduce(x.relu(), "sum", group), "max", group)
        return fc.all_gather_tensor(y, 0, group) + 1

    for config in ({}, {"zero_copy_bytes": 0}, {"bucket_bytes": 0}):
        found = names(lowered(function, X, **config).graph)
        assert next(name for name in found if "ordered" in name) == "ordered.all_reduce_"
        assert [name for name in found if "ordered" in name][-1] == "ordered.all_gather_into_tensor"


def test_groups_that_the_core_does_not_serve_are_left_alone(group):  # I7
    made = lowered(lambda x: fc.all_reduce(x.relu(), "sum", group) + 1, X, served=False)
    found = names(made.graph)
    assert found == ["aten.relu", "_c10d_functional.all_reduce", "_c10d_functional.wait_tensor", "aten.add"]
    assert (routes(made), reasons(made)) == ([Route.FALLBACK], ["group-not-served"])


def test_groups_on_several_hosts_are_called_and_nothing_lies_in_memory_that_ranks_share(group):  # I7
    def function(x):
        y = fc.all_reduce(x.relu(), "sum", group)
        return fc.all_gather_tensor(x @ x.t() + y.sum(), 0, group)

    made = lowered(function, X, shares_memory=False, zero_copy_bytes=0)
    assert (routes(made), set(reasons(made))) == ([Route.SLOTS] * 2, {"several-hosts"})
    found = names(made.graph)
    assert found.count("symm_arena") == 1 and "arena_view" not in found and "mm_into_" not in found, found
    arena = next(node for node in made.graph.nodes if "symm_arena" in str(node.target))
    assert arena.args[0] == 0  # it has no memory, and stands for an order


def test_what_the_core_cannot_reduce_is_left_alone(group):  # I7
    made = lowered(lambda x: fc.all_reduce(torch.view_as_complex(x.view(-1, 2)) * 2, "sum", group), X)
    assert (routes(made), reasons(made)) == ([Route.FALLBACK], ["dtype"])


def test_values_that_do_not_live_together_share_memory(group):  # I10
    def chain(x):
        for _ in range(4):
            x = fc.all_reduce(x.relu(), "sum", group).sum(0, keepdim=True) * x
        return x

    made = lowered(chain, X, zero_copy_bytes=0)
    assert len(set(offsets(made.graph))) == 1
    assert names(made.graph).count("arena_release_") == 3
    (report,) = made.reports
    assert list(report.arena_bytes.values()) == [X.nbytes]

    def together(x):
        parts = [fc.all_reduce(x.relu() + i, "sum", group) for i in range(3)]
        return parts[0] * parts[1] * parts[2]

    made = lowered(together, X, zero_copy_bytes=0, bucket_bytes=0)
    assert offsets(made.graph) == [0, X.nbytes, 2 * X.nbytes]
    assert "arena_release_" not in names(made.graph)


def test_what_reads_a_place_is_done_before_it_is_written_anew(group):
    made = lowered(
        lambda x: fc.all_reduce(fc.all_reduce(x.relu(), "sum", group).t().contiguous().sin(), "sum", group).cos(),
        torch.randn(8, 8),
        zero_copy_bytes=0,
    )
    (release,) = (node for node in made.graph.nodes if getattr(node.target, "_opname", "") == "arena_release_")
    order = list(made.graph.nodes)
    views = [node for node in order if getattr(node.target, "_opname", "") == "arena_view"]
    readers = release.args[1]
    assert readers
    assert all(order.index(views[0]) < order.index(reader) < order.index(release) for reader in readers)
    assert order.index(release) < order.index(views[1])


def test_plans_of_equal_graphs_are_equal_and_of_others_are_not(group):  # I1, I10
    def plan(function):
        graph = lowered(function, X, zero_copy_bytes=0).graph
        (arena,) = (node for node in graph.nodes if getattr(node.target, "_opname", "") == "symm_arena")
        return arena.args[1]

    first = plan(lambda x: fc.all_reduce(x.relu(), "sum", group) + 1)
    assert first == plan(lambda x: fc.all_reduce(x.relu(), "sum", group) + 1)
    assert first.split("|")[1] == "all_reduce(sum) float32[8, 4] at 0"
    other = plan(lambda x: fc.all_reduce(x.relu(), "max", group) + 1)
    assert first.split("|")[0] != other.split("|")[0]


def test_symbolic_sizes_stay_symbolic(group):  # I3: where torch asserts, ours has an arena that grows
    def function(x, w):
        return fc.all_reduce(x @ w, "sum", group) + fc.all_reduce((x @ w).relu(), "sum", group)

    made = lowered(function, X, W, dynamic=True, zero_copy_bytes=0)
    found = names(made.graph)
    assert found.count("symm_arena") == 3  # one for each value, and the one of the graph
    assert "aten.sym_size" in found
    assert routes(made) == [Route.ZERO_COPY] * 2


def test_forward_and_backward_of_training_are_lowered(group):
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    w = W.clone().requires_grad_()

    def function(x, w):
        return all_gather_tensor_autograd((x @ w).relu(), 0, group).sin()

    made = lowered(function, X, w, backward=True, zero_copy_bytes=0)
    assert [report.graph.split()[-1] for report in made.reports] == ["forward", "backward"]
    assert all({line.route for line in report.collectives} == {Route.ZERO_COPY} for report in made.reports)


def test_small_independent_reductions_are_issued_as_one(group):
    def function(x):
        parts = [fc.all_reduce(x.relu() + i, "sum", group) for i in range(5)]
        return sum(parts)

    made = lowered(function, X)
    assert [name for name in names(made.graph) if name.startswith("ordered")] == ["ordered.all_reduce_coalesced_"]

    def chained(x):
        return fc.all_reduce(fc.all_reduce(x.relu(), "sum", group) + 1, "sum", group) + 1

    assert names(lowered(chained, X).graph).count("ordered.all_reduce_") == 2

    def mixed(x):
        return fc.all_reduce(x.relu(), "sum", group) + fc.all_reduce(x.sin(), "max", group)

    assert names(lowered(mixed, X).graph).count("ordered.all_reduce_") == 2


def test_a_collective_is_waited_for_where_its_result_is_needed(group):
    big = torch.randn(512, 512)

    def function(x, big):
        early = fc.all_reduce(x.relu(), "sum", group)
        for _ in range(4):
            big = big @ big
        return early.sum() + big

    made = lowered(function, X, big)
    found = names(made.graph)
    assert routes(made) == [Route.ASYNC]
    assert found.index("ordered.all_reduce_") < found.index("aten.mm") < found.index("wait_tensor_")
    (start,) = (node for node in made.graph.nodes if getattr(node.target, "_opname", "") == "all_reduce_")
    assert start.args[-1] is True
    made = lowered(function, X, big, overlap_bytes=1)
    assert routes(made) == [Route.SLOTS]
    assert "wait_tensor_" not in names(made.graph)


def test_shards_that_cannot_be_cut_evenly_are_left_alone(group):  # I8
    def function(x):
        return torch.ops._dtensor.shard_dim_alltoall(x.relu(), 0, 1, group) + 1

    made = lowered(function, torch.randn(4, 9), zero_copy_bytes=0)
    assert "_dtensor.shard_dim_alltoall" in names(made.graph)
    assert (routes(made), reasons(made)) == ([Route.FALLBACK], ["parts"])


def by_hand(shared):
    """relu, all_reduce_ in place, wait, add: what functionalization leaves to passes of torch."""
    functional = torch.ops._c10d_functional
    graph = torch.fx.Graph()
    with FakeTensorMode():
        fake = torch.empty(8, 4)
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.relu.default, (x,))
    sent = graph.call_function(functional.all_reduce_.default, (y, "sum", "0"))
    done = graph.call_function(functional.wait_tensor.default, (sent,))
    out = graph.call_function(torch.ops.aten.add.Tensor, (done, y if shared else x))
    for node in (x, y, sent, done, out):
        node.meta["val"] = fake
    graph.output((out,))
    GraphPass(Config(zero_copy_bytes=0), lambda *_: GroupFacts(True, 2))(graph)
    return names(graph)


def test_forms_in_place_are_lowered_and_their_waits_are_gone(group):  # I6
    assert by_hand(shared=False)[-3:] == ["aten.copy_", "ordered.all_reduce_", "aten.add"]
    assert by_hand(shared=True) == ["symm_arena", "aten.relu", "ordered.all_reduce_", "aten.add"]  # where it lies


def test_strict_names_what_is_not_lowered_without_copies(group):
    with pytest.raises(StrictError, match="group-not-served"):
        lowered(lambda x: fc.all_reduce(x.relu(), "sum", group), X, served=False, strict=True)
    with pytest.raises(StrictError, match="graph-input"):
        lowered(lambda x: fc.all_reduce(x, "sum", group) + x, X, zero_copy_bytes=0, strict=True)
    lowered(lambda x: fc.all_reduce(x.relu(), "sum", group) + 1, X, strict=True)  # small ones are meant to be copied


def test_every_reason_has_a_text():
    assert all(code == "" or len(text) > 10 for code, text in REASONS.items())
