"""An optional Python module in C++ that does what Python does otherwise, a few microseconds faster per call.

autograd.cpp has the autograd kernels for calls that need no gradient, eager.cpp the fast path of eager mode. `phalanx
build` compiles them for the installed torch.
"""

import argparse
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from phalanx.collectives._op_table import OPS
from phalanx.collectives.extension import Extension
from phalanx.core import load_torch_ops

_HERE = Path(__file__).parent
_FUNCTIONS = "kernel_of", "wait_storage", "last_error", "all_reduce", "take_interrupted"  # of phalanx_torch.h


@cache
def extension(ops: tuple[str, ...]) -> Extension:
    """The module with kernels for these ops.

    Args:
        ops: Names in the namespace phalanx.
    """
    names = sorted(ops)
    quoted = ",".join(f'"{name}"' for name in names)
    return Extension(
        "collectives",
        "phalanx_native",
        [_HERE / "autograd.cpp", _HERE / "eager.cpp"],
        "the ops work without one, slower",
        headers=[_HERE / "core_api.h"],
        key=lambda: names,
        flags=lambda: [f"-DPHALANX_OPS={quoted}"],
        prepare=_connect,
    )


def _connect(module: Any) -> None:
    ops = load_torch_ops()
    module.connect(*(int(ops.ffi.cast("uintptr_t", getattr(ops.lib, f"phxt_{name}"))) for name in _FUNCTIONS))
    _loaded.append(module)


_loaded: list[Any] = []


def load(ops: Iterable[str]) -> Any:
    """The module, which registers its autograd kernels when it is loaded; None if it was not built.

    Args:
        ops: Names in the namespace phalanx. They must be defined.
    """
    return extension(tuple(ops)).load_built()


def loaded() -> Any:
    """The module, or None if `load` did not load it."""
    return _loaded[0] if _loaded else None


def main(argv: list[str]) -> int:
    """`phalanx build`.

    Args:
        argv: Arguments after "build".

    Returns:
        Exit status: 1 if a module cannot be built.
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
    """Compile the module if it does not exist, or if `force`. Returns its path, and whether it existed."""
    return extension(tuple(OPS)).ensure(force)
