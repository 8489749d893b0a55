"""The compiled backend: found in the user's cache directory, or compiled at its first use on this host.

`PHALANX_C10D` says which one serves process groups: "cpp" the compiled one, or init_process_group fails; "python" the
one in Python; "auto", the default, the compiled one where it can be had.
"""

import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

import phalanx.core
from phalanx.collectives import building
from phalanx.core import ffi, interrupts, lib, load_torch_ops

log = logging.getLogger("phalanx.collectives")

VARIABLE = "PHALANX_C10D"
_CHOICES = ("auto", "cpp", "python")
_HERE = Path(__file__).parent
_SOURCES = tuple(sorted(_HERE.glob("*.cpp")))
_MODULE = "phalanx_c10d"  # as module.cpp says
_STRUCTS = ("phx_options", "phx_gpu_options", "phx_block", "phx_call", "phx_error_info")
_OPS_FUNCTIONS = ("phxt_set_around", "phxt_group_find")


def choice() -> str:
    """What the environment asks for: "auto", "cpp" or "python".

    Raises:
        ValueError: It asks for something else.
    """
    wish = os.environ.get(VARIABLE, "").strip().lower() or "auto"
    if wish not in _CHOICES:
        raise ValueError(f"the environment variable {VARIABLE} is {wish!r}; use one of {', '.join(_CHOICES)}")
    return wish


def module() -> Any | None:
    """The compiled module; None where the backend in Python is to be used. Compiles it if it is not there.

    Raises:
        RuntimeError: PHALANX_C10D is "cpp", and it cannot be had; says why.
    """
    wish = choice()
    if wish == "python":
        return None
    found = _load()
    if not isinstance(found, Exception):
        return found
    if wish == "cpp":
        raise RuntimeError(f"{VARIABLE} is cpp, and the C++ backend cannot be had: {found}") from found
    _tell(str(found))
    return None


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
            raise RuntimeError("there is no cache directory (see PHALANX_NATIVE)")
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


@cache
def _tell(reason: str) -> None:
    log.warning("process groups of backend 'phalanx' are served in Python, slower than in C++: %s", reason)
