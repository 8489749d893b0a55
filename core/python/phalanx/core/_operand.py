"""What collectives accept as input and output: addresses, Memory, and objects with a buffer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from phalanx.core._handle import UINT64_MAX, c_integer
from phalanx.core._lib import ffi
from phalanx.core.dtypes import DType, dtype_of, dtype_of_format
from phalanx.core.errors import InvalidArgumentError
from phalanx.core.memory import Memory

_VOID = ffi.typeof("void *")

# bfloat16 has no format character: arrays of it are seen as 16-bit integers. Those of 8-bit floats are plain bytes.
_SAME_BITS = {(DType.UINT16, DType.BFLOAT16), (DType.INT16, DType.BFLOAT16)}


class Operand(NamedTuple):
    """One side of a collective.

    Attributes:
        pointer: For C.
        nbytes: Its length, or None for a bare address.
        dtype: What the buffer says its elements are, or None.
        keep: What must stay alive while C uses the pointer, or None.
    """

    pointer: Any
    nbytes: int | None
    dtype: DType | None
    keep: object


# The side of a collective that this rank has no part in.
ABSENT = Operand(ffi.NULL, None, None, None)


def operand(value: Any, name: str, writable: bool) -> Operand:
    """Read one side of a collective.

    Args:
        value: An address (int), a Memory, or an object with the buffer protocol.
        name: Of the argument, for error texts.
        writable: Whether C will write to it.

    Raises:
        InvalidArgumentError: It is none of these, not contiguous, or read-only but written to.
    """
    if type(value) is int and 0 <= value <= UINT64_MAX:
        return Operand(ffi.cast(_VOID, value), None, None, None)
    if isinstance(value, Memory):
        return Operand(_address(value.address, name), value.size, None, value)
    try:
        seen = memoryview(value)
    except TypeError:
        return Operand(_address(value, name), None, None, None)
    except (BufferError, ValueError) as error:
        raise InvalidArgumentError(
            f"{name} does not give its buffer ({error}); give a view of it as integers of the same size, and dtype"
        ) from None
    with seen:
        if not seen.c_contiguous:
            raise InvalidArgumentError(
                f"{name} is not contiguous (shape {seen.shape}, strides {seen.strides}); make a contiguous copy of it"
            )
        if writable and seen.readonly:
            raise InvalidArgumentError(f"{name} is read-only; give a writable buffer")
        nbytes, dtype = seen.nbytes, dtype_of_format(seen.format)
    chars = ffi.from_buffer("char[]", value, require_writable=writable)
    pointer = ffi.cast(_VOID, chars)
    if isinstance(value, memoryview):
        # CPython crashes when garbage holds a memoryview that is still exported, and what fails
        # here ends up in tracebacks, which are garbage soon. A memoryview pins its object itself.
        ffi.release(chars)
        return Operand(pointer, nbytes, dtype, value)
    return Operand(pointer, nbytes, dtype, chars)


def _address(value: Any, name: str) -> Any:
    try:
        address = c_integer(value, name, 0, UINT64_MAX)
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f"{name} is {value!r}; give an address (int), a Memory, or a contiguous object with "
            "the buffer protocol (numpy array, bytearray, memoryview)"
        ) from None
    return ffi.cast(_VOID, address)


def resolve_dtype(wish: DType | int | str | None, operands: Sequence[Operand]) -> DType:
    """The element type of a collective: the one given, else the one that the buffers have.

    Raises:
        InvalidArgumentError: Neither is there, or they contradict each other.
    """
    dtype = None if wish is None else dtype_of(wish)
    for each in operands:
        if each.dtype is None:
            continue
        if dtype is None:
            dtype = each.dtype
        elif each.dtype != dtype and (each.dtype, dtype) not in _SAME_BITS:
            raise InvalidArgumentError(
                f"dtype is {dtype.name.lower()}, but a buffer holds {each.dtype.name.lower()} "
                "elements; give buffers of one type, or views of their bytes"
            )
    if dtype is None:
        raise InvalidArgumentError("dtype is needed: addresses and plain bytes have none")
    return dtype


def resolve_count(wish: int | None, itemsize: int, sides: Sequence[tuple[str, Operand, int]]) -> int:
    """The element count of a collective: the one given, else the one that fills the buffers.

    Args:
        wish: Count given by the caller, or None.
        itemsize: Bytes of an element.
        sides: Name, operand, and how many times `count` elements it must hold.

    Raises:
        InvalidArgumentError: A buffer is too short, or the count cannot be derived.
    """
    if wish is None:
        if not sides:
            raise InvalidArgumentError("count is needed: this rank gives no buffer to derive it from")
        name, first, factor = sides[0]
        if first.nbytes is None:
            raise InvalidArgumentError(f"count is needed: {name} is a bare address")
        count, rest = divmod(first.nbytes, itemsize * factor)
        if rest:
            raise InvalidArgumentError(
                f"{name} has {first.nbytes} bytes, which is no multiple of {factor} x {itemsize} "
                "bytes; give count, or a buffer of fitting size"
            )
        for other_name, other, times in sides[1:]:
            if other.nbytes is not None and other.nbytes != count * times * itemsize:
                raise InvalidArgumentError(
                    f"{name} has {first.nbytes} bytes, so {other_name} must have "
                    f"{count * times * itemsize} bytes, not {other.nbytes}; give count, or buffers "
                    "of fitting sizes"
                )
        return count
    count = c_integer(wish, "count", 0, 2**63 - 1)
    for name, each, factor in sides:
        if each.nbytes is not None and count * factor * itemsize > each.nbytes:
            raise InvalidArgumentError(
                f"{name} has {each.nbytes} bytes, too few for {count * factor} elements of "
                f"{itemsize} bytes; give a smaller count or a longer buffer"
            )
    return count
