"""How the core reads tensors of torch: their memory, and the rows of phx_coalesced."""

import struct
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.collectives._async_tensor import AsyncCollectiveTensor
from phalanx.core import ffi

# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_of(tensor: torch.Tensor, on_gpus: bool = False) -> torch.Tensor | None:
    """A plain tensor of the same memory, or None where there is none for the core to read: other devices and classes.

    It may have strides. The result depends on the device and the class only, so it is the same on all ranks. With
    `on_gpus`, memory of a GPU counts, too.
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
_NAMES = "struct_size kind in out count dtype op root_group_rank flags"
assert [name for name, _ in ffi.typeof("phx_call").fields] == _NAMES.split()


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
    """The calls, given by what each reads and what it writes, with memory that another one also reads or writes."""
    found: set[int] = set()
    reach, owner = 0, -1
    for begin, end, _, call in _spans(pairs):
        if begin < reach and call != owner:
            found |= {call, owner}
        if end > reach:
            reach, owner = end, call
    return found


def check_overlaps(group: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Refuse calls if one writes memory that another reads or writes, because their order is not promised.

    Raises:
        ValueError: Two calls overlap.
    """
    reach: dict[bool, list[tuple[int, int]]] = {False: [], True: []}  # (end, call) of all, and of those that write
    for begin, end, writes, call in _spans(pairs):
        for other_end, other in reach[not writes]:
            if other_end > begin and other != call:
                first, second = sorted((other, call))
                raise ValueError(
                    f"coalescing_manager on group '{group}': the tensors of calls {first} and {second} (counted from "
                    "0) overlap in memory, and one call writes there. The order of calls in one manager is not "
                    "promised, so use separate tensors or two managers. Nothing was sent"
                )
        for kind in (False, True) if writes else (False,):
            reach[kind] = [each for each in reach[kind] if each[0] > begin] + [(end, call)]
