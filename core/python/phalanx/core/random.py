"""Random elements of tensors that are in pieces: element i is a function of a key and of i alone (Philox4x32-10).

    box = Box(20, (3, 10), (10, 1), (10, 1))        # rows 2 to 4 of an [8, 10] tensor, into memory without gaps
    fill(address, DType.FLOAT32, Kind.NORMAL, 0.0, 1.0, key, box)

Every piece of a tensor, filled with one key, has the values that the whole would have, on every processor.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from phalanx.core._call import c_stream
from phalanx.core._lib import ffi, lib
from phalanx.core.dtypes import DType
from phalanx.core.errors import InvalidArgumentError, check
from phalanx.core.memory import Device, c_device, device_of


class Kind(IntEnum):
    """What elements are; `a` and `b` are the arguments of `fill`."""

    BITS = 1  # integers of 32 or 64 bits
    UNIFORM = 2  # floats in [a, b)
    NORMAL = 3  # floats; mean a, standard deviation b
    EXPONENTIAL = 4  # floats above 0; rate a
    BERNOULLI = 5  # any real type; 1 with probability a, else 0
    CAUCHY = 6  # floats; median a, scale b
    LOG_NORMAL = 7  # floats; exp of normal ones


class Box:
    """Which elements of a tensor are filled, and where they go. May be kept and used again, by several threads.

    The element at position p is element first + sum(p * index_strides) of the tensor, in row-major order, and goes
    sum(p * out_strides) elements after the address.

    Args:
        first: The index of the first element.
        sizes: The size of each dim of the box; at most 64 dims.
        index_strides: For each dim, how much further in the tensor the next element is.
        out_strides: For each dim, how much further in memory the next element is, in elements.

    Raises:
        InvalidArgumentError: The three are not of one length.

    Example:
        >>> column = Box(1, (3,), (10,), (1,))  # the elements 1, 11 and 21 of an [8, 10] tensor
    """

    __slots__ = ("_for_c",)

    def __init__(
        self, first: int, sizes: Sequence[int], index_strides: Sequence[int], out_strides: Sequence[int]
    ) -> None:
        if not len(sizes) == len(index_strides) == len(out_strides):
            raise InvalidArgumentError(
                f"Box: sizes {tuple(sizes)}, index_strides {tuple(index_strides)} and out_strides {tuple(out_strides)} "
                "must have one number for each dim"
            )
        lists = (ffi.new("int64_t[]", list(numbers)) for numbers in (sizes, index_strides, out_strides))
        self._for_c = (first, len(sizes), *lists)


def fill(
    address: int,
    dtype: DType | int,
    kind: Kind | int,
    a: float,
    b: float,
    key: int,
    box: Box,
    *,
    device: Device | None = None,
    stream: int = 0,
) -> None:
    """Fill a box of a tensor. Not collective; other Python threads run meanwhile.

    Args:
        address: Where the first element of the box goes; must be writable memory for all of it.
        dtype: The element type.
        kind: What the elements are.
        a: As the kind says; rounded to the element type where that matters.
        b: As the kind says; rounded as `a` is.
        key: 64 bits, unsigned. Take another one for each tensor.
        box: Which elements, and where to.
        device: Where the memory is; None is the host. The bits are the same everywhere.
        stream: The stream of a GPU: a CUstream as an integer; 0 is the default stream. The call puts a kernel on it
            and returns.

    Raises:
        InvalidArgumentError: An argument makes no sense (a > b, a negative standard deviation, p above 1).
        UnsupportedError: The kind is not available for this type.

    Example:
        >>> whole, end = array("f", [0] * 4), array("f", [0] * 2)
        >>> fill(whole.buffer_info()[0], DType.FLOAT32, Kind.UNIFORM, 0.0, 1.0, 42, Box(0, (4,), (1,), (1,)))
        >>> fill(end.buffer_info()[0], DType.FLOAT32, Kind.UNIFORM, 0.0, 1.0, 42, Box(2, (2,), (1,), (1,)))
        >>> end == whole[2:]
        True
    """
    where, pointer = _c_device(device), ffi.cast("void *", address)
    check(lib.phx_random_fill_on(where, c_stream(stream), pointer, dtype, kind, a, b, key, *box._for_c))


def fill_integers(
    address: int,
    dtype: DType | int,
    low: int,
    count: int,
    key: int,
    box: Box,
    *,
    device: Device | None = None,
    stream: int = 0,
) -> None:
    """Fill a box of a tensor with integers of any real type. Not collective; other Python threads run meanwhile.

    Args:
        address: As for `fill`.
        dtype: As for `fill`; floats are rounded.
        low: The smallest integer.
        count: How many there are, from `low` on: 1 to 2^64.
        key, box, device, stream: As for `fill`.

    Raises:
        InvalidArgumentError: An argument makes no sense.
        UnsupportedError: The values are not available for this type.

    Example:
        >>> out = array("i", [0] * 4)
        >>> fill_integers(out.buffer_info()[0], DType.INT32, 0, 10, 42, Box(0, (4,), (1,), (1,)))
        >>> out
        array('i', [6, 4, 0, 3])
    """
    if not 1 <= count <= 1 << 64:
        raise InvalidArgumentError(f"fill_integers: count is {count}; it must be 1 to 2**64")
    where, pointer, number = _c_device(device), ffi.cast("void *", address), count & 0xFFFFFFFFFFFFFFFF
    check(lib.phx_random_integers_on(where, c_stream(stream), pointer, dtype, low, number, key, *box._for_c))


def _c_device(device: Device | None) -> Any:
    return ffi.NULL if device is None else c_device(device_of(device))
