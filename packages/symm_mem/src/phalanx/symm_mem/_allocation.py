"""Symmetric tensors: their size in bytes, how they are made, and when their memory is freed."""

import ctypes
from collections.abc import Sequence
from typing import Any, overload

import torch

from phalanx.core import InvalidArgumentError, Memory, MemoryInfo, UnsupportedError
from phalanx.core.uncopied import Uncopied
from phalanx.symm_mem import _cuda
from phalanx.symm_mem._allocators import get_allocator
from phalanx.symm_mem._state import Allocation, Allocator, RankContext, current

_INT64_MAX = 2**63 - 1
_DEVICE_TYPES = ("cpu", "cuda")


class _BlockOwner(Uncopied):
    """Owned by a storage: frees the block when the storage ends, on any thread."""

    __slots__ = ("_allocations", "_allocator", "_guard", "_memory")

    def __init__(self, allocations: dict[int, Allocation], allocator: Allocator, memory: Memory) -> None:
        self._allocations = allocations
        self._allocator = allocator
        self._memory = memory
        # Streams may still use a block of a GPU, and the mappings of its handles. A persistent block stays anyway.
        self._guard: _cuda.StreamGuardedRef | None = None
        if memory.device[0] == "cuda" and memory.alloc_id is None:
            known = allocations.get(memory.address)
            self._guard = _cuda.StreamGuardedRef((memory, known), torch.device(*memory.device))

    def __del__(self) -> None:
        # Before the block is freed, as its address may be reused then.
        if self._memory.alloc_id is None:
            self._allocations.pop(self._memory.address, None)
        self._allocator.free(self._memory)


@overload
def empty(*size: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor: ...


@overload
def empty(
    size: Sequence[int], /, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> torch.Tensor: ...


def empty(*size: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
    """Like `torch.empty`, in memory that other ranks can map after `rendezvous`. Not collective.

    As `torch.distributed._symmetric_memory.empty`; the memory is zeroed. On a GPU it is for work on the stream that is
    current at the call: work of other streams must be complete, or ordered before that stream, when the tensor ends.

    Args:
        size: The shape, as several integers or as one sequence.
        dtype: None is torch's default dtype.
        device: "cpu" or "cuda"; None is torch's default device.

    Returns:
        A contiguous tensor. Its memory is freed when it and all views of it are gone.

    Raises:
        InvalidArgumentError: The size is wrong or too large.
        UnsupportedError: The device type has no allocator.
        OutOfMemoryError: There is not enough memory.

    Example:
        >>> tensor = empty(2, 3)
        >>> tensor, is_symm_mem_tensor(tensor)
        (tensor([[0., 0., 0.],
                [0., 0., 0.]]), True)
    """
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    stride, elements = [], 1
    for length in reversed(shape):
        stride.append(elements)
        elements *= length if isinstance(length, int) and length > 1 else 1
    return empty_strided_p2p(
        shape,
        stride[::-1],
        torch.get_default_dtype() if dtype is None else dtype,
        torch.get_default_device() if device is None else device,
    )


def empty_strided_p2p(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    group_name: str | None = None,
    alloc_id: int | None = None,
) -> torch.Tensor:
    """Like `torch.empty_strided`, in memory that other ranks can map after `rendezvous`. Not collective.

    As `_SymmetricMemory.empty_strided_p2p` of torch, except that the storage spans all elements that the strides reach,
    not just the number of elements, and that new memory is zeroed.

    With an alloc id the memory is persistent: it is retained when the tensor ends, and the next call with the same id,
    group name and device returns memory at the same address, with its contents and its handles, without another
    rendezvous. `drop` frees it.

    Args:
        size: The shape.
        stride: The strides in elements, one for each dim.
        dtype: The dtype of the elements.
        device: "cpu" or "cuda"; without an index, the current GPU.
        group_name: The default group of `rendezvous` for this tensor. It need not exist yet.
        alloc_id: 0 to 2^64 - 1; None for memory that is freed with the tensor.

    Returns:
        A tensor with this shape and these strides.

    Raises:
        InvalidArgumentError: The size, a stride or the alloc id is wrong.
        InUseError: The storage of the previous tensor with this alloc id is alive; views count.
        MismatchError: The alloc id was used with another number of bytes; the text gives both.
        UnsupportedError: The device type has no allocator.
        OutOfMemoryError: There is not enough memory.

    Example:
        >>> empty_strided_p2p((2, 3), (1, 2), torch.float32, "cpu").stride()
        (1, 2)
    """
    shape, steps, nbytes = layout_of("empty_strided_p2p", size, stride, dtype)
    place = torch.device(device)
    allocator = get_allocator(place.type)
    if place.type not in _DEVICE_TYPES:
        raise UnsupportedError(f"empty_strided_p2p: tensors can be on 'cpu' and 'cuda', not on {place.type!r}")
    place = with_index(place)
    _cuda.refuse_capture("empty_strided_p2p", place, "memory cannot be allocated during a capture; call it before")
    context = current()
    memory = allocator.alloc(context.world, nbytes, place, group_name, alloc_id)
    storage = _storage_of(context, allocator, memory, group_name)
    return _cuda.tensor_of(storage, dtype, shape, steps)


def drop(alloc_id: int, group_name: str | None = None, device: torch.device | str = "cpu") -> None:
    """Free the memory of an alloc id. Not collective.

    Handles and peers keep their mappings of it. For memory of a GPU, the call waits for the current stream.

    Args:
        alloc_id, group_name, device: As in `empty_strided_p2p`.

    Raises:
        InUseError: A tensor of it is alive.
        NotFoundError: There is no such allocation.

    Example:
        >>> tensor = empty_strided_p2p((4,), (1,), torch.float32, "cpu", alloc_id=7)
        >>> del tensor  # its memory stays
        >>> drop(7)
    """
    context, place = current(), with_index(torch.device(device))
    key = (place.type, place.index or 0)
    if place.type == "cuda":
        torch.cuda.current_stream(place).synchronize()
    dropped = [
        allocation
        for allocation in list(context.allocations.values())
        if (allocation.alloc_id, allocation.group_name, allocation.device) == (alloc_id, group_name, key)
    ]
    context.world.drop(alloc_id, scope=group_name, device=key)
    with context.lock:  # by now the address may be that of another block
        for allocation in dropped:
            if context.allocations.get(allocation.address) is allocation:
                del context.allocations[allocation.address]


def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or the tensor that it is a view of, is symmetric memory of this rank. Not collective.

    Args:
        tensor: Any tensor.

    Raises:
        InvalidArgumentError: The argument is not a tensor.

    Example:
        >>> is_symm_mem_tensor(empty(4)[1:]), is_symm_mem_tensor(torch.empty(4))
        (True, False)
    """
    return find(tensor, "is_symm_mem_tensor") is not None


def find(tensor: torch.Tensor, operation: str) -> tuple[Allocation, int] | None:
    """The allocation that a tensor lies in, and the tensor's offset in it in bytes."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"{operation}: tensor is a {type(tensor).__name__}; give a torch.Tensor")
    try:  # not data_ptr(): that of a tensor without elements is 0
        address = tensor.untyped_storage().data_ptr()
        offset = int(tensor.storage_offset()) * tensor.element_size()
    except (RuntimeError, NotImplementedError):  # sparse, fake and other tensors without a storage
        return None
    context = current()
    if address == 0 or tensor.device.type not in _DEVICE_TYPES:
        return None
    if not context.allocations and context.segment_number is None:
        return None
    allocation = context.allocations.get(address)
    if allocation is None:  # perhaps a storage that starts inside a block, as those of numpy and of torch's pools
        block = context.world.find(address)
        if block is None or not block.live:
            return None
        allocation = context.allocations.get(block.address) or _segment(context, block)
        if allocation is None:
            return None
    return allocation, address + offset - allocation.address


def _segment(context: RankContext, block: MemoryInfo) -> Allocation | None:
    """The segment of a memory pool on a GPU at this block, if there is one."""
    number_of = context.segment_number
    number = 0 if number_of is None else number_of(block.address)
    if number_of is None or number == 0:
        return None
    with context.lock:
        known = context.segments.get(block.address)
        if known is None or known[0] != number:
            for address, (its_number, _) in list(context.segments.items()):
                if number_of(address) != its_number:  # torch has freed it, so its handles are gone
                    del context.segments[address]
            known = (number, Allocation(block.address, block.size, block.device, None, None))
            context.segments[block.address] = known
    return known[1]


def with_index(device: torch.device) -> torch.device:
    """The device; for a GPU without an index, the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        numbers = tuple(value.__index__() for value in values)
    except (AttributeError, TypeError):
        raise InvalidArgumentError(f"{name} is {values!r}; give a sequence of integers") from None
    if any(number < 0 for number in numbers):
        raise InvalidArgumentError(f"{name} is {list(numbers)}; negative values are not allowed")
    return numbers


def layout_of(
    operation: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The shape and strides, checked, and the bytes up to the end of the last element that the strides reach."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"{operation}: dtype is {dtype!r}; give a torch.dtype")
    shape, steps = integers(f"{operation}: size", size), integers(f"{operation}: stride", stride)
    if len(shape) != len(steps):
        raise InvalidArgumentError(
            f"{operation}: size {list(shape)} has {len(shape)} dims and stride {list(steps)} has {len(steps)} entries; "
            "give one stride for each dim"
        )
    if 0 in shape:
        nbytes = 0
    else:
        last = sum((length - 1) * step for length, step in zip(shape, steps, strict=True))
        nbytes = (last + 1) * dtype.itemsize
    if nbytes > _INT64_MAX or any(number > _INT64_MAX for number in (*shape, *steps)):
        raise InvalidArgumentError(
            f"{operation}: size {list(shape)} with stride {list(steps)} of {dtype} needs {nbytes} bytes, more than the "
            f"largest size, {_INT64_MAX} bytes"
        )
    return shape, steps, nbytes


def _storage_of(
    context: RankContext, allocator: Allocator, memory: Memory, group_name: str | None
) -> torch.UntypedStorage:
    """A storage over a block, which it keeps alive."""
    allocation = Allocation(memory.address, memory.size, memory.device, group_name, memory.alloc_id)
    with context.lock:
        known = context.allocations.get(memory.address)
        if known is None or known.alloc_id is None or known.alloc_id != memory.alloc_id:
            context.allocations[memory.address] = allocation
        # Otherwise it is a persistent block, which keeps its handles.
    owner = _BlockOwner(context.allocations, allocator, memory)
    # torch refuses empty buffers, so a storage without bytes claims the first byte of its block, which is never used.
    nbytes = max(memory.size, 1)
    if memory.device[0] == "cuda":
        return _cuda.storage_at(memory.address, nbytes, torch.device(*memory.device), owner)
    array = (ctypes.c_char * nbytes).from_address(memory.address)
    array.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
