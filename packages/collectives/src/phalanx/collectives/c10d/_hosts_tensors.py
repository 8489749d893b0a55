"""Memory as the tensors of the groups that span hosts, and what is reduced there in the place of what was given."""

import ctypes
from typing import Any

import torch

from phalanx.core import DType, ReduceOp, UnsupportedError

_DTYPES: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.name.lower()) for dtype in DType}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_TOP = -(1 << 63)


def as_dtype(dtype: DType | int | str) -> DType:
    """A DType by its name in lower case, or itself."""
    return DType[dtype.upper()] if isinstance(dtype, str) else DType(dtype)


def as_op(op: ReduceOp | int | str) -> ReduceOp:
    """A ReduceOp by its name in lower case, or itself."""
    return ReduceOp[op.upper()] if isinstance(op, str) else ReduceOp(op)


def name_of(dtype: DType) -> str:
    """As errors say it."""
    return dtype.name.lower()


def memory_at(address: int, nbytes: int, owner: Any) -> memoryview:
    """The bytes at an address, which keep their owner."""
    if nbytes == 0:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    memory.owner = owner
    return memoryview(memory).cast("B")


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, which they keep."""
    return memory_at(tensor.data_ptr(), tensor.nbytes, tensor)


def tensor_at(address: int, count: int, dtype: DType, owner: Any) -> torch.Tensor:
    """The elements at an address, which keep their owner."""
    found = _DTYPES[dtype]
    if count == 0:
        return torch.empty(0, dtype=found)
    return torch.frombuffer(memory_at(address, count * dtype.itemsize, owner), dtype=torch.uint8).view(found)


class Reduction:
    """A reduction, as one of those between hosts, which add with torch: it adds no unsigned integers but bytes.

    Args:
        what: The collective, for errors.
        dtype: Of the elements.
        op: The reduction.
        scale: Of "premul_sum".

    Attributes:
        name: That of the reduction which takes its place.

    Raises:
        UnsupportedError: It is not defined for them, here or anywhere.
    """

    def __init__(self, what: str, dtype: DType, op: ReduceOp, scale: float) -> None:
        kind = _DTYPES[dtype]
        floats, is_bool = kind.is_floating_point or kind.is_complex, kind == torch.bool
        undefined = (
            (op in _BITWISE and floats)
            or (op in (ReduceOp.MIN, ReduceOp.MAX) and kind.is_complex)
            or (op == ReduceOp.AVG and is_bool)
            or (op == ReduceOp.PREMUL_SUM and not floats)
        )
        if undefined:
            raise UnsupportedError(f"{what}: {op.name.lower()} is not defined for {name_of(dtype)}")
        if op == ReduceOp.AVG and kind == torch.uint64:
            raise UnsupportedError(f"{what}: avg of uint64 is not there for groups on several hosts; use another dtype")
        self.name = "sum" if op == ReduceOp.PREMUL_SUM else op.name.lower()
        self._scale = scale if op == ReduceOp.PREMUL_SUM else None
        self._kind = kind
        # The order of unsigned integers is that of signed ones whose top bit is the other way.
        self._turned = kind == torch.uint64 and op in (ReduceOp.MIN, ReduceOp.MAX)

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is reduced in the place of a tensor."""
        if self._kind in (torch.uint16, torch.uint32):
            return tensor.to(torch.int64)
        if self._kind == torch.uint64:
            signed = tensor.view(torch.int64)
            return signed ^ _TOP if self._turned else signed
        if self._scale is not None:
            return (tensor.float() if self._kind in _NARROW else tensor) * self._scale
        return tensor

    def take(self, done: torch.Tensor, out: torch.Tensor) -> None:
        """Write what came of it to where the result belongs."""
        if self._kind == torch.uint64:
            done = (done ^ _TOP if self._turned else done).view(torch.uint64)
        out.copy_(done.view(out.shape))
