"""Where the memory of each device type comes from."""

from typing import Protocol

import torch

from phalanx.core import InvalidArgumentError, Memory, OutOfMemoryError, UnsupportedError, World
from phalanx.symm_mem import _streams
from phalanx.symm_mem._context import RankContext, current


class Allocator(Protocol):
    """Makes the blocks of one device type. Subclass `WorldAllocator`, or write one of this shape."""

    @property
    def name(self) -> str:
        """Of the backend: what `get_backend` gives and `set_backend` takes."""

    def alloc(self, world: World, size: int, device: torch.device, scope: str | None, alloc_id: int | None) -> Memory:
        """Allocate a block in `world`, from which alone groups can map it.

        Args:
            world: This rank's world.
            size: Bytes.
            device: Of the type that the allocator is registered for.
            scope: Group name that the alloc id is meant in, or None.
            alloc_id: As in `empty_strided_p2p`.
        """

    def free(self, memory: Memory) -> None:
        """Called once, on any thread, when the tensor and all views of it are gone.

        The block itself goes with the last reference to `memory`. Must not raise.

        Args:
            memory: What `alloc` returned.
        """


class WorldAllocator:
    """Takes memory from the core: shared memory of the host (a sealed memfd) for CPU, the driver's for GPUs."""

    name = "SHM"

    def alloc(self, world: World, size: int, device: torch.device, scope: str | None, alloc_id: int | None) -> Memory:
        """As `Allocator.alloc`."""
        place = (device.type, device.index or 0)
        # Without an alloc id there is nothing for the scope to distinguish.
        return world.alloc(size, alloc_id=alloc_id, scope=None if alloc_id is None else scope, device=place)

    def free(self, memory: Memory) -> None:
        """Nothing to do: the core frees the block when `memory` is gone."""


class CudaAllocator(WorldAllocator):
    """Takes memory of a GPU from the core: what the driver's virtual memory API makes, shared as a descriptor."""

    name = "CUDA"

    def alloc(self, world: World, size: int, device: torch.device, scope: str | None, alloc_id: int | None) -> Memory:
        """As `Allocator.alloc`. What streams are through with is freed first, and if need be waited for."""
        _streams.drain()
        try:
            return super().alloc(world, size, device, scope, alloc_id)
        except OutOfMemoryError:
            if not _streams.wait():
                raise
        return super().alloc(world, size, device, scope, alloc_id)


def _built_in(device_type: str) -> WorldAllocator | None:
    if device_type == "cpu":
        return WorldAllocator()
    return CudaAllocator() if device_type == "cuda" and torch.cuda.is_available() else None


_BUILT_IN_NAMES = (WorldAllocator.name, CudaAllocator.name)


def _type_of(device_type: str) -> str:
    if not isinstance(device_type, str) or ":" in device_type or not device_type:
        raise InvalidArgumentError(f"device_type is {device_type!r}; give a type such as 'cpu', without an index")
    return device_type


def _registered(context: RankContext, device_type: str) -> Allocator | None:
    found = context.allocators.get(device_type)
    made = _built_in(device_type) if found is None else None
    if made is not None:
        with context.lock:
            found = context.allocators.setdefault(device_type, made)
            context.backends.setdefault((found.name, device_type), found)
    return found


def register_allocator(device_type: str, allocator: Allocator) -> None:
    """Set where this rank's memory of a device type comes from. Not collective.

    A second registration replaces the first; tensors made before stay valid and are freed by the
    allocator that made them. `set_backend` chooses between it and the built-in one of CPU or CUDA.

    Args:
        device_type: Such as "cpu".
        allocator: The new one.

    Raises:
        InvalidArgumentError: The device type is none, or the allocator has no name.
    """
    context, kind = current(), _type_of(device_type)
    if not isinstance(getattr(allocator, "name", None), str):
        raise InvalidArgumentError(f"register_allocator: {allocator!r} has no name; see phalanx.symm_mem.Allocator")
    with context.lock:
        _registered(context, kind)  # the built-in one stays, by its name
        for key in [key for key in context.backends if key[1] == kind and key[0] not in _BUILT_IN_NAMES]:
            del context.backends[key]
        context.backends[allocator.name, kind] = context.allocators[kind] = allocator


def get_allocator(device_type: str) -> Allocator:
    """The allocator of a device type. Not collective.

    Args:
        device_type: Such as "cpu".

    Raises:
        UnsupportedError: There is none.
    """
    found = _registered(current(), _type_of(device_type))
    if found is None:
        raise UnsupportedError(
            f"SymmetricMemory does not support device type {device_type}{_why(device_type)}; use a CPU tensor, or "
            "register an allocator for it (register_allocator)"
        )
    return found


def _why(device_type: str) -> str:
    return " here, as torch.cuda.is_available() is False" if device_type == "cuda" else ""


def has_allocator(device_type: str) -> bool:
    """Whether a device type has an allocator. Not collective.

    Args:
        device_type: Such as "cpu".
    """
    return _registered(current(), _type_of(device_type)) is not None


def set_backend(name: str) -> None:
    """Choose by name where this rank's memory comes from. Not collective.

    As `torch.distributed._symmetric_memory.set_backend`, but for this: it may be called at any time and holds for
    later allocations. It concerns the device types that an allocator of this name is registered for.

    Args:
        name: "SHM", shared memory of the host, which is the backend of CPU unless another one is chosen; "CUDA", memory
            of the driver, likewise for GPUs where there are any; or the name of the allocator that was last given to
            `register_allocator` for a device type.

    Raises:
        UnsupportedError: There is no such backend; the text lists those that there are. Torch's NVSHMEM and NCCL are
            not among them.
    """
    context = current()
    with context.lock:
        for kind in ("cpu", "cuda"):
            _registered(context, kind)
        chosen = {kind: allocator for (each, kind), allocator in context.backends.items() if each == name}
        if not chosen:
            listed = ", ".join(f"{each} ({kind})" for each, kind in sorted(context.backends))
            raise UnsupportedError(
                f"set_backend: SymmetricMemory does not find allocation backend {name}; this rank has {listed}, and "
                "register_allocator adds others"
            )
        context.allocators.update(chosen)


def get_backend(device: torch.device | str) -> str | None:
    """Name of the backend that memory of a device comes from, or None when there is none. Not collective.

    As `torch.distributed._symmetric_memory.get_backend`.

    Args:
        device: Such as "cpu", whose backend is "SHM" unless another one is chosen, or "cuda:1", whose is "CUDA".
    """
    found = _registered(current(), torch.device(device).type)
    return None if found is None else found.name


def is_nvshmem_available() -> bool:
    """Whether there is a backend that uses NVSHMEM: there is none.

    As the function of this name in `torch.distributed._symmetric_memory`.
    """
    return False
