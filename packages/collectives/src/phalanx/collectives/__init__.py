"""Functional collectives for PyTorch, on the shared memory of each host.

The functions have the names and arguments of torch.distributed._functional_collectives, so that a program moves by
changing an import. The core does the work: on one host for tensors of the CPU and of GPUs, on several hosts for tensors
of the CPU. Groups and tensors that it cannot serve go through torch.distributed, with the same results.

    import phalanx.collectives as pc

    y = pc.all_reduce(x, "sum", dist.group.WORLD)   # returns before the other ranks have called it
    z = y + 1                                       # waits

Which form of group to pass: (DeviceMesh, dim) and a list of lists tell a compiler the groups of all ranks; a
ProcessGroup or a list of ranks tells it only the group of this rank.
"""

import gc
import warnings

_collects_garbage = gc.isenabled()
try:
    gc.disable()  # ADR 76: a full collection of what torch made takes longer than these imports, and finds nothing
    from phalanx.collectives import _barrier, _kernels, _library, _p2p_ops, _process_group, _torch_compat, c10d
    from phalanx.collectives._async_tensor import AsyncCollectiveTensor
    from phalanx.collectives._barrier import barrier
    from phalanx.collectives._coalescing import coalescing_manager
    from phalanx.collectives._functional import (
        all_gather_tensor,
        all_gather_v,
        all_reduce,
        all_reduce_,
        all_to_all_single,
        broadcast,
        broadcast_,
        reduce_scatter_tensor,
        reduce_scatter_v,
        shard_dim_alltoall,
        wait_tensor,
    )
    from phalanx.collectives._functional_coalesced import (
        all_gather_into_tensor_coalesced,
        all_reduce_coalesced,
        reduce_scatter_tensor_coalesced,
    )
    from phalanx.collectives._functional_inplace import (
        all_gather_inplace,
        all_gather_single,
        all_gather_single_autograd,
        all_gather_single_coalesced,
        all_gather_tensor_autograd,
        all_gather_tensor_inplace,
        all_reduce_inplace,
        all_to_all_inplace,
        all_to_all_single_autograd,
        broadcast_inplace,
        permute_tensor,
        reduce_scatter_inplace,
        reduce_scatter_single,
        reduce_scatter_single_autograd,
        reduce_scatter_single_coalesced,
        reduce_scatter_tensor_autograd,
        reduce_scatter_tensor_inplace,
    )
    from phalanx.collectives._op_table import form_of
    from phalanx.collectives._p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
    from phalanx.collectives._p2p_ops import batch_p2p_ops_inplace, irecv_inplace, isend_inplace
    from phalanx.collectives._process_group import (
        RANK_TYPES,
        GroupLike,
        core_group,
        enable_group,
        finalize,
        is_core_group,
        process_group_of,
    )
    from phalanx.collectives._registry import check_group
    from phalanx.collectives._torch_compat import allow_inflight_collective_as_graph_input_ctx
finally:
    if _collects_garbage:
        gc.enable()

__all__ = [
    "RANK_TYPES",
    "AsyncCollectiveTensor",
    "GroupLike",
    "P2POp",
    "all_gather_inplace",
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_gather_tensor_inplace",
    "all_gather_v",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_inplace",
    "all_to_all_inplace",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "allow_inflight_collective_as_graph_input_ctx",
    "barrier",
    "batch_isend_irecv",
    "batch_p2p_ops_inplace",
    "broadcast",
    "broadcast_",
    "broadcast_inplace",
    "check_group",
    "coalescing_manager",
    "core_group",
    "enable_group",
    "finalize",
    "form_of",
    "irecv",
    "irecv_inplace",
    "is_core_group",
    "isend",
    "isend_inplace",
    "permute_tensor",
    "process_group_of",
    "recv",
    "reduce_scatter_inplace",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_inplace",
    "reduce_scatter_v",
    "send",
    "shard_dim_alltoall",
    "wait_tensor",
]

__version__ = "0.1.0"


# As torch has them.
_coalescing_manager = coalescing_manager
_expand_group = _process_group._expand_group
_register_tensor_work = _torch_compat.register_work
_resolve_group_name = _process_group._resolve_group_name

if _library.refusal():
    warnings.warn(f"phalanx.collectives cannot run collectives: {_library.refusal()}", stacklevel=2)
else:
    for _module in (_kernels, _p2p_ops, _barrier):
        _module.register()
c10d.register()
