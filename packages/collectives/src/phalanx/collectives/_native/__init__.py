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
from collections.abc import Iterable
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
    where = folder()
    python = str(sysconfig.get_config_var("SOABI"))
    words = [torch.__version__, str(torch.version.git_version), platform.machine(), python]
    words += [*(source.read_text() for source in _SOURCES), *sorted(ops)]
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    return None if where is None else where / f"collectives-torch{torch.__version__}-{key}.so"


def _is_ours(path: Path) -> bool:
    """Whether this user has the path, and nobody else may write it."""
    about = path.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def find(ops: Iterable[str]) -> Path | None:
    """The library, if it was built and nobody else can have written it."""
    path = library(ops)
    if path is None:
        return None
    try:
        return path if _is_ours(path) and _is_ours(path.parent) else None
    except OSError:
        return None


_loaded: list[Any] = []


def load(ops: Iterable[str]) -> Any | None:
    """The module, which registers its autograd kernels when it is loaded; None where it was not built.

    Args:
        ops: Names in the namespace phalanx. They have been defined.
    """
    path = find(ops)
    if not _loaded and path is not None:
        loader = ExtensionFileLoader(_MODULE, str(path))
        spec = spec_from_file_location(_MODULE, path, loader=loader)
        assert spec is not None
        try:
            module = module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            log.warning("%s cannot be loaded: %s; `phalanx build --force` makes it anew", path, error)
        else:
            _loaded.append(module)
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
    compiler = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (c++, g++ or clang++); the ops work without one, slower")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(path.parent):
        raise RuntimeError(f"others may write {path.parent}, so nothing in it would be loaded: chmod go-w it")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise RuntimeError(f"there is no {headers / 'Python.h'}: install Python's headers (Debian: python3-dev)")
    home = Path(torch.__file__).parent
    names = ",".join(f'"{name}"' for name in sorted(ops))
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch, path.name)
        command = [
            *compiler.split(),
            *("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-DPHALANX_OPS={names}",
            *("-isystem", str(home / "include"), "-isystem", str(home / "include/torch/csrc/api/include")),
            *("-isystem", str(headers), *map(str, _SOURCES), "-o", str(made)),
            *(f"-L{home / 'lib'}", "-ltorch_cpu", "-ltorch_python", "-lc10"),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{compiler} failed (exit status {done.returncode}):\n{done.stdout}")
        made.chmod(0o700)
        made.replace(path)  # at once: another process may look for it, or build it too
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
