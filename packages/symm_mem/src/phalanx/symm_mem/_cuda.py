"""CUDA: streams, the memory that they still use, storages at addresses of GPUs, and multicast support.

The driver unmaps memory at once, even if kernels still use it. The memory of a tensor that has ended is therefore kept
until the streams that may have used it have passed that moment: the one that was current when the tensor was made, and
the one that is current where it ends. Nobody waits for them: each allocation and each end checks what is over, each
rank for its own memory. Work on other streams must be ordered by the caller before the tensor ends, as with every
allocator of torch.

Storages are made with DLPack, the public way of every build of torch: it says on which GPU the memory is to be used,
which for the block of a peer is not the GPU where it lies, and calls back on any thread when the storage ends.
"""

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Hashable
from typing import Any

import torch

from phalanx.core import UnsupportedError
from phalanx.core.uncopied import Uncopied
from phalanx.symm_mem._state import Retained
from phalanx.symm_mem._state import current as current_context


def current_stream(device: torch.device) -> int:
    """The handle of the current stream of a GPU."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def stream_kwargs(tensor: torch.Tensor) -> dict[str, Any]:
    """The arguments `device` and `stream` of collectives of `phalanx.core.Group`; none for tensors of the CPU."""
    if tensor.is_cpu:
        return {}
    return {"device": (tensor.device.type, tensor.device.index), "stream": current_stream(tensor.device)}


class StreamOrder:
    """Keeps uses of the same words of a signal pad in the order of their calls, whatever their streams.

    Kernels read and write the counts of signals without atomic updates, so two streams must not use them at once.
    Replays of a graph are not seen here; the caller orders them.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, torch.cuda.Stream] = {}

    def next(self, device: torch.device, use: Hashable) -> int:
        """The handle of the current stream, after it was made to wait for the stream of the last call of this use.

        Different uses do not wait for each other.
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
    """Raise an error if the current stream of a GPU is being captured into a graph. `why` also says what to do."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(f"{operation}: a stream is being captured into a graph, and {why}")


class _Retained:
    """An object that only work on these streams still uses."""

    __slots__ = ("events", "streams", "thing")

    def __init__(self, thing: object, streams: list[Any]) -> None:
        self.thing = thing
        self.streams = streams  # those that were being captured: an event would become part of the graph
        self.events: list[Any] = []

    def is_over(self) -> bool:
        """Whether the streams are done with it. Streams that are being captured are asked again later."""
        captured = []
        for stream in self.streams:
            if _is_captured(stream):
                captured.append(stream)
                continue
            self.events.append(stream.record_event())
        self.streams = captured
        self.events = [event for event in self.events if not event.query()]
        return not self.streams and not self.events

    def synchronize(self) -> None:
        """Wait for the streams, as far as they were not being captured."""
        for event in list(self.events):
            event.synchronize()


_draining = threading.local()  # its attribute `now`: this thread is in `drain`


def _is_captured(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


class StreamGuardedRef(Uncopied):
    """A reference to an object that is kept, after this reference has ended, until the streams are done with it.

    The current stream of `device` may use the object from now on.
    """

    __slots__ = ("_pid", "_retained", "_stream", "_thing")

    def __init__(self, thing: object, device: torch.device) -> None:
        self._thing = thing
        self._retained = current_context().retained
        self._stream = torch.cuda.current_stream(device)
        self._pid = os.getpid()

    def __del__(self) -> None:
        if hasattr(self, "_pid") and not sys.is_finalizing() and self._pid == os.getpid():
            _retain(self._thing, self._stream, self._retained)


def _retain(thing: object, stream: Any, retained: deque[Retained]) -> None:
    here = torch.cuda.current_stream(stream.device)
    retained.append(_Retained(thing, [stream] if here.cuda_stream == stream.cuda_stream else [stream, here]))
    drain()


def drain() -> None:
    """Release objects that the streams are done with. Only those of this rank: another rank may wait for this one."""
    retained = current_context().retained
    # A query of an event would end a capture.
    if getattr(_draining, "now", False) or not retained or torch.cuda.is_current_stream_capturing():
        return
    _draining.now = True  # the release of one object may end others
    try:
        for _ in range(len(retained)):
            try:
                each = retained.popleft()
            except IndexError:  # another thread was faster
                return
            if not each.is_over():
                retained.append(each)
    finally:
        _draining.now = False


def wait() -> bool:
    """Wait until the streams are done with all retained objects, and release these. Returns whether there were any."""
    retained = list(current_context().retained)
    for each in retained:
        each.synchronize()
    drain()
    return bool(retained)


# ---- storages at addresses ----

_CUDA, _UNSIGNED = 2, 1  # kDLCUDA, kDLUInt


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor, followed by the shape that it points to."""

    _fields_ = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("length", ctypes.c_int64 * 1),
    ]


_held: dict[int, tuple[_Managed, object]] = {}  # by the address of the struct


def _release(managed: int) -> None:
    _held.pop(managed, None)


_deleter = _Deleter(_release)
_capsule: Any = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = b"dltensor"  # kept alive here: a capsule does not copy its name


def storage_at(address: int, nbytes: int, device: torch.device, owner: object) -> torch.UntypedStorage:
    """A storage over at least one byte of memory, at its address on a GPU. It releases `owner` when it ends."""
    managed = _Managed()
    managed.length[0] = nbytes
    tensor = managed.tensor
    tensor.data, tensor.device.type, tensor.device.index = address, _CUDA, device.index
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = 1, _UNSIGNED, 8, 1
    tensor.shape = managed.length
    managed.deleter = _deleter
    struct = ctypes.addressof(managed)
    _held[struct] = (managed, owner)
    try:
        return torch.utils.dlpack.from_dlpack(_capsule(struct, _NAME, None)).untyped_storage()
    except BaseException:
        _held.pop(struct, None)
        raise


def tensor_of(
    storage: torch.UntypedStorage, dtype: torch.dtype, shape: tuple[int, ...], steps: tuple[int, ...] = ()
) -> torch.Tensor:
    """A tensor at the start of a storage; without strides a contiguous one."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, shape, steps)


# ---- multicast ----

_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h


def has_multicast_support(device_type: Any, device_idx: int) -> bool:
    """Whether a device supports multicast. Host memory does not. Not collective.

    For a GPU this is what the driver says of that GPU alone; `multicast_ptr` of a handle tells whether the GPUs of the
    ranks are connected so.

    Args:
        device_type: "cpu" or "cuda", or torch's DeviceType.
        device_idx: Index of the GPU.
    """
    if not str(device_type).lower().endswith("cuda"):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, answer = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), int(device_idx)) != 0:
        return False
    asked = driver.cuDeviceGetAttribute(ctypes.byref(answer), _MULTICAST_SUPPORTED, device)
    return bool(asked == 0 and answer.value != 0)
