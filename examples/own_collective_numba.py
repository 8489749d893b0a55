"""The ring of own_collective.cpp as a kernel in numba. own_collective.py calls it; `pip install numba` brings it.

device.h is C, so its two functions on words are written again: a word that is a signal is written with release and read
with acquire. The rest is ordinary numba on arrays that are the memory of other ranks.
"""

import os
import sys
import time
from typing import Any

try:
    import numba
    from numba.core import types
    from numba.extending import intrinsic
except ImportError:
    if __name__ != "__main__":
        raise
    print("this example needs numba (pip install numba)")
    sys.exit()

import torch

from phalanx import symm_mem

CHANNEL = 8  # no other kernel of own_collective.py uses it
Generated = tuple[Any, Any]


# [words]
@intrinsic
def word_put(typing_context: Any, pad: Any, index: Any, value: Any) -> Generated:
    """pad[index] = value. Whoever sees it with word_get sees all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        builder.store_atomic(arguments[2], builder.gep(array.data, [arguments[1]]), "release", 4)
        return context.get_dummy_value()

    return types.void(pad, types.intp, types.uint32), generate


@intrinsic
def word_get(typing_context: Any, pad: Any, index: Any) -> Generated:
    """pad[index]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load_atomic(builder.gep(array.data, [arguments[1]]), "acquire", 4)

    return types.uint32(pad, types.intp), generate


# [words end]
# [kernel]
@numba.njit
def wait(pad: Any, index: int, count: int, timeout_ns: int) -> bool:
    """Whether pad[index] has come to `count` in time. A difference of counts is meant modulo 2^32."""
    begun, looks = 0, 0
    while (numba.uint32(word_get(pad, index)) - count) & 0x80000000:
        looks += 1
        if looks & 1023 == 0:
            with numba.objmode(now="int64"):
                os.sched_yield()
                now = time.monotonic_ns()
            if begun == 0:
                begun = now
            if now - begun > timeout_ns:
                return False
    return True


@numba.njit
def ring(
    mine: Any, theirs: Any, my_pad: Any, their_pad: Any, rank: int, stride: int, channel: int, timeout_ns: int
) -> int:
    """0, or 1 + the rank that is late."""
    size = len(mine)
    left = (rank - 1) % size
    count = word_get(their_pad, rank * stride + channel)
    for step in range(size - 1):
        part = (rank - step) % size
        theirs[part] = mine[part]
        count += 1
        word_put(their_pad, rank * stride + channel, count)
        if not wait(my_pad, left * stride + channel, count, timeout_ns):
            return 1 + left
    return 0


def gather(handle: symm_mem.SymmetricMemory, x: torch.Tensor) -> None:
    right = (handle.rank + 1) % handle.world_size
    theirs = handle.get_buffer(right, x.shape, x.dtype)
    pads = handle.get_signal_pad(handle.rank), handle.get_signal_pad(right)
    handle.barrier()  # nobody reads the result of the last time any more
    arrays = [each.numpy() for each in (x, theirs, *pads)]
    late = ring(*arrays, handle.rank, handle.symm.pad_stride, CHANNEL, 60 * 10**9)
    if late:
        raise RuntimeError(f"rank {late - 1} is late")


# [kernel end]
if __name__ == "__main__":
    print("own_collective.py calls it")
