"""What may still change: local_map, register_sharding, implicit_replication, context_parallel.

Names, signatures and semantics follow torch.distributed.tensor.experimental of torch 2.13.
"""

from phalanx.dtensor.experimental.context_parallel import context_parallel, context_parallel_unshard
from phalanx.dtensor.experimental.local_map import local_map
from phalanx.dtensor.experimental.register_sharding import register_sharding
from phalanx.dtensor.mode import implicit_replication

__all__ = ["context_parallel", "context_parallel_unshard", "implicit_replication", "local_map", "register_sharding"]
