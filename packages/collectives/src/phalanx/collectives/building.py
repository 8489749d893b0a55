"""Python modules in C++, compiled on request for the torch and the Python that are installed.

For packages that have some. A module is kept in the user's cache directory, under a name that says for which torch,
which Python and which source, so that no other loads it; and loaded only if nobody else can have written it.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from phalanx.core.cache import cache_path

__all__ = ["compile_file", "file_of", "folder", "is_trusted", "load_file", "turn"]

_PATIENCE_S = 600.0  # how long to wait for another rank of the host that compiles
_PAUSE_S = 0.1
_WORTH_A_UNIT = 40_000  # bytes of sources: what takes about as long as torch's headers


def folder() -> Path | None:
    """Where it is: $PHALANX_NATIVE, else phalanx/native in the user's cache directory.

    Returns:
        The path, whether or not it exists; None if neither is known, or PHALANX_NATIVE is empty: then nothing compiled
        is used.
    """
    return cache_path("PHALANX_NATIVE", "native")


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


def compile_file(path: Path, sources: Sequence[Path], flags: Sequence[str], without: str) -> None:
    """Compile a Python module for this torch and this Python, on every core.

    Args:
        path: Where it shall be. It appears there at once, when it is complete.
        sources: C++ files. A core compiles its share of them as one, and one core all if they are short, as torch's
            headers take most of the time: what stands in an unnamed namespace needs a name that no other of them has.
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
        done = subprocess.run(command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{compiler} failed (exit status {done.returncode}):\n{done.stdout}")

    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        pays = 1 + sum(source.stat().st_size for source in sources) // _WORTH_A_UNIT
        count = min(len(os.sched_getaffinity(0)), len(sources), pays)
        units = [f"unit{i}" for i in range(count)]  # a cache of compilers knows a file by its name, too
        for i, unit in enumerate(units):
            Path(scratch, f"{unit}.cpp").write_text("".join(f'#include "{source}"\n' for source in sources[i::count]))
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda unit: run(*common, "-c", f"{unit}.cpp", "-o", f"{unit}.o"), units))
        made = Path(scratch, path.name)
        objects = [f"{unit}.o" for unit in units]
        libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        run("-shared", "-o", made.name, *objects, *libraries)
        made.chmod(0o700)
        made.replace(path)  # at once: another process may look for it, or build it too


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles in this folder. The lock goes with the process that holds it.

    Args:
        folder: It is there.

    Raises:
        RuntimeError: Another process has been compiling for ten minutes.
    """
    deadline = time.monotonic() + _PATIENCE_S
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"another process has been compiling in {folder} for more than {_PATIENCE_S:.0f} s"
                    raise RuntimeError(text) from None
                time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(lock)
