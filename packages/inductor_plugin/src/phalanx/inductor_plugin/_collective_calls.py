"""Replaces collectives of a graph by calls of the ops of `phalanx_ordered`, which are complete on return."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from phalanx.inductor_plugin import _graph, _ops, _torch_compat
from phalanx.inductor_plugin._fx_builder import FxBuilder, replace
from phalanx.inductor_plugin._graph import Collective

aten = torch.ops.aten

# Kinds whose result has the shape of the input and may be written over it.
IN_PLACE = {"all_reduce", "broadcast"}


def _rest(collective: Collective) -> list[Any]:
    """The arguments between the input and the group."""
    skipped = ("input", "inputs", "group_name", "out")
    schema = _torch_compat.schema_of(collective.node.target)
    return [collective.arguments[each.name] for each in schema.arguments if each.name not in skipped]


def _name(collective: Collective, in_place: bool) -> str:
    """The name of the op that writes its input, or of the one that gives a new result."""
    stem = collective.name.removesuffix("_")
    return f"{stem}_" if in_place else stem


def in_place_on(builder: FxBuilder, collective: Collective, buffers: Sequence[Node], order: Node) -> None:
    """Run the collective in place on these buffers, which replace its results."""
    given = list(buffers) if collective.form.several else buffers[0]
    builder.call(_ops.ordered(_name(collective, True)), given, *_rest(collective), collective.group, order)
    _finish(builder, collective, buffers)


def into_new(builder: FxBuilder, collective: Collective, inputs: Sequence[Node], order: Node) -> list[Node]:
    """Run the collective from these inputs into new memory. Returns the nodes of the results."""
    given = list(inputs) if collective.form.several else inputs[0]
    made = builder.call(_ops.ordered(_name(collective, False)), given, *_rest(collective), collective.group, order)
    results = [made]
    if collective.form.several:
        results = [builder.call(operator.getitem, made, i) for i in range(len(inputs))]
        builder.call(_ops.plain("arena_release_"), order, results)  # an op that returns a list cannot write `order`
    _finish(builder, collective, results)
    return results


def into_callers(builder: FxBuilder, collective: Collective, order: Node) -> None:
    """Run the form of the collective that writes its argument `out`."""
    out = collective.arguments["out"]
    builder.call(
        _ops.ordered(collective.name), collective.inputs[0], *_rest(collective), collective.group, out=out, order=order
    )
    _finish(builder, collective, [out])


def slots(builder: FxBuilder, collective: Collective, order: Node) -> bool:
    """Run the collective through the slots of the core. Returns whether it runs in place."""
    builder.before(collective.node)
    if collective.form.out:
        into_callers(builder, collective, order)
        return True
    if collective.form.in_place or can_be_in_place(collective):
        in_place_on(builder, collective, collective.inputs, order)
        return True
    into_new(builder, collective, collective.inputs, order)
    return False


def can_be_in_place(collective: Collective) -> bool:
    """Whether the inputs may be written over: nothing else can see them."""
    if collective.form.kind not in IN_PLACE or len(set(collective.inputs)) != len(collective.inputs):
        return False
    return all(_graph.is_private(each) and _graph.is_dense(_graph.value(each)) for each in collective.inputs)


def start_early(builder: FxBuilder, collective: Collective, first_use: Node, order: Node) -> None:
    """Start the collective at its place, in place, and wait for it before the node that first needs the result."""
    builder.before(collective.node)
    for buffer in collective.inputs:
        builder.call(_ops.ordered(_name(collective, True)), buffer, *_rest(collective), collective.group, order, True)
        builder.before(first_use).call(_ops.plain("wait_tensor_"), buffer)
    _finish(builder, collective, collective.inputs)


def _finish(builder: FxBuilder, collective: Collective, results: Sequence[Node]) -> None:
    builder.before(collective.node)
    for nodes, result, given in zip(collective.results, results, collective.inputs, strict=True):
        if nodes:
            replace(nodes, builder.shaped_like(result, given) if collective.form.kind in IN_PLACE else result)
    if collective.node in collective.node.graph.nodes:
        collective.node.graph.erase_node(collective.node)


def expand_shard_dim_all_to_all(builder: FxBuilder, collective: Collective, group_size: int) -> None:
    """Replace shard_dim_alltoall by an all_to_all_single of stacked parts, unless the parts are uneven."""
    source = collective.inputs[0]
    rank = _graph.value(source).dim()
    gather_dim, shard_dim = (collective.arguments[name] % rank for name in ("gather_dim", "shard_dim"))
    whole = _graph.value(source).size(shard_dim)
    if not isinstance(whole, int) or whole % group_size:
        return
    builder.before(collective.node)
    part = whole // group_size
    parts = [builder.call(aten.slice.Tensor, source, shard_dim, i * part, (i + 1) * part) for i in range(group_size)]
    stacked = builder.call(aten.cat.default, [builder.call(aten.unsqueeze.default, each, 0) for each in parts])
    sent = builder.call(torch.ops.phalanx.all_to_all_single.default, stacked, [], [], collective.group)
    done = builder.call(torch.ops.phalanx.wait_tensor.default, sent)
    received = [builder.call(aten.select.int, done, 0, i) for i in range(group_size)]
    result = builder.call(aten.cat.default, received, gather_dim)
    for nodes in collective.results:
        replace([each for each in nodes if each is not collective.node], result)
    collective.node.replace_all_uses_with(result)
    collective.node.graph.erase_node(collective.node)
