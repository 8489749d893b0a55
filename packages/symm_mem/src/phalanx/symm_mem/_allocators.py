"""Allocators: the built-in ones, registration, and the choice by the name of a backend."""

import torch

from phalanx.core import InvalidArgumentError, Memory, OutOfMemoryError, UnsupportedError, World
from phalanx.symm_mem import _cuda
from phalanx.symm_mem._state import Allocator, RankContext, current


class WorldAllocator:
    """Allocates memory of the core: shared memory of the host (a sealed memfd) for CPU, that of the driver for GPUs."""

    name = "SHM"

    def alloc(self, world: World, size: int, device: torch.device, scope: str | None, alloc_id: int | None) -> Memory:
        """As `Allocator.alloc`.

        Args:
            world, size, device, scope, alloc_id: As for `Allocator.alloc`.
        """
        place = (device.type, device.index or 0)
        # The scope only distinguishes alloc ids.
        return world.alloc(size, alloc_id=alloc_id, scope=None if alloc_id is None else scope, device=place)

    def free(self, memory: Memory) -> None:
        """Does nothing: the core frees the block with `memory`.

        Args:
            memory: As for `Allocator.free`.
        """


class CudaAllocator(WorldAllocator):
    """Allocates memory of a GPU: of the driver's virtual memory API, shared as a file descriptor."""

    name = "CUDA"

    def alloc(self, world: World, size: int, device: torch.device, scope: str | None, alloc_id: int | None) -> Memory:
        """As `Allocator.alloc`. Memory that streams are done with is freed before, and waited for if needed."""
        _cuda.drain()
        try:
            return super().alloc(world, size, device, scope, alloc_id)
        except OutOfMemoryError:
            if not _cuda.wait():
                raise
        return super().alloc(world, size, device, scope, alloc_id)


def _built_in(device_type: str) -> WorldAllocator | None:
    if device_type == "cpu":
        return WorldAllocator()
    return CudaAllocator() if device_type == "cuda" and torch.cuda.is_available() else None


_BUILT_IN_NAMES = (WorldAllocator.name, CudaAllocator.name)


def _type_of(operation: str, device_type: str) -> str:
    if not isinstance(device_type, str) or ":" in device_type or not device_type:
        raise InvalidArgumentError(
            f"{operation}: device_type is {device_type!r}; expected a type such as 'cpu', without an index"
        )
    return device_type


def _registered(context: RankContext, device_type: str) -> Allocator | None:
    allocator = context.allocators.get(device_type)
    built_in = _built_in(device_type) if allocator is None else None
    if built_in is not None:
        with context.lock:
            allocator = context.allocators.setdefault(device_type, built_in)
            context.backends.setdefault((allocator.name, device_type), allocator)
    return allocator


def register_allocator(device_type: str, allocator: Allocator) -> None:
    """Set the allocator of a device type for this rank. Not collective.

    A second registration replaces the first; existing tensors stay valid and are freed by their own allocator.
    `set_backend` chooses between it and the built-in one of CPU or CUDA.

    Args:
        device_type: A device type, such as "cpu".
        allocator: The new allocator.

    Raises:
        InvalidArgumentError: The device type is not valid, or the allocator has no name.

    Example:
        >>> class Named(WorldAllocator):
        ...     name = "NAMED"
        >>> with rank_context():
        ...     register_allocator("cpu", Named())
        ...     get_backend("cpu")
        'NAMED'
    """
    context, kind = current(), _type_of("register_allocator", device_type)
    if not isinstance(getattr(allocator, "name", None), str):
        raise InvalidArgumentError(
            f"register_allocator: {allocator!r} has no attribute `name` that is a string; see "
            "phalanx.symm_mem.Allocator"
        )
    with context.lock:
        _registered(context, kind)  # the built-in one stays, by its name
        for key in [key for key in context.backends if key[1] == kind and key[0] not in _BUILT_IN_NAMES]:
            del context.backends[key]
        context.backends[allocator.name, kind] = context.allocators[kind] = allocator


def get_allocator(device_type: str) -> Allocator:
    """The allocator of a device type. Not collective.

    Args:
        device_type: A device type, such as "cpu".

    Raises:
        InvalidArgumentError: The device type is not valid.
        UnsupportedError: The device type has no allocator.

    Example:
        >>> get_allocator("cpu").name
        'SHM'
    """
    allocator = _registered(current(), _type_of("get_allocator", device_type))
    if allocator is None:
        raise UnsupportedError(
            f"SymmetricMemory does not support device type {device_type}{_why(device_type)}; use a CPU tensor, or "
            "register an allocator for it (register_allocator)"
        )
    return allocator


def _why(device_type: str) -> str:
    return " here, as torch.cuda.is_available() is False" if device_type == "cuda" else ""


def has_allocator(device_type: str) -> bool:
    """Whether a device type has an allocator. Not collective.

    Args:
        device_type: A device type, such as "cpu".

    Raises:
        InvalidArgumentError: The device type is not valid.

    Example:
        >>> has_allocator("cpu"), has_allocator("meta")
        (True, False)
    """
    return _registered(current(), _type_of("has_allocator", device_type)) is not None


def set_backend(name: str) -> None:
    """Choose the allocator of this rank by the name of its backend. Not collective.

    As `torch.distributed._symmetric_memory.set_backend`, except that it may be called at any time and affects later
    allocations only. It affects the device types for which an allocator of this name is registered.

    Args:
        name: "SHM", shared memory of the host, the default of CPU; "CUDA", memory of the driver, the default of GPUs
            if there are any; or the name of the allocator that was last given to `register_allocator` for a device
            type.

    Raises:
        UnsupportedError: There is no such backend; the text lists the known ones. NVSHMEM and NCCL, as in
            torch, do not exist.

    Example:
        >>> set_backend("SHM")
    """
    context = current()
    with context.lock:
        for kind in ("cpu", "cuda"):
            _registered(context, kind)
        chosen = {kind: allocator for (known, kind), allocator in context.backends.items() if known == name}
        if not chosen:
            listed = ", ".join(f"{known} ({kind})" for known, kind in sorted(context.backends))
            raise UnsupportedError(
                f"set_backend: SymmetricMemory does not find allocation backend {name!r}; this rank has {listed}, and "
                "register_allocator adds others"
            )
        context.allocators.update(chosen)


def get_backend(device: torch.device | str) -> str | None:
    """The name of the backend of a device, or None if there is none. Not collective.

    As `torch.distributed._symmetric_memory.get_backend`.

    Args:
        device: A device, such as "cpu" (by default "SHM") or "cuda:1" (by default "CUDA").

    Example:
        >>> get_backend("cpu"), get_backend("meta")
        ('SHM', None)
    """
    allocator = _registered(current(), torch.device(device).type)
    return None if allocator is None else allocator.name


def is_nvshmem_available() -> bool:
    """Whether there is a backend that uses NVSHMEM. Always False.

    As the function of this name in `torch.distributed._symmetric_memory`.

    Example:
        >>> is_nvshmem_available()
        False
    """
    return False
