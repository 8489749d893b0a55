"""phx_options from keyword arguments."""

from typing import Any
from weakref import WeakKeyDictionary

from phalanx.core._handle import UINT32_MAX, UINT64_MAX, c_integer, c_timeout
from phalanx.core._lib import ffi
from phalanx.core.dtypes import Algo, algo_of
from phalanx.core.memory import Device, c_device, device_of

_SIZE = ffi.sizeof("phx_options")
_GPU_SIZE = ffi.sizeof("phx_gpu_options")
_kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # what phx_options points to, as long as they live


def c_stream(stream: int) -> Any:
    """A CUstream, given as an integer."""
    return ffi.cast("void *", c_integer(stream, "stream", 0, UINT64_MAX))


def options(
    algo: Algo | int | str,
    channel: int,
    timeout_ms: int,
    scale: float = 1.0,
    stream: int = 0,
    device: Device | None = None,
) -> Any:
    """A phx_options pointer; NULL when all is default."""
    if algo is Algo.AUTO and timeout_ms == 0 and scale == 1.0 and channel == 0 and stream == 0 and device is None:
        return ffi.NULL
    made = ffi.new("phx_options *")
    made.struct_size = _SIZE
    made.algo = algo_of(algo)
    made.channel = c_integer(channel, "channel", 0, UINT32_MAX)
    made.timeout_ms = c_timeout(timeout_ms)
    made.scale = scale
    if stream != 0 or device is not None:
        gpu = ffi.new("phx_gpu_options *")
        gpu.struct_size = _GPU_SIZE
        gpu.stream = c_stream(stream)
        if device is not None:
            gpu.device = c_device(device_of(device))[0]
        made.gpu = gpu
        _kept[made] = gpu
    return made
