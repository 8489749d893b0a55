"""Where in the arena each value lies, and what the ranks compare before they use it.

A value lives from the node that writes it to the last one that reads it, by the order of the graph. Values whose lives
do not overlap may share memory. Nothing here depends on anything but the graph and the options, so all ranks that
compiled the same graph have the same plan; its text is what they compare at the first call.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.inductor_plugin.graph import Collective

SEPARATOR = "|"  # of the parts of a plan's text, as in core/torch/agreement.h
ALIGNMENT = 64  # bytes: a cache line, so that no line is written from two values


@dataclass
class Life:
    """A value in the arena.

    Attributes:
        nbytes: Its size.
        start, end: The first and the last moment at which it is used, numbers that grow along the graph.
        offset: Its place, from `place`.
    """

    nbytes: int
    start: int
    end: int
    offset: int = 0

    def meets(self, other: "Life") -> bool:
        """Whether there is a moment at which both are used."""
        return self.start <= other.end and other.start <= self.end

    def shares(self, other: "Life") -> bool:
        """Whether both have a byte in common."""
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


def place(lives: Sequence[Life]) -> int:
    """Give each value the lowest place that is free while it lives, the largest first.

    Returns:
        The bytes that the arena needs.
    """
    placed: list[Life] = []
    for life in sorted(lives, key=lambda each: (-each.nbytes, each.start)):
        offset = 0
        for other in sorted((each for each in placed if each.meets(life)), key=lambda each: each.offset):
            if offset + life.nbytes <= other.offset:
                break
            offset = max(offset, _aligned(other.offset + other.nbytes))
        life.offset = offset
        placed.append(life)
    return max((_aligned(life.offset + life.nbytes) for life in placed), default=0)


def _aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _shape(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return "?"
    sizes = ", ".join(str(size) if isinstance(size, int) else "?" for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"


def describe(one: Collective, on_all_ranks: bool = False) -> str:
    """A collective as the plan and the report say it: `all_reduce(sum) float32[4, 8]`.

    Args:
        one: The collective.
        on_all_ranks: Say only what is the same on all ranks: an all_to_all with split sizes has other sizes on each.
    """
    about = [str(one.arguments[name]) for name in ("reduce_op", "src") if name in one.arguments]
    if on_all_ranks and one.has_splits:
        tensors = str(one.tensor().dtype).removeprefix("torch.")
    else:
        tensors = ", ".join(_shape(one.tensor(i)) for i in range(len(one.inputs)))
    return f"{one.name}({', '.join(about)}) {tensors}"


def plan_text(group: str, group_size: int, lines: Iterable[str], nbytes: int, device_type: str = "cpu") -> str:
    """What stands for a plan: a name that no other plan has, and one line for each collective.

    Args:
        group: The name of the group.
        group_size: Number of its ranks.
        lines: What each collective on it is, and where it lies.
        nbytes: Of the arena.
        device_type: Where the arena lies. The number of a GPU is not part of it: it differs from rank to rank.
    """
    body = SEPARATOR.join(lines)
    digest = hashlib.sha256(f"{group_size}\n{nbytes}\n{body}".encode()).hexdigest()[:16]
    where = " on GPUs" if device_type == "cuda" else ""
    return f"graph {digest} on group '{group}'{where}{SEPARATOR}{body}"
