"""What is compiled for the torch that is installed: a Python module, with what is in C++ because Python is too slow.

autograd.cpp has the autograd kernels for calls that need no gradient, eager.cpp the short road of eager mode. Both do
what Python does without them, a few microseconds faster. `phalanx build` compiles them into the user's cache directory,
under a name that says for which torch, which Python and which source, so that no other loads it.
"""

import argparse
import logging
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from phalanx.collectives import building
from phalanx.core import load_torch_ops

log = logging.getLogger("phalanx.collectives")

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("autograd.cpp", "eager.cpp"))
_HEADERS = (Path(__file__).with_name("core_api.h"),)
_MODULE = "phalanx_native"  # as eager.cpp says


def library(ops: Iterable[str]) -> Path | None:
    """Where the library is, or would be, that has kernels for these ops.

    Args:
        ops: Names in the namespace phalanx.
    """
    return building.file_of("collectives", _SOURCES + _HEADERS, sorted(ops))


def find(ops: Iterable[str]) -> Path | None:
    """The library, if it was built and nobody else can have written it."""
    path = library(ops)
    return path if path is not None and building.is_trusted(path) else None


_loaded: list[Any] = []


def load(ops: Iterable[str]) -> Any | None:
    """The module, which registers its autograd kernels when it is loaded; None where it was not built.

    Args:
        ops: Names in the namespace phalanx. They have been defined.
    """
    path = find(ops)
    if not _loaded and path is not None:
        try:
            module = building.load_file(_MODULE, path)
            names = "kernel_of", "wait_storage", "last_error", "all_reduce", "take_interrupted"
            module.connect(*_addresses(*(f"phxt_{name}" for name in names)))
            _loaded.append(module)
        except ImportError as error:
            log.warning("%s cannot be loaded: %s; `phalanx build --force` makes it anew", path, error)
    return loaded()


def _addresses(*names: str) -> list[int]:
    """Where functions of phalanx_torch.h are."""
    ops = load_torch_ops()
    return [int(ops.ffi.cast("uintptr_t", getattr(ops.lib, name))) for name in names]


def loaded() -> Any | None:
    """The module, if `load` loaded it."""
    return _loaded[0] if _loaded else None


def build(ops: Iterable[str]) -> Path:
    """Compile the library, whether or not it is there.

    Args:
        ops: Names in the namespace phalanx.

    Returns:
        Where it is.

    Raises:
        RuntimeError: There is no folder for it that only this user may write, or no compiler, or the compiler failed;
            says which.
    """
    path = library(ops)
    if path is None:
        raise RuntimeError("there is no cache directory: set PHALANX_NATIVE to one, or HOME")
    names = ",".join(f'"{name}"' for name in sorted(ops))
    building.compile_file(path, _SOURCES, [f"-DPHALANX_OPS={names}"], "the ops work without one, slower")
    return path


def main(argv: list[str]) -> int:
    """`phalanx build`.

    Args:
        argv: Arguments after "build".

    Returns:
        Exit status: 1 if it cannot be built.
    """
    parser = argparse.ArgumentParser(
        prog="phalanx build",
        description="Compile, for the torch that is installed, what takes a few microseconds off each collective. "
        "Without it everything works the same.",
    )
    parser.add_argument("--force", action="store_true", help="compile again what is there")
    force = parser.parse_args(argv).force
    status = 0
    # Packages above this one add their own.
    for make in (ensure, *(point.load() for point in entry_points(group="phalanx.builds"))):
        try:
            path, was_there = make(force)
        except (RuntimeError, OSError) as error:
            print(f"phalanx build: {error}", file=sys.stderr)
            status = 1
        else:
            print(f"{path} is there" if was_there else path)
    return status


def ensure(force: bool) -> tuple[Path, bool]:
    """Compile the library if it is not there, or if `force`; where it is, and whether it was there."""
    from phalanx.collectives import _autograd

    path = find(_autograd.OPS)
    if path is not None and not force:
        return path, True
    return build(_autograd.OPS), False
