"""Each collective as calls of our ops: complete on return, so the waits are gone."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from phalanx.inductor_plugin import graph, ops
from phalanx.inductor_plugin.emit import Emitter, replace
from phalanx.inductor_plugin.graph import Collective

aten = torch.ops.aten

# Kinds whose result takes the place of the input.
IN_PLACE = {"all_reduce", "broadcast"}


def _rest(one: Collective) -> list[Any]:
    """The arguments between the input and the group."""
    skipped = ("input", "inputs", "group_name", "out")
    schema = one.node.target._schema  # type: ignore[union-attr]
    return [one.arguments[each.name] for each in schema.arguments if each.name not in skipped]


def _name(one: Collective, in_place: bool) -> str:
    """Of the op without or with a result, whatever the form in the graph."""
    stem = one.name.removesuffix("_")
    return f"{stem}_" if in_place else stem


def in_place_on(emit: Emitter, one: Collective, buffers: Sequence[Node], order: Node) -> None:
    """Run it on buffers that are input and output, and let its users have these."""
    given = list(buffers) if one.form.several else buffers[0]
    emit.call(ops.ordered(_name(one, True)), given, *_rest(one), one.group, order)
    _finish(emit, one, buffers)


def into_new(emit: Emitter, one: Collective, inputs: Sequence[Node], order: Node) -> list[Node]:
    """Run it from these inputs to new memory. Returns the nodes of the results."""
    given = list(inputs) if one.form.several else inputs[0]
    made = emit.call(ops.ordered(_name(one, False)), given, *_rest(one), one.group, order)
    results = [made]
    if one.form.several:
        results = [emit.call(operator.getitem, made, i) for i in range(len(inputs))]
        emit.call(ops.plain("arena_release_"), order, results)  # what gives a list cannot write `order` itself
    _finish(emit, one, results)
    return results


def into_callers(emit: Emitter, one: Collective, order: Node) -> None:
    """Run the form that writes an argument `out`."""
    out = one.arguments["out"]
    emit.call(ops.ordered(one.name), one.inputs[0], *_rest(one), one.group, out=out, order=order)
    _finish(emit, one, [out])


def slots(emit: Emitter, one: Collective, order: Node) -> bool:
    """Run it through the slots of the core. Returns whether in place."""
    emit.before(one.node)
    if one.form.out:
        into_callers(emit, one, order)
        return True
    if one.form.in_place or can_be_in_place(one):
        in_place_on(emit, one, one.inputs, order)
        return True
    into_new(emit, one, one.inputs, order)
    return False


def can_be_in_place(one: Collective) -> bool:
    """Whether nobody could tell that the inputs were written over."""
    if one.form.kind not in IN_PLACE or len(set(one.inputs)) != len(one.inputs):
        return False
    return all(graph.is_private(each) and graph.is_dense(graph.value(each)) for each in one.inputs)


def started(emit: Emitter, one: Collective, first_use: Node, order: Node) -> None:
    """Start it where it is, in place, and wait for it before the node that needs it first."""
    emit.before(one.node)
    for buffer in one.inputs:
        emit.call(ops.ordered(_name(one, True)), buffer, *_rest(one), one.group, order, True)
        emit.before(first_use).call(ops.plain("wait_tensor_"), buffer)
    _finish(emit, one, one.inputs)


def _finish(emit: Emitter, one: Collective, results: Sequence[Node]) -> None:
    emit.before(one.node)
    for nodes, result, given in zip(one.results, results, one.inputs, strict=True):
        if nodes:
            replace(nodes, emit.shaped_like(result, given) if one.form.kind in IN_PLACE else result)
    if one.node in one.node.graph.nodes:
        one.node.graph.erase_node(one.node)


def expand_shard_dim_all_to_all(emit: Emitter, one: Collective, group_size: int) -> None:
    """Write shard_dim_alltoall as an all_to_all_single of stacked parts. Where these are uneven it stays as it is."""
    source = one.inputs[0]
    rank = graph.value(source).dim()
    gather_dim, shard_dim = (one.arguments[name] % rank for name in ("gather_dim", "shard_dim"))
    whole = graph.value(source).size(shard_dim)
    if not isinstance(whole, int) or whole % group_size:
        return
    emit.before(one.node)
    part = whole // group_size
    parts = [emit.call(aten.slice.Tensor, source, shard_dim, i * part, (i + 1) * part) for i in range(group_size)]
    stacked = emit.call(aten.cat.default, [emit.call(aten.unsqueeze.default, each, 0) for each in parts])
    sent = emit.call(torch.ops.phalanx.all_to_all_single.default, stacked, [], [], one.group)
    done = emit.call(torch.ops.phalanx.wait_tensor.default, sent)
    came = [emit.call(aten.select.int, done, 0, i) for i in range(group_size)]
    result = emit.call(aten.cat.default, came, gather_dim)
    for nodes in one.results:
        replace([each for each in nodes if each is not one.node], result)
    one.node.replace_all_uses_with(result)
    one.node.graph.erase_node(one.node)
