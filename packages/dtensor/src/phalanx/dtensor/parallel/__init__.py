"""Parallel styles: how the modules of a model are spread over the ranks of a mesh::

    parallelize_module(block, mesh["tp"], {
        "attention.[qkv]": ColwiseParallel(),       # one reduction of the input gradient for all three
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    })

Names, signatures and semantics follow torch.distributed.tensor.parallel of torch 2.13.
"""

from phalanx.dtensor.parallel.api import parallelize_module
from phalanx.dtensor.parallel.loss import loss_parallel
from phalanx.dtensor.parallel.style import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]
