"""phx_options from keyword arguments."""

from typing import Any

from phalanx.core._handle import UINT32_MAX, UINT64_MAX, c_integer, c_timeout
from phalanx.core._lib import ffi
from phalanx.core.dtypes import Algo, algo_of
from phalanx.core.memory import Device, c_device, device_of

_SIZE = ffi.sizeof("phx_options")


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
    made.stream = c_stream(stream)
    if device is not None:
        made.device = c_device(device_of(device))[0]
    return made
