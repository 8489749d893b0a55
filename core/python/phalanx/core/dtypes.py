"""Data types, reductions and algorithms: the numbers of phalanx.h and their names."""

from enum import IntEnum
from typing import TypeAlias, TypeVar

from phalanx.core.errors import InvalidArgumentError


class DType(IntEnum):
    """An element type. Wherever one is asked for, its name in lower case works too."""

    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT32 = 3
    FLOAT64 = 4
    INT8 = 5
    UINT8 = 6
    INT16 = 7
    UINT16 = 8
    INT32 = 9
    UINT32 = 10
    INT64 = 11
    UINT64 = 12
    BOOL = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    FLOAT8_E4M3FN = 16
    FLOAT8_E5M2 = 17

    _itemsize: int  # set below; a plain attribute, because every collective reads it

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._itemsize


class ReduceOp(IntEnum):
    """A reduction. Wherever one is asked for, its name in any case works too."""

    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    PREMUL_SUM = 9


DTypeLike: TypeAlias = DType | int | str | None  # None: what the buffers say
ReduceOpLike: TypeAlias = ReduceOp | int | str


class Algo(IntEnum):
    """How a collective runs. AUTO chooses by size, in the same way on all ranks.

    MULTIMEM wants NVLink switches, on symmetric memory of GPUs: the bits of sums of floats are then the same on all
    ranks, but not always those of the host, nor those of the call before.
    """

    AUTO = 0
    ONE_SHOT = 1
    TWO_SHOT = 2
    MULTIMEM = 3


ANY_RANK = -1  # for receives: whoever sends

for _dtype, _bytes in zip(DType, (2, 2, 4, 8, 1, 1, 2, 2, 4, 4, 8, 8, 1, 8, 16, 1, 1), strict=True):
    _dtype._itemsize = _bytes

# Keys are names and numbers, so that the common case is one lookup.
_DTYPES: dict[object, DType] = {key: t for t in DType for key in (t.name.lower(), int(t))}
_OPS: dict[object, ReduceOp] = {key: op for op in ReduceOp for key in (op.name.lower(), int(op))}
_OPS["prod"] = ReduceOp.PRODUCT
_ALGOS: dict[object, Algo] = {key: a for a in Algo for key in (a.name.lower(), int(a))}

# Format characters of the buffer protocol (native sizes). No entry for bytes, which are typeless.
_FORMATS = {
    "?": DType.BOOL,
    "h": DType.INT16,
    "H": DType.UINT16,
    "i": DType.INT32,
    "I": DType.UINT32,
    "l": DType.INT64,
    "L": DType.UINT64,
    "q": DType.INT64,
    "Q": DType.UINT64,
    "e": DType.FLOAT16,
    "f": DType.FLOAT32,
    "d": DType.FLOAT64,
    "Zf": DType.COMPLEX64,
    "Zd": DType.COMPLEX128,
}

_Choice = TypeVar("_Choice", bound=IntEnum)


def _choose(table: dict[object, _Choice], wish: object, what: str) -> _Choice:
    key = wish.lower() if isinstance(wish, str) else wish
    try:
        return table[key]
    except (KeyError, TypeError):
        *names, last = (name for name in table if isinstance(name, str))
        raise InvalidArgumentError(f"unknown {what} {wish!r}; expected {', '.join(names)} or {last}") from None


def dtype_of(wish: DType | int | str) -> DType:
    """The DType of a name ("float32") or number (PHX_DTYPE_F32).

    Raises:
        InvalidArgumentError: The type is unknown.
    """
    return _choose(_DTYPES, wish, "dtype")


def reduce_op_of(wish: ReduceOp | int | str) -> ReduceOp:
    """The ReduceOp of a name ("sum") or number (PHX_OP_SUM).

    Raises:
        InvalidArgumentError: The reduction is unknown.
    """
    return _choose(_OPS, wish, "reduce op")


def algo_of(wish: Algo | int | str) -> Algo:
    """The Algo of a name ("one_shot") or number (PHX_ALGO_ONE_SHOT).

    Raises:
        InvalidArgumentError: The algorithm is unknown.
    """
    return _choose(_ALGOS, wish, "algorithm")


def dtype_of_format(code: str) -> DType | None:
    """The DType of a buffer's format character; None for bytes and for what has no counterpart."""
    return _FORMATS.get(code.lstrip("@="))
