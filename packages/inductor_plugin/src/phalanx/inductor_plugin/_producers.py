"""Finds the node that can write a collective's input into the arena: a matrix product, or a kernel of Inductor."""

from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from phalanx.inductor_plugin import _graph, _ops, _torch_compat
from phalanx.inductor_plugin._fx_builder import FxBuilder, Size
from phalanx.inductor_plugin._graph import Collective

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default: "mm_into_", aten.bmm.default: "bmm_into_", aten.addmm.default: "addmm_into_"}


@dataclass(frozen=True)
class Producer:
    """The computation of an input.

    Attributes:
        node: The value that lies in the arena. Its shape may differ from the input's.
        into: The op that writes the value there in place of `node`, or "" if it is copied; Inductor fuses the copy with
            the kernel that computes the value.
    """

    node: Node
    into: str


def producer_of(collective: Collective, i: int) -> Producer | None:
    """The producer of input `i`, or None if writing it into the arena would be an additional copy."""
    node = collective.inputs[i]
    base = _graph.base_of(node)
    if _is_product(base) and _graph.is_private(node) and _same_memory(node, base):
        return Producer(base, _PRODUCTS[base.target])  # type: ignore[index]
    if _graph.is_wait(base) or _graph.form_of(base) is not None or not _torch_compat.is_generated(base.target):
        return None
    return Producer(node, "")


def _is_product(node: Node) -> bool:
    if node.target not in _PRODUCTS or node.kwargs:
        return False
    if node.target is aten.addmm.default:
        bias, a, b = (_graph.value(cast(Node, each)) for each in node.args)
        return bias.dim() in (1, 2) and bias.dtype == a.dtype == b.dtype
    return True


def _same_memory(view: Node, base: Node) -> bool:
    """Whether a view has all elements of its base in the same order."""
    seen, whole = _graph.value(view), _graph.value(base)
    return (
        _graph.is_dense(seen)
        and _graph.is_dense(whole)
        and seen.dtype == whole.dtype
        and bool(seen.numel() == whole.numel())
        and _torch_compat.size_hint(seen.storage_offset()) == 0
    )


def sizes_of(builder: FxBuilder, producer: Producer) -> list[Size]:
    """The sizes of the value, computed from its operands where the value itself comes later."""
    if not producer.into:
        return builder.sizes(producer.node)
    *_, a, b = producer.node.args
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    return [*builder.sizes(a)[:-1], builder.sizes(b)[-1]]


def write(builder: FxBuilder, producer: Producer, view: Node, sizes: list[Size]) -> None:
    """Make the producer write into `view`, a view of the arena."""
    if producer.into:
        builder.call(_ops.plain(producer.into), view, *producer.node.args)
        return
    # Inductor treats a copy into the whole result of an op as an alias of the source; a copy into a view is a write.
    target = builder.call(aten.as_strided.default, view, sizes, builder.strides(sizes))
    builder.call(aten.copy_.default, target, producer.node)
