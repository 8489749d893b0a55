"""An optional Python module in C++ that does what Python does otherwise, a few microseconds faster per call.

autograd.cpp has the autograd kernels for calls that need no gradient, eager.cpp the fast path of eager mode. `phalanx
build` compiles them for the installed torch.
"""

import argparse
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from phalanx.collectives._op_table import OPS
from phalanx.collectives.extension import Extension
from phalanx.core import load_torch_ops
from phalanx.core.commands import CommandError, Parser

_HERE = Path(__file__).parent
_FUNCTIONS = "kernel_of", "last_error", "all_reduce", "take_interrupted"  # of phalanx_torch.h


@cache
def extension(ops: tuple[str, ...]) -> Extension:
    """The module with kernels for these ops of the namespace phalanx."""
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
    """The module, which registers its autograd kernels for these ops when it is loaded; None if it was not built."""
    return extension(tuple(ops)).load_built()


def loaded() -> Any:
    """The module, or None if `load` did not load it."""
    return _loaded[0] if _loaded else None


def parser() -> argparse.ArgumentParser:
    """The parser of `phalanx build`."""
    made = Parser(
        prog="phalanx build",
        description="Compile for the installed torch what would otherwise be compiled at its first use (c10d, the "
        "backend of torch.distributed; symm_mem_pool, memory pools), and what is optional (collectives and dtensor, "
        "fast paths: calls are some microseconds faster with them, and work the same without them). Each module takes "
        "a minute or more of processor time. The exit status is 1 if a module cannot be compiled.",
    )
    made.add_argument("modules", nargs="*", metavar="MODULE", help="a module to compile; by default, all of them")
    made.add_argument("--force", action="store_true", help="compile again what is already compiled")
    return made


def main(argv: list[str]) -> int:
    """`phalanx build` with these arguments. Returns the exit status."""
    given = parser().parse_args(argv)
    builds = {point.name: point for point in entry_points(group="phalanx.builds")}
    for name in given.modules:
        if name not in builds:
            raise CommandError(f"there is no module {name!r}; expected some of {', '.join(sorted(builds))}", 2)
    failures: dict[str, list[str]] = {}  # the modules that fail for each reason
    for name in given.modules or sorted(builds):
        try:
            path, existed = builds[name].load()(given.force)
        except (RuntimeError, OSError) as error:
            failures.setdefault(str(error), []).append(name)
        else:
            print(f"already compiled: {path}" if existed else f"compiled: {path}", flush=True)
    if failures:
        raise CommandError("\n".join(f"{', '.join(names)}: {reason}" for reason, names in failures.items()))
    return 0


def ensure(force: bool) -> tuple[Path, bool]:
    """Compile the module if it does not exist, or if `force`. Returns its path, and whether it existed."""
    return extension(tuple(OPS)).ensure(force)
