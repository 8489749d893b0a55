"""Symmetric memory of GPUs beyond the host, by handles of the NVLink fabric."""

from collections.abc import Sequence

import torch

from phalanx.core import InvalidArgumentError, Memory, UnsupportedError
from phalanx.symm_mem import _device_memory, _streams
from phalanx.symm_mem._alloc import find, integers, storage_bytes, with_index
from phalanx.symm_mem._context import current


class _Mapping:
    """What a storage over another process's block holds: the mapping goes when the streams are through with it."""

    __slots__ = ("_until",)

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self._until = _streams.UsedOn(memory, device)


def export_fabric(tensor: torch.Tensor) -> bytes:
    """The memory that a symmetric tensor lies in, as bytes for a process on this host or another. Not collective.

    Send them by any means; `import_fabric` there makes a tensor of them. Whoever has the bytes can map the memory. They
    stand for the whole block, from its first byte on, and are of use until the last tensor in it is gone; what has been
    mapped by then stays. What is written before must be over, or ordered by the caller's own means, as there are no
    signals between such processes.

    Args:
        tensor: On a GPU, made by this package or in a memory pool of it; a view stands for its block.

    Returns:
        96 bytes.

    Raises:
        InvalidArgumentError: The tensor is not in symmetric memory of this rank.
        UnsupportedError: It is not on a GPU, or the GPU or its driver gives no such handles: the other GPU must be in
            the same NVLink domain, and both processes in an IMEX channel. The text says what is missing.
    """
    found = find(tensor)
    if found is None:
        raise InvalidArgumentError("the tensor is not in symmetric memory; allocate it with symm_mem.empty")
    return current().world.export_fabric(found[0].address)


def import_fabric(
    handle: bytes,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    storage_offset: int = 0,
) -> torch.Tensor:
    """A tensor over memory that another process has exported. Not collective.

    As with `empty`, it is for work on the stream that is current here; it is unmapped when it and all views of it are
    gone and the streams are through with it. It is not symmetric memory of this rank: no rendezvous takes it.

    Args:
        handle: What `export_fabric` gave there.
        size: The shape.
        stride: In elements, one for each dim.
        dtype: Of the elements.
        device: The GPU that will use it; without an index, the current one.
        storage_offset: Of the first element, in elements from the beginning of the block. That of a tensor which
            `empty` made is 0; that of a view is its `storage_offset()`.

    Returns:
        A tensor with this shape and these strides.

    Raises:
        InvalidArgumentError: `handle` is no such handle, or the tensor would not fit the block; the text gives both.
        UnsupportedError: The device is no GPU, or has no such handles; the text says what is missing.
        DeviceError: The driver does not map it; for one, because its owner has freed it.
    """
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"dtype is {dtype!r}; give a torch.dtype")
    shape, steps = integers("size", size), integers("stride", stride)
    (offset,) = integers("storage_offset", (storage_offset,))
    place = with_index(torch.device(device))
    if place.type != "cuda":
        raise UnsupportedError(f"import_fabric maps memory of GPUs, not on {place.type}")
    _streams.refuse_capture("import_fabric", place, "memory cannot be mapped then; do it before")
    nbytes = storage_bytes(shape, steps, dtype) + offset * dtype.itemsize
    memory = current().world.import_fabric(handle, (place.type, place.index))
    if nbytes > memory.size:
        raise InvalidArgumentError(
            f"size {list(shape)} with stride {list(steps)} of {dtype} from element {offset} on needs {nbytes} bytes; "
            f"the block has {memory.size}"
        )
    storage = _device_memory.storage_at(memory.address, max(memory.size, 1), place, _Mapping(memory, place))
    return _device_memory.tensor_of(storage, dtype, shape, steps).as_strided(shape, steps, offset)
