"""Which coalescing managers are open on the calling thread, and the detour of the short road while any is.

The short road costs nothing for it: as long as a manager is open anywhere in the process, its functions are replaced.
"""

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.collectives._recorder import Recorder


class _Local(threading.local):
    def __init__(self) -> None:
        self.recorders: dict[str, Recorder] = {}  # by name of the group


class _Detour:
    """A function of the short road, and what is called in its place."""

    def __init__(self, road: Any, attribute: str, instead: Callable[..., Any]) -> None:
        self._road, self._attribute, self._instead = road, attribute, instead
        self._through: Callable[..., Any] = instead

    def begin(self) -> None:
        getattr(self._road, self._attribute)(None)  # its first call chooses what it is; None is no tensor
        self._through = getattr(self._road, self._attribute)
        setattr(self._road, self._attribute, self._call)

    def end(self) -> None:
        setattr(self._road, self._attribute, self._through)

    def _call(self, *args: Any) -> Any:
        recorder = _local.recorders.get(args[-1])
        return self._through(*args) if recorder is None else self._instead(recorder, *args)


_local = _Local()
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_open = 0  # managers in the process
_detours: list[_Detour] = []


def detour(road: Any, attribute: str, instead: Callable[..., Any]) -> None:
    """Have a function of the short road replaced while a manager is open.

    Args:
        road: What has it.
        attribute: Its name. Its last argument is the name of the group.
        instead: Called as instead(recorder, *arguments) where a manager of the group is open on the thread.
    """
    _detours.append(_Detour(road, attribute, instead))


def on(name: str) -> "Recorder | None":
    """What records the calls of this thread on the group of that name, if a manager is open."""
    return _local.recorders.get(name) if _open else None


def is_any_open() -> bool:
    """Whether a manager is open on any thread."""
    return _open > 0


def begin(name: str, recorder: "Recorder") -> None:
    """Record the calls of this thread on a group.

    Raises:
        RuntimeError: They are recorded already.
    """
    global _open
    if name in _local.recorders:
        raise RuntimeError(
            f"coalescing_manager: one is open on group '{name}' in this thread already; managers nest only on "
            "different groups, so leave the inner one away"
        )
    with _lock:
        if _open == 0:
            for each in _detours:
                each.begin()
        _open += 1
        _local.recorders[name] = recorder


def end(name: str) -> None:
    """Record no more."""
    global _open
    with _lock:
        del _local.recorders[name]
        _open -= 1
        if _open == 0:
            for each in _detours:
                each.end()
