"""Writes of 32-bit words of a tensor, on the stream: ordered with the other work of this rank."""

import torch

from phalanx.core import InvalidArgumentError
from phalanx.symm_mem._ops._common import op

_LARGEST = (1 << 32) - 1


def _checked(operation: str, tensor: torch.Tensor, offset: int, count: int, value: int) -> torch.Tensor:
    """The words of a contiguous tensor, as int32."""
    if not tensor.is_contiguous() or tensor.dtype not in (torch.uint32, torch.int32, torch.float32):
        raise InvalidArgumentError(
            f"{operation}: the tensor must be contiguous and have elements of 32 bits; it is {list(tensor.shape)} of "
            f"{tensor.dtype} with strides {list(tensor.stride())}"
        )
    if offset < 0 or count < 0 or offset + count > tensor.numel():
        raise InvalidArgumentError(
            f"{operation}: offset is {offset} and count {count}, and the tensor has {tensor.numel()} words; the words "
            "must be inside"
        )
    if not -(1 << 31) <= value <= _LARGEST:
        raise InvalidArgumentError(f"{operation}: val is {value}; it must fit into 32 bits")
    return tensor.view(-1).view(torch.int32)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


@op("stream_write_value32_(Tensor(a!) input, int offset, int val) -> Tensor(a!)")
def stream_write_value32_(tensor: torch.Tensor, offset: int, val: int) -> torch.Tensor:
    _checked("stream_write_value32_", tensor, offset, 1, val)[offset] = _signed(val)
    return tensor


@op("memset32_(Tensor(a!) input, int offset, int val, int count) -> Tensor(a!)")
def memset32_(tensor: torch.Tensor, offset: int, val: int, count: int) -> torch.Tensor:
    _checked("memset32_", tensor, offset, count, val)[offset : offset + count] = _signed(val)
    return tensor
