"""The compiled backend: found in the user's cache directory, or compiled at its first use on this host."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import phalanx.core
from phalanx.collectives import building
from phalanx.core import ffi, interrupts, lib, load_torch_ops

log = logging.getLogger("phalanx.collectives")

_HERE = Path(__file__).parent
_SOURCES = tuple(sorted(_HERE.glob("*.cpp")))
_MODULE = "phalanx_c10d"  # as module.cpp says
_STRUCTS = ("phx_options", "phx_gpu_options", "phx_block", "phx_call", "phx_error_info")
_OPS_FUNCTIONS = ("phxt_set_around", "phxt_group_find")


def module() -> Any:
    """The compiled module. Compiles it if it is not there.

    Raises:
        RuntimeError: It cannot be had; says why, and what to do.
    """
    found = _load()
    if isinstance(found, Exception):
        raise RuntimeError(refusal()) from found
    return found


def refusal() -> str:
    """Why this process cannot have the module, and what to do; "" if it can. Compiles it if it is not there."""
    found = _load()
    if not isinstance(found, Exception):
        return ""
    return (
        "the backend 'phalanx' is written in C++ and compiled for the installed torch at its first use, which failed: "
        f"{found}. Install a compiler (Debian: g++ and python3-dev), or set PHALANX_NATIVE to a folder where it was "
        "compiled for the same torch and Python. Without it use the backend gloo: the functional collectives of "
        "phalanx.collectives serve its groups, too"
    )


def loaded() -> Any | None:
    """The compiled module, if it has been loaded."""
    return _loaded[0] if _loaded else None


def functions(names: list[str]) -> dict[str, int]:
    """Addresses of functions of the core, by name."""
    return {name: int(ffi.cast("uintptr_t", ffi.addressof(lib, name))) for name in names}


def path() -> Path | None:
    """Where the compiled module is, or would be; None if there is no cache directory."""
    sizes = [str(int(lib.phx_struct_size(name.encode()))) for name in _STRUCTS]
    sources = (*_SOURCES, *sorted(_HERE.glob("*.h")))
    return building.file_of("c10d", sources, [str(int(lib.phx_abi_version())), *sizes])


_loaded: list[Any] = []


@cache
def _load() -> Any:
    """The module, or the exception that says why there is none."""
    try:
        where = path()
        if where is None:
            raise RuntimeError("there is no cache directory: PHALANX_NATIVE is empty, or there is no HOME")
        if not building.is_trusted(where):
            _compile(where)
        module = building.load_file(_MODULE, where)
        module.set_invalid(phalanx.core.InvalidArgumentError)
        if interrupts.slots() is not None:
            module.set_interrupted(int(ffi.cast("uintptr_t", interrupts.slots())))
        _show_ops(module)
        _loaded.append(module)
        return module
    except (RuntimeError, OSError, ImportError) as error:
        return error


def _show_ops(module: Any) -> None:
    """From now on a profiler sees what the ops of torch.ops.phalanx send."""
    try:
        ops = load_torch_ops()
    except ImportError:  # there are none
        return
    addresses = [int(ops.ffi.cast("uintptr_t", getattr(ops.lib, name))) for name in _OPS_FUNCTIONS]
    module.show_ops(*addresses, *functions(["phx_group_get_info", "phx_group_release"]).values())


def _compile(where: Path) -> None:
    where.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with building.turn(where.parent):
        if building.is_trusted(where):  # another rank of this host was first
            return
        log.info("compiling %s, once for this version of torch", where)
        flags = ["-isystem", str(_headers())]
        building.compile_file(where, _SOURCES, flags, "set CXX if it has another name")


def _headers() -> Path:
    """The folder of phalanx/phalanx.h: in the installed package, or in the source tree."""
    folders = [Path(folder) for folder in phalanx.core.__path__]
    for candidate in (
        *(folder / "include" for folder in folders),
        *(folder.parents[2] / "include" for folder in folders),
    ):
        if (candidate / "phalanx" / "phalanx.h").is_file():
            return candidate
    raise RuntimeError("phalanx.core has no include/phalanx/phalanx.h; reinstall phalanx-core")
