"""How the core reads tensors of torch: element types, reductions, memory, and the rows of phx_coalesced."""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from phalanx.collectives._async_tensor import AsyncCollectiveTensor
from phalanx.collectives._reductions import REDUCTIONS
from phalanx.core import DType, ReduceOp, UnsupportedError, ffi

# ---- element types ---------------------------------------------------------------------------------------------------


class ElementType(NamedTuple):
    """How the core sees elements of a torch dtype.

    Attributes:
        code: PHX_*.
        lanes: How many of the core's elements make one of torch's.
        reduces: "all" reductions, "sums" only, or "none": then they are moved as bytes.
    """

    code: int
    lanes: int
    reduces: str


_NUMBERS = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
_TYPES: dict[torch.dtype, ElementType] = {
    getattr(torch, name): ElementType(int(DType[name.upper()]), 1, "all") for name in (*_NUMBERS, "uint64", "bool")
}
for _complex, _half in (
    (torch.complex32, DType.FLOAT16),
    (torch.complex64, DType.FLOAT32),
    (torch.complex128, DType.FLOAT64),
):
    _TYPES[_complex] = ElementType(int(_half), 2, "sums")


def element_type(dtype: torch.dtype) -> ElementType:
    """How the core sees elements of a dtype."""
    found = _TYPES.get(dtype)
    if found is None:  # such as 8-bit floats
        found = _TYPES[dtype] = ElementType(int(DType.UINT8), dtype.itemsize, "none")
    return found


PLAIN_CODES = {dtype: each.code for dtype, each in _TYPES.items() if each.lanes == 1}  # whatever can be done with them

# Those without a factor, which a call has no place for.
PLAIN_REDUCTIONS = {name: number for name, number in REDUCTIONS.items() if number != ReduceOp.PREMUL_SUM}


def reduction_of(operation: str, name: str, dtype: torch.dtype) -> int:
    """The number of a reduction.

    Raises:
        ValueError: There is no such reduction, or it needs a factor.
        UnsupportedError: Not for this dtype.
    """
    number = REDUCTIONS.get(name) or REDUCTIONS.get(str(name).lower())
    if number is None:
        raise ValueError(f"Invalid reduce operation {name}")
    if number == ReduceOp.PREMUL_SUM:
        raise ValueError(
            f"{operation}: premul_sum needs a factor, which there is no argument for: multiply the input by it and use "
            "sum"
        )
    reduces = element_type(dtype).reduces
    if reduces == "all" or (reduces == "sums" and number in (ReduceOp.SUM, ReduceOp.AVG)):
        return number
    if reduces == "sums":
        raise UnsupportedError(
            f"{operation}: only sum and avg are defined for {dtype}; reduce torch.view_as_real(input) instead"
        )
    raise UnsupportedError(
        f"{operation}: a tensor of {dtype} can be moved but not reduced; convert it to float32 or bfloat16 first"
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_of(tensor: torch.Tensor, on_gpus: bool = False) -> torch.Tensor | None:
    """A plain tensor of the same memory, or None where there is none for the core to read: other devices and classes.

    It may have strides. Which of the two it is depends on the device and the class only, so on all ranks alike.

    Args:
        tensor: Any.
        on_gpus: Whether memory of a GPU counts, too.
    """
    if type(tensor) is not torch.Tensor:
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return None
        tensor = tensor.detach().as_subclass(torch.Tensor)
    if not (tensor.is_cpu or (on_gpus and tensor.is_cuda)) or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # of functorch, such as inside vmap
        return None
    return tensor if address or tensor.numel() == 0 else None


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The ordinary tensor of a pending one.

    Raises:
        RuntimeError: It is a result of a manager that is still open.
    """
    return tensor.trigger_wait() if type(tensor) is AsyncCollectiveTensor else tensor


# ---- rows ------------------------------------------------------------------------------------------------------------

# The fields of a phx_call, by their types in C. From Python, a list of numbers is packed ten times faster than structs
# are filled in.
_FIELDS = "IiPPNiiiI"
FIELDS = len(_FIELDS)
IN, OUT = 2, 3
SIZE = struct.calcsize("@" + _FIELDS)
assert ffi.sizeof("phx_call") == SIZE
assert [name for name, _ in ffi.typeof("phx_call").fields] == [
    "struct_size",
    "kind",
    "in",
    "out",
    "count",
    "dtype",
    "op",
    "root_group_rank",
    "flags",
]


def packed(rows: Sequence[int], count: int) -> Any:
    """`count` phx_calls from their fields, one after another."""
    return ffi.from_buffer("phx_call[]", struct.pack("@" + _FIELDS * count, *rows))


def _spans(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, int, bool, int]]:
    """Where what each call reads and writes begins and ends, whether it is written, and the call; by beginning."""
    spans: list[tuple[int, int, bool, int]] = []
    for call, (source, out) in enumerate(pairs):
        for tensor, writes in ((source, False), (out, True)):
            if tensor.numel() and memory_of(tensor, on_gpus=True) is not None:
                begin = tensor.data_ptr()
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                spans.append((begin, begin + (last + 1) * tensor.element_size(), writes, call))
    spans.sort(key=lambda span: span[0])
    return spans


def sharing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> set[int]:
    """The calls with memory that another one also reads or writes.

    Args:
        pairs: What each call reads, and what it writes.
    """
    found: set[int] = set()
    reach, owner = 0, -1
    for begin, end, _, call in _spans(pairs):
        if begin < reach and call != owner:
            found |= {call, owner}
        if end > reach:
            reach, owner = end, call
    return found


def check_overlaps(group: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Refuse calls one of which writes what another reads or writes: their order is not promised.

    Args:
        group: Its name.
        pairs: What each call reads, and what it writes.

    Raises:
        ValueError: Two overlap.
    """
    reach: dict[bool, list[tuple[int, int]]] = {False: [], True: []}  # (end, call) of all, and of those that write
    for begin, end, writes, call in _spans(pairs):
        for other_end, other in reach[not writes]:
            if other_end > begin and other != call:
                first, second = sorted((other, call))
                raise ValueError(
                    f"coalescing_manager on group '{group}': calls {first} and {second} overlap, and one writes there; "
                    "their order is not promised. Nothing was sent"
                )
        for kind in (False, True) if writes else (False,):
            reach[kind] = [each for each in reach[kind] if each[0] > begin] + [(end, call)]
