"""What is compiled for the torch that is installed: a Python module, with what is in C++ because Python is too slow.

autograd.cpp has the autograd kernels for calls that need no gradient, eager.cpp the short road of eager mode. Both do
what Python does without them, a few microseconds faster. `phalanx build` compiles them into the user's cache directory,
under a name that says for which torch, which Python and which source, so that no other loads it.
"""

import argparse
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from phalanx.core.cache import cache_path

log = logging.getLogger("phalanx.collectives")

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("autograd.cpp", "eager.cpp"))
_MODULE = "phalanx_native"  # as eager.cpp says


def folder() -> Path | None:
    """Where it is: $PHALANX_NATIVE, else phalanx/native in the user's cache directory.

    Returns:
        The path, whether or not it exists; None if neither is known, or PHALANX_NATIVE is empty: then nothing compiled
        is used.
    """
    return cache_path("PHALANX_NATIVE", "native")


def library(ops: Iterable[str]) -> Path | None:
    """Where the library is, or would be, that has kernels for these ops.

    Args:
        ops: Names in the namespace phalanx.
    """
    return file_of("collectives", _SOURCES, sorted(ops))


def file_of(name: str, sources: Sequence[Path], words: Iterable[str]) -> Path | None:
    """Where the module is, or would be, that is compiled from these sources for this torch and this Python.

    Args:
        name: With which that of the file begins.
        sources: What it is compiled from, headers included.
        words: What else it depends on.
    """
    where = folder()
    python = str(sysconfig.get_config_var("SOABI"))
    about = [torch.__version__, str(torch.version.git_version), platform.machine(), python]
    about += [*(source.read_text() for source in sources), *words]
    key = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    return None if where is None else where / f"{name}-torch{torch.__version__}-{key}.so"


def _is_ours(path: Path) -> bool:
    """Whether this user has the path, and nobody else may write it."""
    about = path.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_trusted(path: Path) -> bool:
    """Whether the file is there, and nobody else can have written it."""
    try:
        return _is_ours(path) and _is_ours(path.parent)
    except OSError:
        return False


def find(ops: Iterable[str]) -> Path | None:
    """The library, if it was built and nobody else can have written it."""
    path = library(ops)
    return path if path is not None and is_trusted(path) else None


_loaded: list[Any] = []


def load_file(module: str, path: Path) -> Any:
    """The Python module in a file.

    Args:
        module: Its name, as its source says.

    Raises:
        ImportError: The file is broken.
    """
    loader = ExtensionFileLoader(module, str(path))
    spec = spec_from_file_location(module, path, loader=loader)
    assert spec is not None
    made = module_from_spec(spec)
    loader.exec_module(made)
    return made


def load(ops: Iterable[str]) -> Any | None:
    """The module, which registers its autograd kernels when it is loaded; None where it was not built.

    Args:
        ops: Names in the namespace phalanx. They have been defined.
    """
    path = find(ops)
    if not _loaded and path is not None:
        try:
            _loaded.append(load_file(_MODULE, path))
        except ImportError as error:
            log.warning("%s cannot be loaded: %s; `phalanx build --force` makes it anew", path, error)
    return loaded()


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
    compile_file(path, _SOURCES, [f"-DPHALANX_OPS={names}"], "the ops work without one, slower")
    return path


def compile_file(path: Path, sources: Sequence[Path], flags: Sequence[str], without: str) -> None:
    """Compile a Python module for this torch and this Python, several sources at a time.

    Args:
        path: Where it shall be. It appears there at once, when it is complete.
        sources: C++ files.
        flags: Of the compiler, besides those that torch and Python need.
        without: What happens where there is no compiler, for the text of the error.

    Raises:
        RuntimeError: Others may write the folder, or there is no compiler, or the compiler failed; says which.
    """
    compiler = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        raise RuntimeError(f"there is no C++ compiler (c++, g++ or clang++); {without}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(path.parent):
        raise RuntimeError(f"others may write {path.parent}, so nothing in it would be loaded: chmod go-w it")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise RuntimeError(f"there is no {headers / 'Python.h'}: install Python's headers (Debian: python3-dev)")
    home = Path(torch.__file__).parent
    common = [
        *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *flags,
        *("-isystem", str(home / "include"), "-isystem", str(home / "include/torch/csrc/api/include")),
        *("-isystem", str(headers)),
    ]

    def run(*words: str) -> None:
        command = [*compiler.split(), *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{compiler} failed (exit status {done.returncode}):\n{done.stdout}")

    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects = [str(Path(scratch, f"{source.stem}.o")) for source in sources]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda one, to: run(*common, "-c", str(one), "-o", to), sources, objects))
        made = Path(scratch, path.name)
        libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        run("-shared", "-o", str(made), *objects, *libraries)
        made.chmod(0o700)
        made.replace(path)  # at once: another process may look for it, or build it too


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
    from phalanx.collectives import _autograd

    path = find(_autograd.OPS)
    if path is not None and not force:
        print(f"{path} is there")
        return 0
    try:
        print(build(_autograd.OPS))
    except (RuntimeError, OSError) as error:
        print(f"phalanx build: {error}", file=sys.stderr)
        return 1
    return 0
