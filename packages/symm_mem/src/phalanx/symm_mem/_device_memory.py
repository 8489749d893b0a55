"""Storages over memory of a GPU that this package was given as an address.

DLPack is the way that every build of torch has in public: it says on which GPU the memory is to be used, which of a
peer's block is not the one where it lies, and calls back when the storage ends, on whatever thread that is.
"""

import ctypes
from typing import Any

import torch

_CUDA, _UNSIGNED = 2, 1  # kDLCUDA, kDLUInt


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor, and behind it what it points to."""

    _fields_ = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("length", ctypes.c_int64 * 1),
    ]


_held: dict[int, tuple[_Managed, object]] = {}  # by the address of the first


def _let_go(managed: int) -> None:
    _held.pop(managed, None)


_end = _Deleter(_let_go)
_capsule: Any = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = b"dltensor"  # kept: a capsule does not copy its name


def storage_at(address: int, nbytes: int, device: torch.device, keeper: object) -> torch.UntypedStorage:
    """A storage over bytes of a GPU's memory.

    Args:
        address: Of the first one, as that GPU sees it.
        nbytes: How many, one at least.
        device: The GPU, with its index.
        keeper: What keeps the memory; let go of when the storage ends.
    """
    managed = _Managed()
    managed.length[0] = nbytes
    tensor = managed.tensor
    tensor.data, tensor.device.type, tensor.device.index = address, _CUDA, device.index
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = 1, _UNSIGNED, 8, 1
    tensor.shape = managed.length
    managed.deleter = _end
    place = ctypes.addressof(managed)
    _held[place] = (managed, keeper)
    try:
        return torch.utils.dlpack.from_dlpack(_capsule(place, _NAME, None)).untyped_storage()
    except BaseException:
        _held.pop(place, None)
        raise


def tensor_of(
    storage: torch.UntypedStorage, dtype: torch.dtype, shape: tuple[int, ...], steps: tuple[int, ...]
) -> torch.Tensor:
    """A tensor at the start of a storage.

    Args:
        storage: Which.
        dtype, shape, steps: As in `torch.empty_strided`.
    """
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, shape, steps)
