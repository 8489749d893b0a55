"""torch.cuda of a torch that was built for CUDA, put into one that was not when the device is loaded."""

import contextlib
import ctypes
import types
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["apply"]

_library: Any = None
_MODES = ("global", "thread_local", "relaxed")  # of a capture, as the driver numbers them


def _index(device: Any = None) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device if device >= 0 else torch.accelerator.current_device_index()
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return int(self.native_handle)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)


def _ours(stream: Any) -> Stream:
    """The same stream, of the class that torch.cuda has."""
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Any = None) -> Stream:
    return _ours(torch.accelerator.current_stream(torch.device("cuda", _index(device))))


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=int(torch._C._autograd.DeviceType.CUDA))


def set_stream(stream: Any) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    device = torch.accelerator.current_device_index()
    before = current_stream(stream.device)
    set_stream(stream)
    torch.accelerator.set_device_index(stream.device.index)
    try:
        yield
    finally:
        set_stream(before)
        torch.accelerator.set_device_index(device)


def _exchange_device(index: int) -> int:
    before = torch.accelerator.current_device_index()
    if index >= 0:
        torch.accelerator.set_device_index(index)
    return before


def _checked(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA error {status}")


class CUDAGraph:
    """What was put on the current stream between capture_begin and capture_end."""

    _graph: ctypes.c_void_p | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        _checked(_library.fake_torch_begin_capture(_index(), _MODES.index(capture_error_mode)))

    def capture_end(self) -> None:
        self._graph = ctypes.c_void_p()
        _checked(_library.fake_torch_end_capture(_index(), ctypes.byref(self._graph)))

    def replay(self) -> None:
        assert self._graph is not None, "nothing was captured"
        _checked(_library.fake_torch_replay(_index(), self._graph))

    def reset(self) -> None:
        if self._graph is not None:
            _library.fake_torch_forget(self._graph)
        self._graph = None

    def pool(self) -> tuple[int, int]:
        return (0, 1)


@contextlib.contextmanager
def _graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    torch.cuda.synchronize()
    with _stream_context(stream if stream is not None else Stream()):
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()


def _is_capturing() -> bool:
    return bool(_library.fake_torch_is_capturing(_index()))


def _properties(device: Any = None) -> Any:
    return types.SimpleNamespace(
        name="a GPU of the tests",
        major=8,
        minor=0,
        total_memory=1 << 30,
        multi_processor_count=6,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
    )


def apply(library: Any) -> None:
    """Make torch.cuda that of the device in this library."""
    global _library
    _library = library
    cuda = torch.cuda
    replaced = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: library.fake_torch_device_count(),  # Dynamo looks for functions, and hashes them
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "empty_cache": lambda: library.fake_torch_empty_cache(),
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "stream": _stream_context,
        "CUDAGraph": CUDAGraph,
        "graph": _graph,
        "is_current_stream_capturing": _is_capturing,
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties().name,
        "get_device_capability": lambda device=None: (_properties().major, _properties().minor),
        "can_device_access_peer": lambda device, peer: True,
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    for module, names in (
        (cuda.streams, ("Stream", "Event")),
        (cuda.graphs, ("CUDAGraph", "graph", "is_current_stream_capturing")),
        (cuda.memory, ("empty_cache",)),
    ):
        for name in names:
            setattr(module, name, replaced[name])
    # What generated code and torch's own modules call.
    torch._C._cuda_getCurrentRawStream = lambda index: current_stream(index).cuda_stream
    torch._C._cuda_isCurrentStreamCapturing = _is_capturing
