"""Symmetric memory of GPUs on several hosts, by handles of the NVLink fabric."""

from collections.abc import Sequence

import torch

from phalanx.core import InvalidArgumentError, UnsupportedError
from phalanx.symm_mem import _cuda
from phalanx.symm_mem._allocation import find, integers, layout_of, with_index
from phalanx.symm_mem._state import current


def export_fabric(tensor: torch.Tensor) -> bytes:
    """A handle of the memory of a symmetric tensor, for a process on this host or another. Not collective.

    Send the bytes by any means; `import_fabric` in the other process makes a tensor of them. Every process that has the
    bytes can map the memory. They denote the whole block, and are valid until the last tensor in it is gone; mappings
    stay after that. Writes must have completed before, or be ordered by the caller, as there are no signals between
    such processes.

    Args:
        tensor: A tensor on a GPU, made by this package or in a memory pool of it; a view denotes its block.

    Returns:
        96 bytes.

    Raises:
        InvalidArgumentError: The tensor is not in symmetric memory of this rank.
        UnsupportedError: The tensor is not on a GPU, or the GPU or its driver has no such handles: the other GPU must
            be in the same NVLink domain, and both processes in an IMEX channel. The text says what is missing.
    """
    place = find(tensor, "export_fabric")
    if place is None:
        raise InvalidArgumentError(
            "export_fabric: the tensor is not in symmetric memory; allocate it with phalanx.symm_mem.empty"
        )
    return current().world.export_fabric(place[0].address)


def import_fabric(
    handle: bytes,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    storage_offset: int = 0,
) -> torch.Tensor:
    """A tensor over memory that another process has exported. Not collective.

    As with `empty`, it is for work on the stream that is current at the call. It is unmapped when it and all views are
    gone and the streams are done with it. It is not symmetric memory of this rank: `rendezvous` refuses it.

    Args:
        handle: The result of `export_fabric` in the other process.
        size: The shape.
        stride: The strides in elements, one for each dim.
        dtype: The dtype of the elements.
        device: The GPU that will use it; without an index, the current one.
        storage_offset: Offset of the first element in elements from the beginning of the block: 0 for a tensor of
            `empty`, and its `storage_offset()` for a view.

    Returns:
        A tensor with this shape and these strides.

    Raises:
        InvalidArgumentError: `handle` is not such a handle, or the tensor would not fit the block; the text gives both.
        UnsupportedError: The device is not a GPU, or has no such handles; the text says what is missing.
        DeviceError: The driver does not map it, for example because its owner has freed it.
    """
    shape, steps, nbytes = layout_of("import_fabric", size, stride, dtype)
    (offset,) = integers("import_fabric: storage_offset", (storage_offset,))
    place = with_index(torch.device(device))
    if place.type != "cuda":
        raise UnsupportedError(f"import_fabric: the device is {str(place)!r}; it must be a GPU, such as 'cuda:0'")
    _cuda.refuse_capture("import_fabric", place, "memory cannot be mapped during a capture; call it before")
    nbytes += offset * dtype.itemsize
    memory = current().world.import_fabric(handle, (place.type, place.index))
    if nbytes > memory.size:
        raise InvalidArgumentError(
            f"import_fabric: size {list(shape)} with stride {list(steps)} of {dtype} from element {offset} on needs "
            f"{nbytes} bytes, and the block has {memory.size}"
        )
    owner = _cuda.StreamGuardedRef(memory, place)  # unmaps it
    storage = _cuda.storage_at(memory.address, max(memory.size, 1), place, owner)
    return _cuda.tensor_of(storage, dtype, shape, steps).as_strided(shape, steps, offset)
