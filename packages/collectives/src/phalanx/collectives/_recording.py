"""Which coalescing managers are open on the calling thread."""

import os
import threading
from typing import Any

from phalanx.collectives._group_state import GroupState


class _Local(threading.local):
    def __init__(self) -> None:
        self.recorders: dict[str, Any] = {}  # by the op_name of the group


_local = _Local()
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_open = 0  # managers in the process


def recorder_on(group: GroupState) -> Any:
    """The Recorder of the calls of this thread on a group; None: no manager is open on it."""
    return _local.recorders.get(group.op_name) if _open else None


def is_any_open() -> bool:
    """Whether a manager is open on any thread."""
    return _open > 0


def begin(group: GroupState, recorder: Any) -> None:
    """Record the calls of this thread on a group.

    Raises:
        RuntimeError: The calls of this thread on the group are recorded already.
    """
    global _open
    if group.op_name in _local.recorders:
        raise RuntimeError(
            f"coalescing_manager: one is open on group '{group.name}' in this thread already; managers nest only on "
            "different groups, so remove the inner one"
        )
    with _lock:
        _open += 1
    _local.recorders[group.op_name] = recorder
    group.count_managers(1)


def end(group: GroupState) -> None:
    """Record no more."""
    global _open
    group.count_managers(-1)
    del _local.recorders[group.op_name]
    with _lock:
        _open -= 1
