"""The ops that the pass puts into graphs. They belong to phalanx.core and phalanx.collectives.

- `phalanx_ordered`: every collective of `phalanx`, complete on return, with a tensor more that stands for the order of
  what a graph sends. Each of them claims to write it, so a compiler keeps them in the order of the graph.
- `phalanx.symm_arena`, `arena_view`, `peer_view`, `arena_barrier_`, `arena_release_`: persistent symmetric memory, and
  tensors that lie in it.
- `phalanx.mm_into_`, ...: products written to where the caller says.
- `phalanx.mm_all_reduce_`, ...: products in pieces, each communicated while the next is computed.
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
