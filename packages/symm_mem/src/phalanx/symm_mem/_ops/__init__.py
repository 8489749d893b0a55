"""The ops of torch.ops.symm_mem as torch.ops.phalanx: the same names and schemas, on CPU.

peers.py        a tensor's counterparts on the other ranks
fused.py        matmul with the collective before or after it
reductions.py   all_reduce, reduce_scatter, tiles
transfers.py    all_gather, all_to_all, the tensors of other ranks
words.py        32-bit words

What torch has for one transport only is not here (nccl_*, nvshmem_*); the multimem forms are, as multicast is something
that a device does for a reduction, not another result.
"""

from typing import Any

import torch

from phalanx.symm_mem._ops import fused, reductions, transfers, words

_libraries: list[Any] = []


def register() -> None:
    """Register all ops. A later call does nothing."""
    if _libraries:
        return
    make: Any = torch.library.Library  # public, without types
    library = make("phalanx", "FRAGMENT")
    _libraries.append(library)
    for module in (fused, reductions, transfers, words):
        for schema, kernel, fake in module.OPS:
            name = schema.partition("(")[0]
            library.define(schema)
            library.impl(name, kernel, "CPU")
            torch.library.register_fake(f"phalanx::{name}", fake, lib=library)
            if schema.endswith("-> ()"):  # kept in graphs though nothing comes of them
                torch.fx.node.has_side_effect(getattr(torch.ops.phalanx, name).default)
