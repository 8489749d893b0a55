"""Selects collectives that are started early and waited for at the first use, so that late peers stop nobody."""

import torch
from torch.fx import Node

from phalanx.inductor_plugin import _graph, _torch_compat
from phalanx.inductor_plugin._eligibility import input_bytes
from phalanx.inductor_plugin._graph import Collective
from phalanx.inductor_plugin.config import Config

_FLOPS_PER_NS = 50.0  # of one core of a server processor
_BYTES_PER_NS = 8.0  # of memory bandwidth, a core
_EXTERN = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


def _bytes(node: Node) -> int:
    tensor = _graph.value(node)
    return (input_bytes(tensor) or 0) if isinstance(tensor, torch.Tensor) else 0


def _flops(node: Node) -> int:
    operands = [_graph.value(operand) for operand in node.args if isinstance(operand, Node)]
    out = _graph.value(node)
    inner = _torch_compat.size_hint(operands[-1].size(-2)) or 0
    return 2 * inner * (_torch_compat.size_hint(out.numel()) or 0)


def estimate_ns(node: Node) -> float:
    """Estimated time of a node's computation in nanoseconds; 0 for views and for nodes that compute nothing."""
    if node.op != "call_function" or _graph.is_view(node) or not isinstance(_graph.value(node), torch.Tensor):
        return 0.0
    moved = (_bytes(node) + sum(_bytes(operand) for operand in node.all_input_nodes)) / _BYTES_PER_NS
    if getattr(node.target, "overloadpacket", None) in _EXTERN:
        return max(moved, _flops(node) / _FLOPS_PER_NS)
    return moved


class Overlap:
    """The selection for one graph, within the budget `overlap_bytes` of memory in flight."""

    def __init__(self, config: Config, position: dict[Node, int]) -> None:
        self._config = config
        self._position = position
        self._before = [0.0]  # estimated time of all nodes before each position of the original graph
        for node in position if config.overlap_ns else ():
            cost = estimate_ns(node) if _graph.form_of(node) is None else 0.0
            self._before.append(self._before[-1] + cost)
        self._in_flight: list[tuple[int, int, int]] = []  # first and last position, and bytes

    def worth_starting(self, collective: Collective) -> Node | None:
        """The first node that needs the result, if enough is computed before it; else None.

        None on a GPU: there the collective is on the stream of the computations, and the host does not wait.
        """
        config = self._config
        if config.overlap_ns == 0 or collective.form.kind not in ("all_reduce", "broadcast") or collective.form.several:
            return None
        if collective.tensor().device.type != "cpu":
            return None
        nbytes = input_bytes(collective.tensor())
        users = [user for nodes in collective.results for user in _graph.uses(nodes)]
        if nbytes is None or not users or any(user not in self._position for user in users):
            return None
        first = min(users, key=lambda user: self._position[user])
        begin, end = self._position[collective.node], self._position[first]
        if first.op == "output" or self._before[end] - self._before[begin] < config.overlap_ns:
            return None
        in_flight = sum(size for start, stop, size in self._in_flight if start <= end and begin <= stop)
        if in_flight + nbytes > config.overlap_bytes:
            return None
        self._in_flight.append((begin, end, nbytes))
        return self._first_view(collective, first)

    def _first_view(self, collective: Collective, first: Node) -> Node:
        """The first view of the result before its first use, or that use: the wait has to come before both."""
        results = [node for nodes in collective.results for node in nodes]
        views = _graph.with_users(results, _graph.is_view)[len(results) :]
        return min([first, *views], key=lambda node: self._position[node])
