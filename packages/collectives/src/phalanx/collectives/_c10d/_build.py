"""The C++ module of the backend, which is compiled at its first use on a host."""

from functools import cache
from pathlib import Path
from typing import Any

import phalanx.core
from phalanx.collectives.extension import Extension
from phalanx.core import ffi, interrupts, lib, load_torch_ops

_HERE = Path(__file__).parent
_STRUCTS = ("phx_options", "phx_gpu_options", "phx_block", "phx_call", "phx_error_info")
_OPS_FUNCTIONS = ("phxt_set_around", "phxt_group_find")


def module() -> Any:
    """The module, which is compiled if it does not exist.

    Raises:
        RuntimeError: It cannot be compiled or loaded; the text says why, and what to do.
    """
    text = refusal()
    if text:
        raise RuntimeError(text)
    return EXTENSION.module


@cache
def refusal() -> str:
    """The reason for which this process cannot have the module, with advice, or "". Compiles it if need be."""
    try:
        EXTENSION.load()
    except RuntimeError as error:
        return (
            "the backend 'phalanx' is written in C++ and compiled for the installed torch at its first use, which "
            f"failed: {error}. Install a compiler (Debian: g++ and python3-dev), or set PHALANX_NATIVE to a folder "
            "where it was compiled for the same torch and Python. Without it use the backend gloo: the functional "
            "collectives of phalanx.collectives serve its groups, too"
        )
    return ""


def loaded() -> Any:
    """The module, or None if it has not been loaded."""
    return EXTENSION.module


def functions(names: list[str]) -> dict[str, int]:
    """Addresses of functions of the core, by name."""
    return {name: int(ffi.cast("uintptr_t", ffi.addressof(lib, name))) for name in names}


def _key() -> list[str]:
    return [str(int(lib.phx_abi_version())), *(str(int(lib.phx_struct_size(name.encode()))) for name in _STRUCTS)]


def _flags() -> list[str]:
    """The flags for phalanx/phalanx.h, in the installed package or in the source tree."""
    folders = [Path(folder) for folder in phalanx.core.__path__]
    for folder in (*folders, *(folder.parents[2] for folder in folders)):
        if (folder / "include" / "phalanx" / "phalanx.h").is_file():
            return ["-isystem", str(folder / "include")]
    raise RuntimeError("phalanx.core has no include/phalanx/phalanx.h; reinstall phalanx-core")


def _prepare(module: Any) -> None:
    module.set_invalid(phalanx.core.InvalidArgumentError)
    if interrupts.slots() is not None:
        module.set_interrupted(int(ffi.cast("uintptr_t", interrupts.slots())))
    try:
        ops = load_torch_ops()
    except ImportError:  # without ops a profiler has nothing to see
        return
    addresses = [int(ops.ffi.cast("uintptr_t", getattr(ops.lib, name))) for name in _OPS_FUNCTIONS]
    module.show_ops(*addresses, *functions(["phx_group_get_info", "phx_group_release"]).values())


EXTENSION = Extension(
    "c10d",
    "phalanx_c10d",
    sorted(_HERE.glob("*.cpp")),
    "set CXX if it has another name",
    headers=sorted(_HERE.glob("*.h")),
    key=_key,
    flags=_flags,
    prepare=_prepare,
)
