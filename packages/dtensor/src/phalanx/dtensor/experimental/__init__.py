"""Functions that may still change: local_map, register_sharding, implicit_replication, context_parallel.

Names, signatures and semantics follow torch.distributed.tensor.experimental of torch 2.13.
"""

from phalanx.dtensor._mode import implicit_replication
from phalanx.dtensor.experimental._context_parallel import context_parallel, context_parallel_unshard
from phalanx.dtensor.experimental._func_map import local_map
from phalanx.dtensor.experimental._register_sharding import register_sharding

__all__ = ["context_parallel", "context_parallel_unshard", "implicit_replication", "local_map", "register_sharding"]
