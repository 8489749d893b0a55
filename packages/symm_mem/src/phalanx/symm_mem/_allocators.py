"""Where the memory of each device type comes from."""

from typing import Protocol

import torch

from phalanx.core import InvalidArgumentError, Memory, UnsupportedError, World
from phalanx.symm_mem._context import RankContext, current


class Allocator(Protocol):
    """Makes the blocks of one device type. Subclass `WorldAllocator`, or write one of this shape."""

    @property
    def name(self) -> str:
        """For people: which allocator it is."""

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
    """Takes memory from the core: a sealed memfd for CPU."""

    name = "phalanx"

    def alloc(self, world: World, size: int, device: torch.device, scope: str | None, alloc_id: int | None) -> Memory:
        """As `Allocator.alloc`."""
        place = (device.type, device.index or 0)
        # Without an alloc id there is nothing for the scope to distinguish.
        return world.alloc(size, alloc_id=alloc_id, scope=None if alloc_id is None else scope, device=place)

    def free(self, memory: Memory) -> None:
        """Nothing to do: the core frees the block when `memory` is gone."""


def _type_of(device_type: str) -> str:
    if not isinstance(device_type, str) or ":" in device_type or not device_type:
        raise InvalidArgumentError(f"device_type is {device_type!r}; give a type such as 'cpu', without an index")
    return device_type


def _registered(context: RankContext, device_type: str) -> Allocator | None:
    found = context.allocators.get(device_type)
    if found is None and device_type == "cpu":
        return context.allocators.setdefault("cpu", WorldAllocator())
    return found


def register_allocator(device_type: str, allocator: Allocator) -> None:
    """Set where this rank's memory of a device type comes from. Not collective.

    A second registration replaces the first; tensors made before stay valid and are freed by the
    allocator that made them.

    Args:
        device_type: Such as "cpu".
        allocator: The new one.
    """
    current().allocators[_type_of(device_type)] = allocator


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
            f"SymmetricMemory does not support device type {device_type}; use a CPU tensor, or register an "
            "allocator for it (register_allocator)"
        )
    return found


def has_allocator(device_type: str) -> bool:
    """Whether a device type has an allocator. Not collective.

    Args:
        device_type: Such as "cpu".
    """
    return _registered(current(), _type_of(device_type)) is not None
