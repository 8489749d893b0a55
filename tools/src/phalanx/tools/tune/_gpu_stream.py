"""Streams and graphs of the CUDA driver, for what measures without torch."""

import ctypes
from collections.abc import Callable
from typing import Any

from phalanx.core import DeviceError

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_OF_THIS_THREAD = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class GpuStream:
    """A stream in the primary context of a GPU, which is the current one of this thread from then on."""

    def __init__(self, index: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._made: list[ctypes.c_void_p] = []  # graphs that can be launched
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        self._device, self._stream = device, stream

    @property
    def pointer(self) -> int:
        """As `stream` of collectives."""
        return self._stream.value or 0

    def wait(self) -> None:
        """Return when all that was put on it is through."""
        self._call("cuStreamSynchronize", self._stream)

    def graph(self, put: Callable[[], None]) -> Callable[[], None] | None:
        """Capture what `put` puts on the stream.

        Returns:
            What puts it there as one graph; None where the driver has no graphs, and then nothing was called.
        """
        if not hasattr(self._driver, "cuGraphInstantiateWithFlags"):
            return None
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, _OF_THIS_THREAD)
        try:
            put()
        finally:
            self._call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, ctypes.c_ulonglong(0))
        self._call("cuGraphDestroy", graph)
        self._made.append(made)
        return lambda: self._call("cuGraphLaunch", made, self._stream)

    def close(self) -> None:
        """Give everything back; what was put on the stream has to be through."""
        for made in self._made:
            self._call("cuGraphExecDestroy", made)
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status:
            raise DeviceError(f"{function} failed with status {status} (CUresult of cuda.h)")
