"""Symmetric memory for torch: tensors that the ranks of one host map into each other's address space::

    t = symm_mem.empty(1024, dtype=torch.float32)           # like torch.empty; not collective
    handle = symm_mem.rendezvous(t, dist.group.WORLD)       # collective, once for each tensor and group
    peer = handle.get_buffer(1, t.shape, t.dtype)           # the tensor of rank 1
    peer.fill_(42)
    handle.put_signal(1)                                    # rank 1: handle.wait_signal(0)

Names and signatures follow torch.distributed._symmetric_memory and torch's _SymmetricMemory. A group
is a torch process group or mesh, or a name given to `set_group_info`. State belongs to a rank: that
is the process, unless threads take ranks of their own with `rank_context`.

The ops of torch.ops.symm_mem are in torch.ops.phalanx, with the same names and schemas::

    torch.ops.phalanx.one_shot_all_reduce(t, "sum", group_name)

Errors are those of phalanx.core (PhalanxError).
"""

from phalanx.symm_mem import _ops
from phalanx.symm_mem._alloc import (
    drop,
    empty,
    empty_strided_p2p,
    get_mem_stats,
    is_symm_mem_tensor,
)
from phalanx.symm_mem._allocators import (
    Allocator,
    WorldAllocator,
    get_allocator,
    has_allocator,
    register_allocator,
)
from phalanx.symm_mem._context import RankContext, finalize, rank_context
from phalanx.symm_mem._groups import (
    GroupInfo,
    enable_symm_mem_for_group,
    get_group_info,
    set_group_info,
)
from phalanx.symm_mem._handle import SymmetricMemory
from phalanx.symm_mem._rendezvous import get_symmetric_memory, rendezvous
from phalanx.symm_mem._workspace import get_symm_mem_workspace

__all__ = [
    "Allocator",
    "GroupInfo",
    "RankContext",
    "SymmetricMemory",
    "WorldAllocator",
    "drop",
    "empty",
    "empty_strided_p2p",
    "enable_symm_mem_for_group",
    "finalize",
    "get_allocator",
    "get_group_info",
    "get_mem_stats",
    "get_symm_mem_workspace",
    "get_symmetric_memory",
    "has_allocator",
    "is_symm_mem_tensor",
    "rank_context",
    "register_allocator",
    "rendezvous",
    "set_group_info",
]

_ops.register()
