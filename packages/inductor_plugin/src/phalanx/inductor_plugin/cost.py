"""How long computations take, roughly: enough to tell a wait that is worth hiding from one that is not."""

import torch
from torch.fx import Node

from phalanx.inductor_plugin import _torch_compat, graph

_FLOPS_PER_NS = 50.0  # of one core of a server processor
_BYTES_PER_NS = 8.0  # of memory bandwidth, a core
_EXTERN = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


def _bytes(node: Node) -> int:
    found = graph.value(node)
    if not isinstance(found, torch.Tensor):
        return 0
    count = _torch_compat.size_hint(found.numel())
    return 0 if count is None else count * found.element_size()


def _flops(node: Node) -> int:
    operands = [graph.value(each) for each in node.args if isinstance(each, Node)]
    out = graph.value(node)
    inner = _torch_compat.size_hint(operands[-1].size(-2)) or 0
    return 2 * inner * (_torch_compat.size_hint(out.numel()) or 0)


def estimate_ns(node: Node) -> float:
    """How long a node computes, in nanoseconds. 0 for views, and for what is no computation."""
    if node.op != "call_function" or graph.is_view(node) or not isinstance(graph.value(node), torch.Tensor):
        return 0.0
    moved = (_bytes(node) + sum(_bytes(each) for each in node.all_input_nodes)) / _BYTES_PER_NS
    if getattr(node.target, "overloadpacket", None) in _EXTERN:
        return max(moved, _flops(node) / _FLOPS_PER_NS)
    return moved
