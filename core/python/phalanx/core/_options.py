"""phx_options from keyword arguments."""

from typing import Any

from phalanx.core._handle import UINT32_MAX, UINT64_MAX, c_integer, c_timeout
from phalanx.core._lib import ffi
from phalanx.core.dtypes import Algo, algo_of

_SIZE = ffi.sizeof("phx_options")


def options(algo: Algo | int | str, channel: int, timeout_ms: int, scale: float = 1.0, stream: int = 0) -> Any:
    """A phx_options pointer; NULL when all is default."""
    if algo is Algo.AUTO and timeout_ms == 0 and scale == 1.0 and channel == 0 and stream == 0:
        return ffi.NULL
    made = ffi.new("phx_options *")
    made.struct_size = _SIZE
    made.algo = algo_of(algo)
    made.channel = c_integer(channel, "channel", 0, UINT32_MAX)
    made.timeout_ms = c_timeout(timeout_ms)
    made.scale = scale
    made.stream = ffi.cast("void *", c_integer(stream, "stream", 0, UINT64_MAX))
    return made
