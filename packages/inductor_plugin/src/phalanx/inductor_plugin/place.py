"""Who writes a collective's input into the arena: the product that computes it, or the kernel that Inductor makes."""

from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from phalanx.inductor_plugin import _torch_compat, graph, ops
from phalanx.inductor_plugin.emit import Emitter, Size
from phalanx.inductor_plugin.graph import Collective

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default: "mm_into_", aten.bmm.default: "bmm_into_", aten.addmm.default: "addmm_into_"}


@dataclass(frozen=True)
class Producer:
    """What computes an input.

    Attributes:
        node: The value that lies in the arena, whose shape may be another than the input's.
        into: The op that writes it there instead of `node`, or "" where it is copied (by a kernel that Inductor fuses
            with what computes it).
    """

    node: Node
    into: str


def producer_of(one: Collective, i: int) -> Producer | None:
    """What computes input `i`, or None where writing it into the arena would be a copy that is not there now."""
    node = one.inputs[i]
    base = graph.base_of(node)
    if _is_product(base) and graph.is_private(node) and _same_memory(node, base):
        return Producer(base, _PRODUCTS[base.target])  # type: ignore[index]
    if graph.is_wait(base) or graph.form_of(base) is not None or not _torch_compat.is_generated(base.target):
        return None
    return Producer(node, "")


def _is_product(node: Node) -> bool:
    if node.target not in _PRODUCTS or node.kwargs:
        return False
    if node.target is aten.addmm.default:
        bias, a, b = (graph.value(cast(Node, each)) for each in node.args)
        return bias.dim() in (1, 2) and bias.dtype == a.dtype == b.dtype
    return True


def _same_memory(view: Node, base: Node) -> bool:
    """Whether a view has all elements of its base, in the same order."""
    seen, whole = graph.value(view), graph.value(base)
    return (
        graph.is_dense(seen)
        and graph.is_dense(whole)
        and seen.dtype == whole.dtype
        and bool(seen.numel() == whole.numel())
        and _torch_compat.size_hint(seen.storage_offset()) == 0
    )


def sizes_of(emit: Emitter, producer: Producer) -> list[Size]:
    """The sizes of the value, before it is there."""
    if not producer.into:
        return emit.sizes(producer.node)
    *_, a, b = producer.node.args
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    return [*emit.sizes(a)[:-1], emit.sizes(b)[-1]]


def write(emit: Emitter, producer: Producer, view: Node, sizes: list[Size]) -> None:
    """Let the value be written into `view`, a view of the arena."""
    if producer.into:
        emit.call(ops.plain(producer.into), view, *producer.node.args)
        return
    # Inductor takes a copy into a whole result of an op for a new name of what is copied; into a view it writes.
    target = emit.call(aten.as_strided.default, view, sizes, emit.strides(sizes))
    emit.call(aten.copy_.default, target, producer.node)
