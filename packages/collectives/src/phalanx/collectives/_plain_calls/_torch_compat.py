"""The private parts of torch that recording plain calls relies on. `test_coalescing_plain.py` fails when one moves."""

from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d


def coalesce_state() -> dict[dist.ProcessGroup, list[Any]]:
    """The process groups on which collectives are being coalesced, with what was called. Read in 2.11 to 2.13.

    all_reduce, all_gather_single and reduce_scatter_single look for their group in it, and append a `_CollOp`, with the
    attributes op, tensor, dst_tensor and redop.
    """
    return cast(dict[dist.ProcessGroup, list[Any]], _c10d._world.pg_coalesce_state)
