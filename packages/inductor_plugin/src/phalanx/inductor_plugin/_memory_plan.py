"""The layout of values in an arena, and the text of the plan that the ranks compare before they use it.

A value is live from the node that writes it to the last node that reads it, in the order of the graph. Values whose
lifetimes do not overlap may share memory. The plan depends on the graph and the options only, so all ranks that
compiled the same graph have the same plan; they compare its text at the first call.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.inductor_plugin._graph import Collective

SEPARATOR = "|"  # between the parts of a plan's text, as in core/torch/agreement.h
ALIGNMENT = 64  # bytes: a cache line, so that no line holds two values


@dataclass
class Lifetime:
    """A value in the arena.

    Attributes:
        nbytes: Its size in bytes.
        start, end: The positions in the graph of its first and its last use.
        offset: Its offset in the arena in bytes, from `assign_offsets`.
    """

    nbytes: int
    start: int
    end: int
    offset: int = 0

    def is_live_with(self, other: "Lifetime") -> bool:
        """Whether both are live at some position."""
        return self.start <= other.end and other.start <= self.end

    def overlaps(self, other: "Lifetime") -> bool:
        """Whether both have a byte of the arena in common."""
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


def assign_offsets(lifetimes: Sequence[Lifetime]) -> int:
    """Give each value the lowest offset that is free while it is live, the largest value first.

    Returns:
        The bytes of the arena.
    """
    placed: list[Lifetime] = []
    for lifetime in sorted(lifetimes, key=lambda item: (-item.nbytes, item.start)):
        offset = 0
        for other in sorted((item for item in placed if item.is_live_with(lifetime)), key=lambda item: item.offset):
            if offset + lifetime.nbytes <= other.offset:
                break
            offset = max(offset, _aligned(other.offset + other.nbytes))
        lifetime.offset = offset
        placed.append(lifetime)
    return max((_aligned(lifetime.offset + lifetime.nbytes) for lifetime in placed), default=0)


def _aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _shape(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return "?"
    sizes = ", ".join(str(size) if isinstance(size, int) else "?" for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"


def describe(collective: Collective, on_all_ranks: bool = False) -> str:
    """The text of a collective in plans and reports: `all_reduce(sum) float32[4, 8]`.

    With `on_all_ranks` it has only what is the same on all ranks: sizes of an all_to_all with splits differ.
    """
    about = [str(collective.arguments[name]) for name in ("reduce_op", "src") if name in collective.arguments]
    if on_all_ranks and collective.has_splits:
        tensors = str(collective.tensor().dtype).removeprefix("torch.")
    else:
        tensors = ", ".join(_shape(collective.tensor(i)) for i in range(len(collective.inputs)))
    return f"{collective.name}({', '.join(about)}) {tensors}"


def plan_text(group: str, group_size: int, lines: Iterable[str], nbytes: int, device_type: str = "cpu") -> str:
    """The text of a plan: a unique name, and the line of each collective on the group, with its offsets.

    It has no number of a GPU, which differs between ranks.
    """
    body = SEPARATOR.join(lines)
    digest = hashlib.sha256(f"{group_size}\n{nbytes}\n{body}".encode()).hexdigest()[:16]
    where = " on GPUs" if device_type == "cuda" else ""
    return f"graph {digest} on group '{group}'{where}{SEPARATOR}{body}"
