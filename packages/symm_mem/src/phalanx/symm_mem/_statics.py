"""What torch's `_SymmetricMemory` has besides its handles: the functions of this package under the names it uses."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from phalanx.symm_mem._multicast import has_multicast
from phalanx.symm_mem._signal_pad import get_signal_pad_size, set_signal_pad_size

if TYPE_CHECKING:
    from phalanx.symm_mem._handle import SymmetricMemory


class HandleType(type):
    """So that the class has a `signal_pad_size`, that of later rendezvous, and each handle its own."""

    @property
    def signal_pad_size(cls) -> int:
        """As `get_signal_pad_size` and `set_signal_pad_size`."""
        return get_signal_pad_size()

    @signal_pad_size.setter
    def signal_pad_size(cls, size: int) -> None:
        set_signal_pad_size(size)


class Statics(metaclass=HandleType):
    """The static methods of torch's `_SymmetricMemory`.

    The functions are imported when they are called, as their modules import the handle.
    """

    @staticmethod
    def set_group_info(group_name: str, rank: int, world_size: int, store: Any) -> None:
        """As `phalanx.symm_mem.set_group_info`."""
        from phalanx.symm_mem import _groups

        _groups.set_group_info(group_name, rank, world_size, store)

    @staticmethod
    def empty_strided_p2p(
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        group_name: str | None = None,
        alloc_id: int | None = None,
    ) -> torch.Tensor:
        """As `phalanx.symm_mem.empty_strided_p2p`."""
        from phalanx.symm_mem import _alloc

        return _alloc.empty_strided_p2p(size, stride, dtype, device, group_name, alloc_id)

    @staticmethod
    def rendezvous(tensor: torch.Tensor, group_name: str | None = None) -> "SymmetricMemory":
        """As `phalanx.symm_mem.rendezvous`. Collective the first time for its memory and the group."""
        from phalanx.symm_mem import _rendezvous

        return _rendezvous.rendezvous(tensor, group_name)

    @staticmethod
    def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
        """As `phalanx.symm_mem.is_symm_mem_tensor`."""
        from phalanx.symm_mem import _alloc

        return _alloc.is_symm_mem_tensor(tensor)

    @staticmethod
    def set_backend(name: str) -> None:
        """As `phalanx.symm_mem.set_backend`."""
        from phalanx.symm_mem import _allocators

        _allocators.set_backend(name)

    @staticmethod
    def get_backend(device: torch.device | str) -> str | None:
        """As `phalanx.symm_mem.get_backend`."""
        from phalanx.symm_mem import _allocators

        return _allocators.get_backend(device)

    @staticmethod
    def get_mempool_allocator(device: torch.device | str) -> Any:
        """As `phalanx.symm_mem.get_mempool_allocator`."""
        from phalanx.symm_mem import _pool

        return _pool.get_mempool_allocator(device)

    @staticmethod
    def has_multicast_support(device_type: Any, device_idx: int) -> bool:
        """Whether a device reduces or copies for several ranks at once. Host memory has no such thing.

        For a GPU it says what the driver says of that GPU alone; `multicast_ptr` of a handle tells whether those of the
        ranks are connected so.

        Args:
            device_type: "cpu" or "cuda", or torch's DeviceType.
            device_idx: Which GPU.
        """
        return has_multicast(device_type, device_idx)

    @staticmethod
    def stream_write_value32(input: torch.Tensor, offset: int, val: int) -> torch.Tensor:  # noqa: A002 - torch's name
        """Write a word, in order with what this rank does before and after. Not collective.

        Args:
            input: Contiguous, with elements of 32 bits; such as of `SymmetricMemory.get_signal_pad`.
            offset: Which word.
            val: -2^31 to 2^32 - 1.

        Returns:
            The tensor.

        Raises:
            InvalidArgumentError: An argument is wrong.
        """
        from phalanx.symm_mem import _ops

        written: torch.Tensor = _ops.op("stream_write_value32_")(input, offset, val)
        return written

    @staticmethod
    def memset32(input: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:  # noqa: A002
        """Write a word several times, as `stream_write_value32`. Not collective.

        Args:
            input, offset, val: As in `stream_write_value32`; `offset` is the first word.
            count: How many words.
        """
        from phalanx.symm_mem import _ops

        written: torch.Tensor = _ops.op("memset32_")(input, offset, val, count)
        return written
