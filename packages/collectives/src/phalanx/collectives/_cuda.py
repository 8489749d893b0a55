"""GPUs: whether the core can use one, its arguments about streams, and streams other than the current one."""

import contextlib
import threading
from collections.abc import Hashable, Iterator
from functools import cache
from typing import Any

import torch

from phalanx.collectives import _library
from phalanx.core import PhalanxError, World, ffi, lib


def stream_kwargs(device: torch.device) -> dict[str, Any]:
    """The arguments of a collective of the core for tensors of a GPU: the GPU, given with its index, and its stream."""
    stream: Any = torch.cuda.current_stream(device)
    return {"device": (device.type, device.index), "stream": int(stream.cuda_stream)}


def options_on(device: torch.device) -> tuple[Any, Any]:
    """The same as phx_options of the C API, and what they point to: both must live until the call returns."""
    told = stream_kwargs(device)
    gpu = ffi.new("phx_gpu_options *", {"struct_size": ffi.sizeof("phx_gpu_options")})
    gpu.stream = ffi.cast("void *", told["stream"])
    gpu.device.type, gpu.device.index = lib.PHX_DEVICE_CUDA, device.index
    return ffi.new("phx_options *", {"struct_size": ffi.sizeof("phx_options"), "scale": 1.0, "gpu": gpu}), gpu


class StreamMarker:
    """A place on the current stream of a GPU, given with its index: after all that was put on it so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make: Any = torch.cuda.Event  # without types
        self._event = make()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Let the current stream wait until that one has come here. The host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def query(self) -> bool:
        """Whether the stream has come here. Never blocks."""
        return bool(self._event.query())


class SideStreams:
    """Streams other than the current one, for work that waits for other ranks while the current stream goes on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[int, Hashable], Any] = {}

    @contextlib.contextmanager
    def stream(self, device: torch.device, which: Hashable) -> Iterator[Any]:
        """Make one the current stream, for the same `which` the same one. What is put on it comes after all that was
        put on the stream before."""
        make: Any = torch.cuda.Stream  # without types
        before = StreamMarker(device)
        with self._lock:
            if (device.index, which) not in self._made:
                self._made[device.index, which] = make(device)
            stream = self._made[device.index, which]
        with torch.cuda.stream(stream):
            before.wait()
            yield stream


@cache
def refusal(device: torch.device) -> str:
    """Why the core cannot serve tensors of a GPU, given with its index, in this process, or "". Not collective.

    It is the error of a group of this rank alone on the GPU: no driver, no kernels, or a GPU that is too old.
    """
    if reason := _library.refusal():
        return reason
    told = stream_kwargs(device)
    try:
        with World(0, 1) as alone:
            block = alone.alloc(4, device=told["device"])
            symm = alone.create_group("gpu", [0]).rendezvous(block)
            symm.all_reduce(0, None, 1, "float32", stream=told["stream"])
            torch.cuda.current_stream(device).synchronize()
    except PhalanxError as error:
        return str(error)
    return ""
