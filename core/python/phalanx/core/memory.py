"""Blocks of memory that ranks can share."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from phalanx.core import _callbacks
from phalanx.core._handle import INT32_MAX, Handle, view
from phalanx.core._lib import ffi, lib
from phalanx.core.errors import InvalidArgumentError, UnsupportedError
from phalanx.core.uncopied import Uncopied

Device = str | tuple[str | int, int]

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
_DEVICE_NAMES = {number: name for name, number in _DEVICE_TYPES.items()}


class MemoryCount(NamedTuple):
    """What a world has allocated, idle persistent blocks included."""

    blocks: int
    size_bytes: int


@dataclass(frozen=True)
class MemoryInfo:
    """A block of a world.

    Attributes:
        address: The address of its first byte.
        size: Bytes asked for.
        live: False for a persistent block that is idle.
        alloc_id: None unless persistent.
        device: Such as ("cpu", 0).
    """

    address: int
    size: int
    live: bool
    alloc_id: int | None
    device: tuple[str, int]


def device_of(wish: Device) -> tuple[str, int]:
    """Read a device: "cpu", "cuda:1" or ("cuda", 1).

    Raises:
        InvalidArgumentError: It names no known device type.
    """
    kind: str | int
    if isinstance(wish, str):
        kind, _, rest = wish.partition(":")
        index = int(rest) if rest.isdecimal() else 0 if not rest else -1
    else:
        try:
            kind, index = wish
        except (TypeError, ValueError):
            kind, index = "?", -1
    name = _DEVICE_NAMES.get(kind) if isinstance(kind, int) else kind
    if name not in _DEVICE_TYPES or not isinstance(index, int) or not 0 <= index <= INT32_MAX:
        raise InvalidArgumentError(f"unknown device {wish!r}; use 'cpu', 'cuda:1' or a pair such as ('cuda', 1)")
    return name, index


def c_device(device: tuple[str, int]) -> Any:
    """A phx_device pointer."""
    return ffi.new("phx_device *", {"type": _DEVICE_TYPES[device[0]], "index": device[1]})


def info_from_c(info: Any) -> MemoryInfo:
    """Copy a phx_mem_info."""
    kind = int(info.device.type)
    return MemoryInfo(
        address=int(ffi.cast("uintptr_t", info.base)),
        size=int(info.size),
        live=bool(info.live),
        alloc_id=int(info.alloc_id) if info.persistent else None,
        device=(_DEVICE_NAMES.get(kind, str(kind)), int(info.device.index)),
    )


class _Block(Uncopied):
    """Frees a block when the last Memory or view of it is gone, on whatever thread that is."""

    __slots__ = ("_pointer", "_world", "address")

    def __init__(self, world: Handle, pointer: Any) -> None:
        self._pointer = pointer
        self._world = world.retain()
        self.address = int(ffi.cast("uintptr_t", pointer))

    def __del__(self) -> None:
        if self._world.alive():  # a forked child frees nothing
            _callbacks.release(self._free)

    def _free(self) -> None:
        lib.phx_mem_free(self._world.pointer, self._pointer)
        self._world.drop()


class WorldOfMemory(Protocol):
    """What a block knows of its `World`, which makes blocks and so cannot be named here."""

    _handle: Handle

    @property
    def rank(self) -> int:
        """`World.rank`."""

    @property
    def size(self) -> int:
        """`World.size`."""


class Memory(Uncopied):
    """A block made by `World.alloc`. It is freed when this object and all views of it are gone.

    Attributes:
        world: Whose block it is.
        size: Bytes asked for.
        alloc_id: None unless persistent.
        scope: Group name that the alloc id is meant in, or None.
        device: Such as ("cpu", 0).
    """

    def __init__(
        self,
        world: WorldOfMemory,
        pointer: Any,
        size: int,
        device: tuple[str, int],
        alloc_id: int | None = None,
        scope: str | None = None,
    ) -> None:
        self._block = _Block(world._handle, pointer)
        self.world = world
        self.size = size
        self.device = device
        self.alloc_id = alloc_id
        self.scope = scope

    @property
    def address(self) -> int:
        """Address of the first byte; valid while this object or a view of it is alive."""
        return self._block.address

    def buffer(self) -> memoryview:
        """The block as writable bytes, without a copy.

        The block stays allocated for as long as the view, or anything made from it
        (`numpy.frombuffer`, `torch.frombuffer`), is alive. Not collective.

        Returns:
            A memoryview of `size` bytes.

        Raises:
            UnsupportedError: The block is not in host memory.

        Example:
            >>> memory.buffer().nbytes
            4096
        """
        if self.device[0] != "cpu":
            raise UnsupportedError(
                f"memory on device {self.device} cannot be viewed as bytes on the host; use its address"
            )
        return view(self._block.address, self.size, self._block)

    def __repr__(self) -> str:
        persistent = "" if self.alloc_id is None else f", alloc_id={self.alloc_id}"
        return f"Memory(address={self.address:#x}, size={self.size}, device={self.device}{persistent})"
