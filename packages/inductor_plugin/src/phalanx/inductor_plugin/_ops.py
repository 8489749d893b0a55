"""The ops that the pass puts into graphs. They belong to phalanx.core and phalanx.collectives.

- `phalanx_ordered`: every collective of `phalanx`, complete on return, with an additional tensor argument `order`. Each
  op claims to write it, so a compiler keeps the collectives in the order of the graph.
- `phalanx.symm_arena`, `arena_view`, `arena_release_`: persistent symmetric memory, and tensors that lie in it.
- `phalanx.mm_into_`, `bmm_into_`, `addmm_into_`: products that are written into memory of the caller.
"""

from typing import Any

import torch

import phalanx.collectives  # noqa: F401  # registers the ops


def ordered(name: str) -> Any:
    """`torch.ops.phalanx_ordered.<name>`: complete on return."""
    return getattr(torch.ops.phalanx_ordered, name).default


def plain(name: str) -> Any:
    """`torch.ops.phalanx.<name>`."""
    return getattr(torch.ops.phalanx, name).default
