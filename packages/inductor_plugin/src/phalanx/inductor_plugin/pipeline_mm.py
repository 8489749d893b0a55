"""Products next to a collective, as one op that computes in pieces and communicates each while it computes the next."""

import torch
from torch.fx import Graph, Node

from phalanx.inductor_plugin import graph as graphs
from phalanx.inductor_plugin import ops
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.eligibility import Facts, Route, input_bytes, served
from phalanx.inductor_plugin.emit import Emitter, replace
from phalanx.inductor_plugin.graph import Collective
from phalanx.inductor_plugin.plan import describe
from phalanx.inductor_plugin.report import Line

aten = torch.ops.aten

_BY_SIZE = 0  # pieces: the op chooses
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def pipeline(graph: Graph, config: Config, facts: Facts) -> tuple[list[Line], set[Node]]:
    """Join what is large enough; see `Config.pipeline_bytes`.

    Returns:
        What became of the collectives that were joined, and the collectives that were not only because they are on a
        GPU: there the op is the product and then the collective on one stream, which is no better than the two.
    """
    lines: list[Line] = []
    on_gpus: set[Node] = set()
    if config.pipeline_bytes == 0:
        return lines, on_gpus
    for one in graphs.collectives(graph):
        one.refresh()
        known = facts(one.group) if one.group is not None else None
        if known is None or served(one, known) is not None or not known.shares_memory:
            continue
        if one.form.several or one.form.in_place or one.form.out:
            continue
        if (input_bytes(one.tensor()) or 0) < config.pipeline_bytes or one.tensor().dtype not in _DTYPES:
            continue
        before, after = _has_product_before(one), _has_product_after(one)
        if not before and not after:
            continue
        if one.tensor().device.type != "cpu":
            on_gpus.add(one.node)
            continue
        what, nbytes, emit = describe(one), input_bytes(one.tensor()), Emitter(graph)
        if before:
            _with_product_before(emit, one, known.size)
        else:
            _with_product_after(emit, one)
        lines.append(Line(what, one.group or "?", Route.PIPELINED, "", nbytes))
    return lines, on_gpus


def _has_product_before(one: Collective) -> bool:
    """mm -> all_reduce, and mm -> reduce_scatter."""
    source = one.inputs[0]
    product = graphs.base_of(source)
    if one.form.kind not in ("all_reduce", "reduce_scatter") or not _is_mm(product) or not graphs.is_private(source):
        return False
    same = graphs.value(source).numel() == graphs.value(product).numel() and graphs.is_dense(graphs.value(source))
    if not same or not all(graphs.is_dense(graphs.value(each)) for each in product.args):  # type: ignore[arg-type]
        return False
    return one.form.kind == "all_reduce" or source is product


def _with_product_before(emit: Emitter, one: Collective, group_size: int) -> None:
    source = one.inputs[0]
    product = graphs.base_of(source)
    a, b = product.args
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    reduction, group = one.arguments["reduce_op"], one.group
    emit.before(one.node)
    if one.form.kind == "all_reduce":
        like = graphs.value(product)
        sizes = [emit.size(a, 0), emit.size(b, 1)]
        made = emit.call(aten.empty.memory_format, sizes, dtype=like.dtype, device=like.device)
        emit.call(ops.plain("mm_all_reduce_"), made, a, b, reduction, group, _BY_SIZE)
        result = emit.shaped_like(made, source)
    else:
        result = emit.call(ops.plain("mm_reduce_scatter"), a, b, reduction, group_size, group, _BY_SIZE)
    replace(one.results[0], result)
    _drop(source)


def _has_product_after(one: Collective) -> bool:
    """all_gather -> mm, where nobody else needs what was gathered."""
    if one.form.kind != "all_gather" or one.tensor().dim() != 2 or not graphs.is_dense(one.tensor()):
        return False
    users = one.users(0)
    if len(users) != 1 or not _is_mm(users[0]):
        return False
    (product,) = users
    a, b = product.args
    return a in one.results[0] and b not in one.results[0] and graphs.is_dense(graphs.value(b))  # type: ignore[arg-type]


def _with_product_after(emit: Emitter, one: Collective) -> None:
    (product,) = one.users(0)
    emit.before(product)
    b = product.args[1]
    result = emit.call(ops.plain("all_gather_mm"), one.inputs[0], b, one.arguments["group_size"], one.group)
    replace([product], result)
    for node in reversed(one.results[0]):
        emit.graph.erase_node(node)


def _is_mm(node: Node) -> bool:
    return node.target is aten.mm.default and not node.kwargs


def _drop(node: Node) -> None:
    while not node.users:
        before = node.args[0] if graphs.is_view(node) else None
        node.graph.erase_node(node)
        if not isinstance(before, Node):
            return
        node = before
