"""A small sum as additions over the memory of the peers, which Inductor fuses with what follows."""

import torch
from torch.fx import Node

from phalanx.inductor_plugin import graph, ops
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.eligibility import Decision, GroupFacts, Route, input_bytes
from phalanx.inductor_plugin.emit import Emitter, replace
from phalanx.inductor_plugin.graph import Collective

prims = torch.ops.prims
aten = torch.ops.aten

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Epilogue:
    """Writes the sums of one group."""

    def __init__(self, emit: Emitter, arena: Node, group_size: int) -> None:
        self.emit = emit
        self.arena = arena
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
        # Several heavy users would each read the peers again, where one pass could store the sum.
        few = len(graph.uses(one.results[0])) <= _MOST_USERS
        return fits and computed and few and tensor.dtype.is_floating_point and graph.is_dense(tensor)

    def write(self, one: Collective, view: Node, offset: int) -> None:
        """Put the sum in the place of the collective, between two barriers.

        The first barrier is after this rank has written; the second keeps the peers from writing anew before this rank
        has read, so it comes after everybody that reads.
        """
        emit, dtype = self.emit.before(one.node), one.tensor().dtype
        emit.call(ops.plain("arena_barrier_"), self.arena, [view])
        wide = _WIDE.get(dtype, dtype)
        total: Node | None = None
        size = list(graph.value(view).shape)
        for peer in range(self.group_size):  # in the order of the ranks, as the core adds
            part = emit.call(ops.plain("peer_view"), self.arena, peer, offset, size, dtype)
            if wide is not dtype:
                part = emit.call(prims.convert_element_type.default, part, wide)
            total = part if total is None else emit.call(aten.add.Tensor, total, part)
        assert total is not None
        if wide is not dtype:
            total = emit.call(prims.convert_element_type.default, total, dtype)
        replace([each for each in one.results[0] if each is not one.node], total)
        one.node.replace_all_uses_with(total)
        one.node.graph.erase_node(one.node)
        self._close(total)

    def _close(self, total: Node) -> None:
        readers = [user for user in graph.uses([total]) if user.op != "output"]
        order = {node: i for i, node in enumerate(self.emit.graph.nodes)}
        last = max([total, *readers], key=lambda node: order[node])
        tensors = [node for node in readers if isinstance(graph.value(node), torch.Tensor)]
        if len(tensors) != len(graph.uses([total])):
            tensors.append(total)  # someone reads it otherwise: let it be stored
        self.emit.after(last).call(ops.plain("arena_barrier_"), self.arena, tensors or [total])


_MOST_USERS = 3
