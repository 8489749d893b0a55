"""A small sum as additions over the memory of the peers, which Inductor fuses with what follows."""

import operator

import torch
from torch.fx import Node

from phalanx.inductor_plugin import _torch_compat, arena, graph, ops
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.eligibility import Decision, GroupFacts, Route, input_bytes
from phalanx.inductor_plugin.emit import Emitter, replace
from phalanx.inductor_plugin.graph import Collective

prims = torch.ops.prims
aten = torch.ops.aten

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Epilogue:
    """Writes the sums of one group."""

    def __init__(self, emit: Emitter, where: Node, group_size: int) -> None:
        self.emit = emit
        self.arena = where
        self.group_size = group_size

    @staticmethod
    def takes(one: Collective, decision: Decision, facts: GroupFacts | None, config: Config) -> bool:
        """Whether a collective is a sum of floats that is small enough, on a value that Inductor computes."""
        if facts is None or config.epilogue_bytes == 0 or decision != Decision(Route.SLOTS, "small"):
            return False
        if one.name != "all_reduce" or str(one.arguments["reduce_op"]).lower() != "sum":
            return False
        tensor = one.tensor()
        nbytes = input_bytes(tensor)
        fits = isinstance(tensor.numel(), int) and nbytes is not None and 0 < nbytes <= config.epilogue_bytes
        computed = graph.base_of(one.inputs[0]).op == "call_function"
        return fits and computed and tensor.dtype.is_floating_point and graph.is_dense(tensor)

    def write(self, one: Collective, view: Node, offset: int, region: list[Node]) -> None:
        """Put the sum in the place of the collective, between two barriers.

        The first barrier is after this rank has written; the second keeps the peers from writing anew before this rank
        has read, so it comes after the region, whose results are stored by then.
        """
        emit, dtype, device = self.emit.before(one.node), one.tensor().dtype, one.tensor().device
        emit.call(ops.plain("arena_barrier_"), self.arena, [view])
        wide = _WIDE.get(dtype, dtype)
        total: Node | None = None
        size = list(graph.value(view).shape)
        for peer in range(self.group_size):  # in the order of the ranks, as the core adds
            part = arena.peer_view(emit, self.arena, device, peer, offset, size, dtype)
            if wide is not dtype:
                part = emit.call(prims.convert_element_type.default, part, wide)
            total = part if total is None else emit.call(aten.add.Tensor, total, part)
        assert total is not None
        if wide is not dtype:
            total = emit.call(prims.convert_element_type.default, total, dtype)
        total = emit.shaped_like(total, one.inputs[0])
        replace([each for each in one.results[0] if each is not one.node], total)
        one.node.replace_all_uses_with(total)
        one.node.graph.erase_node(one.node)
        inside = {total, *region}
        stored = [node for node in inside if any(user not in inside for user in node.users) or node in region[-1:]]
        readers = [node for node in stored if isinstance(graph.value(node), torch.Tensor)] or [total]
        order = {node: i for i, node in enumerate(self.emit.graph.nodes)}
        readers.sort(key=lambda node: order[node])
        self.emit.after(region[-1] if region else total).call(ops.plain("arena_barrier_"), self.arena, readers)


def region_of(one: Collective, position: dict[Node, int]) -> list[Node]:
    """What Inductor can compute in one kernel with the sum: what follows from it before the next kernel of others.

    Args:
        one: The collective.
        position: Of each node in the graph.
    """
    here = position[one.node]
    known = set(one.results[0])
    found = []
    for node, at in position.items():
        if at <= here or node in known or node.op != "call_function" or node.target is operator.getitem:
            continue
        computed = _torch_compat.is_generated(node.target) or graph.is_view(node)
        if not computed or graph.form_of(node) is not None or graph.is_wait(node):
            break
        if any(given in known for given in node.all_input_nodes):
            known.add(node)
            found.append(node)
    return found
