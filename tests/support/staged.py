"""In the place of NCCL between hosts: gloo, through memory of the host.

from staged import between_hosts

def sums(rank, size):
    between_hosts()                   # in a rank, before its groups first see a tensor of a GPU
    ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

__all__ = ["NEVER", "between_hosts"]

NEVER = timedelta(days=1)


class Staged:
    """A Backend of torch, for tensors of GPUs."""

    supports_coalescing = False

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._aborted = threading.Event()

    def name(self) -> str:
        return "staged"

    def send(self, tensors: Sequence[torch.Tensor], host: int, tag: int) -> Ended:
        kept = [each.cpu() for each in tensors]
        work = self._gloo.send(kept, host, tag)
        return Ended(work, lambda: kept.clear(), self._aborted)

    def recv(self, tensors: Sequence[torch.Tensor], host: int, tag: int) -> Ended:
        kept = [torch.empty(each.shape, dtype=each.dtype) for each in tensors]
        work = self._gloo.recv(kept, host, tag)
        end = lambda: [to.copy_(source) for to, source in zip(tensors, kept, strict=True)]  # noqa: E731
        return Ended(work, end, self._aborted)

    def abort(self) -> None:
        self._aborted.set()

    def shutdown(self) -> None: ...


class Ended:
    """A Work: whoever waits for it goes on when its backend is aborted, as a stream would."""

    def __init__(self, work: Any, end: Callable[[], object], aborted: threading.Event) -> None:
        self._work, self._end, self._aborted = work, end, aborted
        self._error: RuntimeError | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._await, daemon=True).start()

    def _await(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._is_over.set()

    def wait(self, timeout: Any = None) -> None:
        assert timeout is None  # the host waits for nothing
        while not self._is_over.wait(0.05):
            if self._aborted.is_set():
                return
        if self._error is not None:
            raise self._error
        self._end()


def between_hosts(limit: timedelta = NEVER) -> None:
    """Let gloo be taken for NCCL.

    Args:
        limit: What a transfer may take before the backend says so, which NCCL never does.
    """
    from phalanx.collectives import _torch_compat

    make, backends = _torch_compat.make_backend, _torch_compat.backends_of
    _torch_compat.make_backend = lambda name, store, rank, size, _: Staged(make("gloo", store, rank, size, limit))
    _torch_compat.backends_of = lambda group: backends(group) | {"nccl"}
    _torch_compat.lacks_backend = lambda name: "" if name == "nccl" else "no other one"
