"""CUDA streams: on which one work is put, and what must live until streams are through with it.

The driver unmaps memory at once, whatever kernels still do with it. So what a tensor lay in is kept, once the tensor is
gone, until the streams that may have used it come past that moment: the one that was current when the tensor was made,
and the one that is current where it ends. Nobody waits for them: whoever allocates or frees next looks whether they
have, each rank for what is its own. Work on any other stream is the caller's to order before the tensor ends, as with
every allocator of torch.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Hashable
from typing import Any

import torch

from phalanx.core import UnsupportedError
from phalanx.core.uncopied import Uncopied
from phalanx.symm_mem._context import current as current_rank


def current(device: torch.device) -> int:
    """The current stream of a GPU, as the driver's number."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def place_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What the collectives of `phalanx.core.Group` must be told of a tensor that is not on the CPU."""
    if tensor.is_cpu:
        return {}
    return {"device": (tensor.device.type, tensor.device.index), "stream": current(tensor.device)}


class Order:
    """Keeps uses of the same words of a signal pad in the order of their calls, whichever streams they are put on.

    What counts signals is read and written without regard to what else runs, so two streams must not do it at once.
    Replays of a graph are not seen from here; their order is the caller's.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, torch.cuda.Stream] = {}

    def next(self, device: torch.device, use: Hashable) -> int:
        """The current stream, as the driver's number, once it waits for the one of the last call of this use.

        Args:
            device: The GPU.
            use: Of what; different ones do not wait for each other.
        """
        stream = torch.cuda.current_stream(device)
        number, before = int(stream.cuda_stream), self._last.get(use)
        if before is None:
            self._last[use] = stream
        elif before.cuda_stream != number:
            if not torch.cuda.is_current_stream_capturing() and not _is_captured(before):
                stream.wait_stream(before)
            self._last[use] = stream
        return number


def refuse_capture(operation: str, device: torch.device, why: str) -> None:
    """Raise where a stream is being captured into a graph.

    Args:
        operation: For the error text.
        device: Anything on the CPU is fine.
        why: What it cannot do then, and what to do about it.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(f"{operation}: a stream is being captured into a graph, and {why}")


class _Ended:
    """Something that nobody uses any more but work on these streams."""

    __slots__ = ("events", "streams", "thing")

    def __init__(self, thing: object, streams: list[Any]) -> None:
        self.thing = thing
        self.streams = streams  # those that were being captured: an event would become part of the graph
        self.events: list[Any] = []

    def is_over(self) -> bool:
        captured = []
        for stream in self.streams:
            if _is_captured(stream):
                captured.append(stream)
                continue
            self.events.append(stream.record_event())
        self.streams = captured
        self.events = [event for event in self.events if not event.query()]
        return not self.streams and not self.events


class _State(threading.local):
    busy: bool = False


_state = _State()
Waiting = deque[_Ended]  # of one rank; taken from and added to by any thread, without a lock, as a collection may do it


def _is_captured(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


class UsedOn(Uncopied):
    """Holds a thing, and when it is gone itself, until the streams are through with it.

    Args:
        thing: What is kept.
        device: A GPU, of which the current stream may use the thing from now on.
    """

    __slots__ = ("_pid", "_rank", "_stream", "_thing")

    def __init__(self, thing: object, device: torch.device) -> None:
        self._thing = thing
        self._rank = current_rank().ended
        self._stream = torch.cuda.current_stream(device)
        self._pid = os.getpid()

    def __del__(self) -> None:
        if hasattr(self, "_pid") and not sys.is_finalizing() and self._pid == os.getpid():
            _end(self._thing, self._stream, self._rank)


def _end(thing: object, stream: Any, rank: Waiting) -> None:
    here = torch.cuda.current_stream(stream.device)
    rank.append(_Ended(thing, [stream] if here.cuda_stream == stream.cuda_stream else [stream, here]))
    drain()


def drain() -> None:
    """Let go of what the streams are through with, of this rank: what another one's wait for may wait for this one."""
    ended = current_rank().ended
    if _state.busy or not ended or torch.cuda.is_current_stream_capturing():  # to ask about an event ends a capture
        return
    _state.busy = True  # as letting go of one thing may end another
    try:
        for _ in range(len(ended)):
            try:
                each = ended.popleft()
            except IndexError:  # another thread was faster
                return
            if not each.is_over():
                ended.append(each)
    finally:
        _state.busy = False


def wait() -> bool:
    """Wait until the streams are through with all that has ended, and let go of it.

    Returns:
        Whether there was anything.
    """
    waited = list(current_rank().ended)
    for each in waited:
        for event in list(each.events):
            event.synchronize()
    drain()
    return bool(waited)
