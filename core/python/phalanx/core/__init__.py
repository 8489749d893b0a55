"""Phalanx core: collectives and messages among ranks of one host or several, and symmetric memory, without torch.

A `World` is one rank's context; a `Group` is a named, ordered set of ranks; `World.alloc` makes memory that the ranks
of a group on one host can map (`Group.rendezvous`, which gives a `Symm`).

Importing this package does nothing: the shared library is loaded when the first name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.core._call import CallOptions, MessageOptions
    from phalanx.core._lib import ffi, lib
    from phalanx.core.coalesced import Call, Coalesced
    from phalanx.core.dtypes import ANY_RANK, Algo, DType, ReduceOp
    from phalanx.core.errors import (
        AbiError,
        AccessDeniedError,
        AlreadyExistsError,
        DeviceError,
        InternalError,
        InUseError,
        InvalidArgumentError,
        MismatchError,
        NotFoundError,
        OutOfMemoryError,
        PeerDeadError,
        PhalanxError,
        RevokedError,
        SystemCallError,
        UnsupportedError,
        WaitInterruptedError,
        WaitTimeoutError,
        check,
    )
    from phalanx.core.group import Agreement, Group
    from phalanx.core.log import set_log
    from phalanx.core.memory import Memory, MemoryCount, MemoryInfo
    from phalanx.core.message import Message
    from phalanx.core.store import CallbackStore, FileStore, MemoryStore, PrefixStore, Store, TCPStore, as_store
    from phalanx.core.symm import Symm
    from phalanx.core.torch_ops import load_torch_ops
    from phalanx.core.tuning import GpuTuning, Tuning
    from phalanx.core.work import Work
    from phalanx.core.world import World

    __version__: str

__all__ = [
    "ANY_RANK",
    "AbiError",
    "AccessDeniedError",
    "Agreement",
    "Algo",
    "AlreadyExistsError",
    "Call",
    "CallOptions",
    "CallbackStore",
    "Coalesced",
    "DType",
    "DeviceError",
    "FileStore",
    "GpuTuning",
    "Group",
    "InUseError",
    "InternalError",
    "InvalidArgumentError",
    "Memory",
    "MemoryCount",
    "MemoryInfo",
    "MemoryStore",
    "Message",
    "MessageOptions",
    "MismatchError",
    "NotFoundError",
    "OutOfMemoryError",
    "PeerDeadError",
    "PhalanxError",
    "PrefixStore",
    "ReduceOp",
    "RevokedError",
    "Store",
    "Symm",
    "SystemCallError",
    "TCPStore",
    "Tuning",
    "UnsupportedError",
    "WaitInterruptedError",
    "WaitTimeoutError",
    "Work",
    "World",
    "__version__",
    "as_store",
    "check",
    "ffi",
    "lib",
    "load_torch_ops",
    "set_log",
]

# The modules that have the public names; the other names are in `errors`.
_HOMES = {
    "_call": ("CallOptions", "MessageOptions"),
    "_lib": ("ffi", "lib"),
    "_version": ("__version__",),
    "coalesced": ("Call", "Coalesced"),
    "dtypes": ("ANY_RANK", "Algo", "DType", "ReduceOp"),
    "group": ("Agreement", "Group"),
    "log": ("set_log",),
    "memory": ("Memory", "MemoryCount", "MemoryInfo"),
    "message": ("Message",),
    "store": ("CallbackStore", "FileStore", "MemoryStore", "PrefixStore", "Store", "TCPStore", "as_store"),
    "symm": ("Symm",),
    "torch_ops": ("load_torch_ops",),
    "tuning": ("GpuTuning", "Tuning"),
    "work": ("Work",),
    "world": ("World",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'phalanx.core' has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "errors")
    value = getattr(import_module(f"phalanx.core.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
