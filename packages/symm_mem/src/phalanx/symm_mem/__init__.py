"""Symmetric memory for torch: tensors that the ranks of one host map into each other's address space::

    t = symm_mem.empty(1024, dtype=torch.float32)           # like torch.empty; not collective
    handle = symm_mem.rendezvous(t, dist.group.WORLD)       # collective, once for each tensor and group
    peer = handle.get_buffer(1, t.shape, t.dtype)           # the tensor of rank 1
    peer.fill_(42)
    handle.put_signal(1)                                    # rank 1: handle.wait_signal(0)

Names and signatures follow torch.distributed._symmetric_memory and torch's _SymmetricMemory. A group is a torch process
group or mesh, or a name given to `set_group_info`. State belongs to a rank, which is the process, unless threads take
ranks of their own with `rank_context`.

The ops of torch.ops.symm_mem are in torch.ops.phalanx, with the same names and schemas::

    torch.ops.phalanx.one_shot_all_reduce(t, "sum", group_name)

A forked child is a new rank. Tensors of its parent are the parent's memory, which both can write; handles raise an
error there. A context that was entered before the fork is the parent's: enter one in the child.

Errors are those of phalanx.core (PhalanxError).
"""

from phalanx.symm_mem import _ops
from phalanx.symm_mem._allocation import drop, empty, empty_strided_p2p, is_symm_mem_tensor
from phalanx.symm_mem._allocators import (
    WorldAllocator,
    get_allocator,
    get_backend,
    has_allocator,
    is_nvshmem_available,
    register_allocator,
    set_backend,
)
from phalanx.symm_mem._fabric import export_fabric, import_fabric
from phalanx.symm_mem._group_buffers import get_symm_mem_workspace
from phalanx.symm_mem._handle import SymmetricMemory, get, put_signal, wait_signal
from phalanx.symm_mem._ops.all_to_all_nd import all_to_all_nd, reduce_partials
from phalanx.symm_mem._ops.reduce_scatter_offset import reduce_scatter_offset
from phalanx.symm_mem._pool import MemPool, PoolSegment, get_mem_pool, get_mempool_allocator, use_mem_pool
from phalanx.symm_mem._pool.cuda import CudaMemPool
from phalanx.symm_mem._process_group import GroupInfo, enable_symm_mem_for_group, get_group_info, set_group_info
from phalanx.symm_mem._rendezvous import get_symmetric_memory, rendezvous, rendezvous_by_name
from phalanx.symm_mem._signal_pad import get_signal_pad_size, set_signal_pad_size
from phalanx.symm_mem._state import Allocator, RankContext, finalize, rank_context
from phalanx.symm_mem._stats import MemStats, PersistentBlock, get_mem_stats
from phalanx.symm_mem._test_mode import _test_mode as _test_mode
from phalanx.symm_mem._test_mode import is_symm_mem_enabled_for_group

__all__ = [
    "Allocator",
    "CudaMemPool",
    "GroupInfo",
    "MemPool",
    "MemStats",
    "PersistentBlock",
    "PoolSegment",
    "RankContext",
    "SymmetricMemory",
    "WorldAllocator",
    "all_to_all_nd",
    "drop",
    "empty",
    "empty_strided_p2p",
    "enable_symm_mem_for_group",
    "export_fabric",
    "finalize",
    "get",
    "get_allocator",
    "get_backend",
    "get_group_info",
    "get_mem_pool",
    "get_mem_stats",
    "get_mempool_allocator",
    "get_signal_pad_size",
    "get_symm_mem_workspace",
    "get_symmetric_memory",
    "has_allocator",
    "import_fabric",
    "is_nvshmem_available",
    "is_symm_mem_enabled_for_group",
    "is_symm_mem_tensor",
    "put_signal",
    "rank_context",
    "reduce_partials",
    "reduce_scatter_offset",
    "register_allocator",
    "rendezvous",
    "set_backend",
    "set_group_info",
    "set_signal_pad_size",
    "use_mem_pool",
    "wait_signal",
]

__version__ = "0.1.0"


# The static methods of torch's class, and its name there.
SymmetricMemory.set_group_info = staticmethod(set_group_info)
SymmetricMemory.empty_strided_p2p = staticmethod(empty_strided_p2p)
SymmetricMemory.rendezvous = staticmethod(rendezvous_by_name)
SymmetricMemory.is_symm_mem_tensor = staticmethod(is_symm_mem_tensor)
SymmetricMemory.set_backend = staticmethod(set_backend)
SymmetricMemory.get_backend = staticmethod(get_backend)
SymmetricMemory.get_mempool_allocator = staticmethod(get_mempool_allocator)
_SymmetricMemory = SymmetricMemory

_ops.register()
