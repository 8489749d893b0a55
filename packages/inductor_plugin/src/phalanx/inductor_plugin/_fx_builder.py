"""Adds nodes to a graph, with the fake results that the compiler expects, and with sizes that may be symbolic."""

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import Graph, Node

from phalanx.inductor_plugin import _graph, _torch_compat

aten = torch.ops.aten
Size = int | Node


class FxBuilder:
    """Adds calls to one graph, before a node of it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._anchor: Node | None = None
        self._head: Node | None = None
        values = (_graph.value(node) for node in graph.nodes)
        modes = (getattr(each, "fake_mode", None) for each in values)
        self._mode = next((mode for mode in modes if mode is not None), None)

    def before(self, anchor: Node) -> "FxBuilder":
        """Set the place of the next calls: before this node."""
        self._anchor = anchor
        return self

    def after(self, node: Node) -> "FxBuilder":
        """Set the place of the next calls: after this node."""
        self._anchor = node.next
        return self

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call; its fake result is computed from those of its arguments."""
        assert self._anchor is not None
        with self.graph.inserting_before(self._anchor):
            node = self.graph.call_function(target, args, kwargs)
        fakes = torch.fx.map_arg((args, kwargs), _graph.value)
        mode: AbstractContextManager[Any] = self._mode if self._mode is not None else nullcontext()
        with mode:
            node.meta["val"] = target(*fakes[0], **fakes[1])
        return node

    def call_at_head(self, target: Any, *args: Any) -> Node:
        """Add a call at the head of the graph, but after first calls with effects that need no values.

        Calls with effects may be those in which ranks agree on their graphs. Without an order between such a call and
        this one a compiler could choose a different order on each rank.
        """
        if self._head is None:
            self._head = next(node for node in self.graph.nodes if node.op != "placeholder")
        head = self._head  # what comes later comes after what came before
        effects = self._first_effects()
        if not effects:
            return self.before(head).call(target, *args)
        effect: Node | None = None
        for each in effects:
            token = each.args[0]
            assert isinstance(token, Node)
            if effect is not None:
                effect.append(token)
            if token.op == "placeholder":
                head.prepend(each)
            else:
                token.append(each)
            effect = each
        assert effect is not None
        _torch_compat.keep_effect(target)
        users = [user for user in effect.users if user.args[1] == 0]
        first = self.after(effect).call(operator.getitem, effect, 0)
        anchor = first.next
        with self.graph.inserting_before(anchor):
            node = self.graph.call_function(_torch_compat.with_effects(), (first, target, *args))
        given = torch.fx.map_arg(args, _graph.value)
        with self._mode if self._mode is not None else nullcontext():
            node.meta["val"] = (_graph.value(first), target(*given))
        last = self.before(anchor).call(operator.getitem, node, 0)
        made = self.call(operator.getitem, node, 1)
        for user in users:
            user.replace_all_uses_with(last)
            self.graph.erase_node(user)
        return made

    def _first_effects(self) -> list[Node]:
        """The first calls with effects, each with the token of the one before, as long as they need no values."""
        found: list[Node] = []
        for node in self.graph.nodes:
            if node.target is not _torch_compat.with_effects():
                continue
            token = node.args[0]
            if any(isinstance(argument, Node) for argument in node.args[2:]) or (
                found and token.args[:1] != (found[-1],)
            ):
                break
            found.append(node)
        return found

    # ---- sizes: ints where they are known, nodes where they are symbolic ----

    def size(self, node: Node, dim: int) -> Size:
        """Size of a tensor along a dim."""
        found = _graph.value(node).size(dim)
        return found if isinstance(found, int) else self.call(aten.sym_size.int, node, dim)

    def sizes(self, node: Node) -> list[Size]:
        """All sizes of a tensor."""
        return [self.size(node, dim) for dim in range(_graph.value(node).dim())]

    def product(self, factors: Sequence[Size]) -> Size:
        """The product of sizes; 1 of none."""
        number = 1
        result: Node | None = None
        for factor in factors:
            if isinstance(factor, int):
                number *= factor
            else:
                result = factor if result is None else self.call(operator.mul, result, factor)
        if result is None:
            return number
        return result if number == 1 else self.call(operator.mul, result, number)

    def strides(self, sizes: Sequence[Size]) -> list[Size]:
        """The strides of a contiguous tensor of these sizes."""
        return [self.product(sizes[dim + 1 :]) for dim in range(len(sizes))]

    def shaped_like(self, node: Node, like: Node) -> Node:
        """A node's memory in the shape of another node."""
        if tuple(_graph.value(node).shape) == tuple(_graph.value(like).shape):
            return node
        return self.call(aten.view.default, node, self.sizes(like))


def replace(nodes: Sequence[Node], by: Node) -> None:
    """Replace these nodes by another one in all users, and erase those that have no users left."""
    for node in nodes:
        node.replace_all_uses_with(by, delete_user_cb=lambda user: user is not by and user not in nodes)
    for node in reversed(nodes):
        if not node.users:
            node.graph.erase_node(node)
