"""What the pass makes of graphs on GPUs. The tensors are fake: nothing is compiled, sent or anywhere."""

import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch._inductor import config as inductor_config

from inductor_graphs import fake_group, nowhere, on_gpu, traced
from phalanx.inductor_plugin import Config, Route, StrictError
from phalanx.inductor_plugin._eligibility import GroupFacts
from phalanx.inductor_plugin._passes import GraphPass

SERVED = GroupFacts(True, 2, True)


@pytest.fixture
def group():
    with fake_group() as name:
        yield name


def lower(function, *inputs, facts=SERVED, **config):
    return traced(function, *inputs, facts=facts, **config)


def line(made):
    (only,) = made.report.collectives
    return only.route, only.reason


def arguments(made, name):
    return [node.args for node in made.module.graph.nodes if getattr(node.target, "_opname", "") == name]


def test_a_pointwise_producer_writes_into_an_arena_on_its_gpu(group):  # I2
    def function(x, w):
        return fc.all_reduce(torch.relu(x @ w), "sum", group) + 1

    index = 0 if torch.cuda.device_count() == 1 else 1  # fake tensors may start the GPU that they name
    made = lower(function, on_gpu(8, 4, index=index), on_gpu(4, 16, index=index), zero_copy_bytes=0)
    assert made.names == [
        *("symm_arena", "aten.mm", "aten.relu", "arena_view", "aten.as_strided", "aten.copy_"),
        *("ordered.all_reduce_", "aten.add"),
    ]
    assert line(made) == (Route.ZERO_COPY, "")
    ((nbytes, plan, name, gpu),) = arguments(made, "symm_arena")
    assert (nbytes, name, gpu) == (8 * 16 * 4, group, index)
    assert "on GPUs" in plan and f"cuda:{index}" not in plan  # the ranks have different GPUs, and compare plans
    assert arguments(made, "arena_view")[0][1:] == (0, [8, 16], torch.float32, index)
    found = [node for node in made.module.graph.nodes if "arena" in node.name]
    assert [node.meta["val"].device for node in found] == [torch.device("cpu"), torch.device("cuda", index)]
    assert (made.report.copied_before, made.report.copied_after) == (8 * 16 * 4, 0)


def test_a_product_is_computed_into_the_arena(group):  # I4
    bias, x, w = on_gpu(16), on_gpu(8, 4), on_gpu(4, 16)
    made = lower(lambda b, x, w: fc.all_reduce(torch.addmm(b, x, w), "sum", group) * 2, bias, x, w, zero_copy_bytes=0)
    assert made.names == [
        *("symm_arena", "arena_view", "addmm_into_", "ordered.all_reduce_", "aten.mul"),
    ]


def test_waits_are_gone_where_the_stream_orders_and_nothing_is_started_early(group):
    def function(x, a, w):
        sent = fc.all_reduce(x.relu(), "sum", group)
        for _ in range(4):
            a = a @ w
        return sent + a

    big = [on_gpu(2048, 2048) for _ in range(3)]
    made = lower(function, *big, zero_copy_bytes=1 << 40)
    assert "wait_tensor" not in " ".join(made.names) and made.names.index("ordered.all_reduce_") == 2
    assert line(made) == (Route.SLOTS, "small")
    on_host = lower(function, *(torch.empty(2048, 2048) for _ in range(3)), zero_copy_bytes=1 << 40)
    assert line(on_host)[0] is Route.ASYNC  # there the host would wait for a late peer


def test_a_graph_may_use_the_host_and_gpus_with_an_arena_for_each(group):
    def function(x, y):
        return fc.all_reduce(x.relu(), "sum", group) + 1, fc.all_reduce(y.relu(), "sum", group) + 1

    made = lower(function, on_gpu(6), nowhere(5), zero_copy_bytes=0)
    assert [(nbytes, gpu) for nbytes, _, _, gpu in arguments(made, "symm_arena")] == [(64, 0), (64, -1)]
    assert made.names.count("ordered.all_reduce_") == 2
    orders = {args[-1].name for args in arguments(made, "all_reduce_")}
    assert orders == {"symm_arena_default"}  # one order of all that is sent
    assert made.report.arena_bytes == {group: 128}


@pytest.mark.parametrize("facts", [GroupFacts(True, 2, False), GroupFacts(False, 0, None)])
def test_what_the_core_does_not_serve_stays_with_torch_and_strict_names_it(group, facts):  # I7
    reason = "gpus-not-served" if facts.served else "group-not-served"

    def function(x):
        return fc.all_reduce(x.relu(), "sum", group) + 1

    made = lower(function, on_gpu(8), facts=facts)
    assert line(made) == (Route.FALLBACK, reason)
    assert made.names == ["aten.relu", "_c10d_functional.all_reduce", "_c10d_functional.wait_tensor", "aten.add"]
    with pytest.raises(StrictError, match=reason):
        lower(function, on_gpu(8), facts=facts, strict=True)


def test_cuda_graphs_get_collectives_as_they_were(group):  # I7
    def function(x):
        return fc.all_reduce(x.relu(), "sum", group) + 1

    with inductor_config.patch({"triton.cudagraphs": True}):
        assert line(lower(function, on_gpu(8), zero_copy_bytes=0)) == (Route.FALLBACK, "cuda-graphs")
        assert line(lower(function, torch.empty(8), zero_copy_bytes=0)) == (Route.ZERO_COPY, "")


def test_other_devices_stay_with_torch_and_lists_of_a_gpu_do_not(group):
    made = lower(lambda x: fc.all_reduce(x.relu(), "sum", group), nowhere(8, device="xpu:0"))
    assert line(made) == (Route.FALLBACK, "device")

    def several(x, y):
        return fc.all_reduce_coalesced([x.relu(), y.relu()], "sum", group)

    made = lower(several, on_gpu(8), on_gpu(4), zero_copy_bytes=0)
    assert line(made) == (Route.ZERO_COPY, "")
    assert "ordered.all_reduce_coalesced" in made.names and made.names.count("arena_view") == 2


def test_gpus_are_asked_about_only_for_graphs_that_use_them_and_the_uuid_tells(group):
    asked = []

    def ask(name, gpu):
        asked.append((name, gpu))
        return GroupFacts(True, 2, None if gpu is None else True)

    rewrites = GraphPass(Config(), ask)
    rewrites.facts("0")
    before = rewrites.uuid()
    assert rewrites.facts("0") == GroupFacts(True, 2, None) and rewrites.uuid() == before
    assert rewrites.facts("0", torch.device("cuda", 1)).gpus
    assert rewrites.facts("0", torch.device("cuda", 1)).gpus
    assert asked == [("0", None), ("0", torch.device("cuda", 1))]
    assert rewrites.uuid() != before
