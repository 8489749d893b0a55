"""The choice of a route for each collective, with the reason: a pure function, the same on every rank."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from phalanx.collectives.reductions import REDUCIBLE, REDUCTIONS
from phalanx.inductor_plugin import _graph, _torch_compat
from phalanx.inductor_plugin._graph import Collective
from phalanx.inductor_plugin.config import Config


class Route(Enum):
    """How a collective is executed.

    Attributes:
        ZERO_COPY: The input is computed into symmetric memory and communicated from there.
        SLOTS: The data passes through the slots of the core, in one call that is complete on return.
        ASYNC: As SLOTS, but started in one call and waited for in another, with computations between them.
        COALESCED: The collective is issued together with others.
        FALLBACK: The collective stays with torch.distributed.
    """

    ZERO_COPY = "zero copy"
    SLOTS = "slots"
    ASYNC = "async"
    COALESCED = "coalesced"
    FALLBACK = "fallback"


# The reasons for which a collective is not ZERO_COPY. The codes are part of the report, and stable.
REASONS = {
    "": "",
    "small": "below zero_copy_bytes, copying through the slots of the core is faster",
    "group-unknown": "the graph does not say which group the collective is on",
    "group-not-served": "the core does not serve the group of the collective",
    "several-hosts": "the ranks of the group are on several hosts, so they share no memory",
    "device": "the tensors are not all on the CPU or all on one GPU",
    "gpus-not-served": "the core does not serve the GPUs of the ranks",
    "cuda-graphs": "CUDA graphs allocate from a pool of their own, which cannot hold symmetric memory",
    "reduction": "the core does not support the reduce op",
    "dtype": "the core cannot reduce tensors of this dtype",
    "graph-input": "the input comes from outside of the graph, so it cannot be placed in symmetric memory",
    "shared-value": "the collective writes into its input, which other nodes of the graph use as well",
    "unknown-size": "the size of the input depends on the data",
    "layout": "the input is not contiguous",
    "splits": "the inputs of the ranks may have different sizes",
    "parts": "the dim that is split is symbolic, or not divisible by the group size",
    "out": "the collective writes into memory of the caller",
    "extern": "the input is computed by a kernel that cannot write into symmetric memory, or is used elsewhere as well",
    "list": "one tensor of the list cannot be placed in symmetric memory",
}


@dataclass(frozen=True)
class GroupFacts:
    """The properties of a group on which the choice depends. The same on all of its ranks.

    Attributes:
        served: Whether the core serves the group.
        size: Number of its ranks.
        gpus: Whether the core also serves tensors on the GPUs of its ranks. None until a graph has such tensors.
        shares_memory: Whether its ranks are on one host.
    """

    served: bool
    size: int
    gpus: bool | None = None
    shares_memory: bool = True


Facts = Callable[[str], GroupFacts]  # by the name of a group


@dataclass(frozen=True)
class Decision:
    """A route, and the code in REASONS for which it is not a better one."""

    route: Route
    reason: str = ""


def input_bytes(tensor: torch.Tensor) -> int | None:
    """Size of a tensor in bytes; of a symbolic size, the value in this call. None if it depends on the data."""
    count = _torch_compat.size_hint(tensor.numel())
    return None if count is None else count * tensor.element_size()


def served(collective: Collective, facts: GroupFacts | None) -> Decision | None:
    """The reason for which a collective has to stay with torch.distributed, or None if the core can run it."""
    if collective.group is None:
        return Decision(Route.FALLBACK, "group-unknown")
    if facts is None or not facts.served:
        return Decision(Route.FALLBACK, "group-not-served")
    tensors = [collective.tensor(i) for i in range(len(collective.inputs))]
    if collective.inputs and collective.device is None:
        return Decision(Route.FALLBACK, "device")
    if collective.device is not None and collective.device.type == "cuda":
        if not facts.gpus:
            return Decision(Route.FALLBACK, "gpus-not-served")
        if _torch_compat.makes_cuda_graphs():
            return Decision(Route.FALLBACK, "cuda-graphs")
    if "reduce_op" in collective.arguments:
        reduction = collective.arguments["reduce_op"]
        if not isinstance(reduction, str) or reduction.lower() not in REDUCTIONS:
            return Decision(Route.FALLBACK, "reduction")
        if not all(tensor.dtype in REDUCIBLE for tensor in tensors):
            return Decision(Route.FALLBACK, "dtype")
    return None


def _reason_of_input(collective: Collective, i: int, config: Config) -> str:
    """The code of the reason for which input `i` cannot lie in an arena, or ""."""
    tensor, node = collective.tensor(i), collective.inputs[i]
    nbytes = input_bytes(tensor)
    if nbytes is None:
        return "unknown-size"
    if nbytes == 0 or nbytes < config.zero_copy_bytes:
        return "small"
    if _graph.base_of(node).op != "call_function":
        return "graph-input"
    if not _graph.is_dense(tensor):
        return "layout"
    if collective.form.in_place and not _graph.is_private(node):
        return "shared-value"
    return ""


def decide(collective: Collective, facts: GroupFacts | None, config: Config) -> Decision:
    """Choose the route of a collective."""
    fallback = served(collective, facts)
    if fallback is not None:
        return fallback
    if collective.form.kind == "shard_dim_all_to_all":  # the others are all_to_all_single by now
        return Decision(Route.FALLBACK, "parts")
    if collective.form.out:
        return Decision(Route.SLOTS, "out")
    if collective.has_splits:  # also equal ones: another rank may have others, and all must decide the same
        return Decision(Route.SLOTS, "splits")
    if facts is not None and not facts.shares_memory:
        return Decision(Route.SLOTS, "several-hosts")
    reasons = {_reason_of_input(collective, i, config) for i in range(len(collective.inputs))}
    reasons = reasons or {"small"}  # without inputs
    if reasons == {""}:
        return Decision(Route.ZERO_COPY)
    return Decision(Route.SLOTS, reasons.pop() if len(reasons) == 1 else "list")
