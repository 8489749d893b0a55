"""Plain calls of torch.distributed in the body of a coalescing manager.

In the body of torch's own manager, all_reduce, all_gather_single and reduce_scatter_single do nothing but append what
they were asked for to a list of the process group. Ours puts a list there that records it.
"""

import os
import threading
from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives import _recording, _torch_compat
from phalanx.collectives._group_state import GroupState
from phalanx.collectives._op_table import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective
from phalanx.collectives._process_group import ensure_initialized
from phalanx.collectives.reductions import REDUCTIONS

# The collectives by the name of the function that torch appends. The names on the right are those of torch 2.12 and
# before.
_OPS: dict[str, Collective] = {
    "all_reduce": ALL_REDUCE,
    "all_gather_single": ALL_GATHER,
    "all_gather_into_tensor": ALL_GATHER,
    "reduce_scatter_single": REDUCE_SCATTER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
}
_REDUCTIONS = {getattr(dist.ReduceOp, name.upper()): name for name in REDUCTIONS}
_KIND = type(dist.ReduceOp.SUM)

_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class _Captured(list[Any]):
    """The list of a process group while managers of ours are open on it, on one thread or several."""

    def __init__(self, group: GroupState) -> None:
        super().__init__()
        self.group = group
        self.managers = 0

    def __bool__(self) -> bool:
        return True  # so that torch's manager raises instead of nesting

    def append(self, call: Any) -> None:
        recorder = _recording.recorder_on(self.group)
        if recorder is None:
            raise RuntimeError(
                f"{call.op.__name__} on group '{self.group.name}': another thread has a coalescing_manager open on the "
                "group, which in torch.distributed holds for all threads; use the functions of phalanx.collectives, or "
                "another process group"
            )
        _record(recorder, call)


def _record(recorder: Any, call: Any) -> None:
    collective, tensor, group = _OPS.get(call.op.__name__), call.tensor, recorder.group
    if collective is ALL_REDUCE and group.decided and not tensor.requires_grad:
        recorder.write_into(collective, tensor, tensor, _reduction(call))
        return
    if collective is None:
        raise RuntimeError(
            f"{call.op.__name__}: coalescing_manager cannot record this function of torch.distributed; call it outside "
            "the with block"
        )
    tensor, out = _plain(tensor), _plain(tensor if call.dst_tensor is None else call.dst_tensor)
    size = group.size
    few, many = (tensor, out) if collective is not REDUCE_SCATTER else (out, tensor)
    wanted = few.numel() * (1 if collective is ALL_REDUCE else size)
    if many.numel() != wanted or few.dtype != many.dtype:
        smaller, larger = ("output", "input") if collective is REDUCE_SCATTER else ("input", "output")
        raise ValueError(
            f"{call.op.__name__} on group '{group.name}': the {smaller} has {few.numel()} elements of {few.dtype}, "
            f"and the {larger} {many.numel()} of {many.dtype}; in a group of {size} the {larger} must have {wanted} "
            f"elements of {few.dtype}"
        )
    args: tuple[Any, ...] = () if collective is ALL_REDUCE else (size,)
    if call.redop is not None:
        args = (_reduction(call), *args)
    if collective is not ALL_REDUCE and not (group.core is not None and tensor.is_contiguous()):
        tensor = tensor.reshape(-1)  # what counts is the order of the elements
    ensure_initialized(group, tensor)
    recorder.write_into(collective, out, tensor, *args)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _reduction(call: Any) -> str:
    name = _REDUCTIONS.get(call.redop) if type(call.redop) is _KIND else None
    if name is not None:
        return name
    for kind, name in _REDUCTIONS.items():
        if call.redop == kind:
            return name
    raise ValueError(
        f"{call.op.__name__}: coalescing_manager cannot record the reduction {call.redop}; use one of "
        f"{', '.join(each.upper() for each in REDUCTIONS)}, or call it outside the with block"
    )


def begin(process_group: dist.ProcessGroup, group: GroupState) -> None:
    """Record plain calls on a process group.

    Raises:
        RuntimeError: torch's own manager is open on it.
    """
    with _lock:
        state = _torch_compat.coalesce_state()
        found = state.get(process_group)
        if found and not isinstance(found, _Captured):
            raise RuntimeError(
                f"coalescing_manager on group '{group.name}': torch's _coalescing_manager is open on the group, or was "
                "left open by an exception; use only one of the two on a group"
            )
        if not isinstance(found, _Captured):
            found = state[process_group] = _Captured(group)
        found.managers += 1


def end(group: dist.ProcessGroup) -> None:
    """Record no more."""
    with _lock:
        state = _torch_compat.coalesce_state()
        found = state.get(group)
        if isinstance(found, _Captured):  # not where the group was destroyed meanwhile
            found.managers -= 1
            if found.managers == 0:
                del state[group]
