"""Which way each collective takes, and why: a pure decision, the same on every rank."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from phalanx.inductor_plugin import _torch_compat, graph
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.graph import Collective


class Route(Enum):
    """What becomes of a collective.

    Attributes:
        ZERO_COPY: Its input is computed into symmetric memory and communicated where it lies.
        SLOTS: It goes through the slots of the core: one call, complete on return.
        STARTED: The same in two calls, with computations between them.
        COALESCED: It is issued together with others.
        EPILOGUE: It is additions over the memory of the peers, within the kernel of what follows.
        PIPELINED: It is one op with the product beside it.
        KEPT: It stays as it was.
    """

    ZERO_COPY = "zero copy"
    SLOTS = "slots"
    STARTED = "started"
    COALESCED = "coalesced"
    EPILOGUE = "epilogue"
    PIPELINED = "pipelined"
    KEPT = "kept"


# Why a collective is not ZERO_COPY. The codes are part of the report, and stable.
REASONS = {
    "": "",
    "small": "smaller than zero_copy_bytes, where the slots of the core are faster",
    "group-unknown": "the graph does not say which group it is on",
    "group-not-served": "the core does not serve its group",
    "several-hosts": "the ranks of its group are on several hosts, so they share no memory",
    "device": "its tensors are not all on the CPU, or all on one GPU",
    "gpus-not-served": "the core does not serve the GPUs of its ranks",
    "cuda-graphs": "CUDA graphs keep memory of their own, which an arena cannot lie in",
    "reduction": "the core does not have its reduction",
    "dtype": "the core cannot reduce its dtype",
    "graph-input": "its input is not computed in the graph, so it lies where it lies",
    "shared-value": "it writes its input, which others use too",
    "unknown-size": "only the data says how large its input is",
    "layout": "its input does not lie in memory in the order of its indices",
    "splits": "its ranks may give inputs of different sizes",
    "one-stream": "a product in pieces would gain nothing: a GPU's products and collectives are on one stream",
    "parts": "the dim that it cuts is symbolic, or the group size does not divide it",
    "out": "it writes memory of the caller",
    "extern": "a kernel that cannot write into the arena computes it, or its product is used elsewhere, too",
    "list": "one call of its list is not eligible",
}


@dataclass(frozen=True)
class GroupFacts:
    """What the decision depends on of a group. The same on all of its ranks.

    Attributes:
        served: The core serves it.
        size: Number of its ranks.
        gpus: The core also serves tensors on its ranks' GPUs. None where no graph has asked: it has no such tensors.
        shares_memory: Its ranks are on one host.
    """

    served: bool
    size: int
    gpus: bool | None = None
    shares_memory: bool = True


Facts = Callable[[str], GroupFacts]  # by the name of a group


@dataclass(frozen=True)
class Decision:
    """A route, and the code in REASONS of why it is no better one."""

    route: Route
    reason: str = ""


_REDUCTIONS = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"}
_REDUCED = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
}


def input_bytes(tensor: torch.Tensor) -> int | None:
    """Size of a tensor in bytes, in this call where it is symbolic. None where only the data says it."""
    count = _torch_compat.size_hint(tensor.numel())
    return None if count is None else count * tensor.element_size()


def served(one: Collective, facts: GroupFacts | None) -> Decision | None:
    """Why a collective has to stay with torch.distributed, or None where the core can run it."""
    if one.group is None:
        return Decision(Route.KEPT, "group-unknown")
    if facts is None or not facts.served:
        return Decision(Route.KEPT, "group-not-served")
    tensors = [one.tensor(i) for i in range(len(one.inputs))]
    if one.inputs and one.device is None:
        return Decision(Route.KEPT, "device")
    if one.device is not None and one.device.type == "cuda":
        if not facts.gpus:
            return Decision(Route.KEPT, "gpus-not-served")
        if _torch_compat.makes_cuda_graphs():
            return Decision(Route.KEPT, "cuda-graphs")
    if "reduce_op" in one.arguments:
        reduction = one.arguments["reduce_op"]
        if not isinstance(reduction, str) or reduction.lower() not in _REDUCTIONS:
            return Decision(Route.KEPT, "reduction")
        if not all(tensor.dtype in _REDUCED for tensor in tensors):
            return Decision(Route.KEPT, "dtype")
    return None


def _one_input(one: Collective, i: int, config: Config) -> str:
    """Why input `i` cannot lie in an arena, as a code, or ""."""
    tensor, node = one.tensor(i), one.inputs[i]
    nbytes = input_bytes(tensor)
    if nbytes is None:
        return "unknown-size"
    if nbytes == 0 or nbytes < config.zero_copy_bytes:
        return "small"
    if graph.base_of(node).op != "call_function":
        return "graph-input"
    if not graph.is_dense(tensor):
        return "layout"
    if one.form.in_place and not graph.is_private(node):
        return "shared-value"
    return ""


def decide(one: Collective, facts: GroupFacts | None, config: Config) -> Decision:
    """The route of a collective."""
    kept = served(one, facts)
    if kept is not None:
        return kept
    if one.form.kind == "shard_dim_all_to_all":  # the others are all_to_all_single by now
        return Decision(Route.KEPT, "parts")
    if one.form.out:
        return Decision(Route.SLOTS, "out")
    if one.has_splits:  # also where all are equal on this rank: on another they may not be, and all must decide alike
        return Decision(Route.SLOTS, "splits")
    if facts is not None and not facts.shares_memory:
        return Decision(Route.SLOTS, "several-hosts")
    found = {_one_input(one, i, config) for i in range(len(one.inputs))}
    if not one.inputs:
        return Decision(Route.SLOTS, "small")
    if found == {""}:
        return Decision(Route.ZERO_COPY)
    if len(found) == 1:
        return Decision(Route.SLOTS, found.pop())
    return Decision(Route.SLOTS, "list")
