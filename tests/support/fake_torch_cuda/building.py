"""Compiles the driver and the device, once for each version of their sources and of torch."""

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

import compiled

__all__ = ["CannotBuild", "libraries"]

_HERE = Path(__file__).resolve().parent
_CORE = _HERE.parents[2] / "core"
_DRIVER = _CORE / "tests" / "fake_cuda"
_DRIVER_FLAGS = ("-std=c++17", "-O0", "-ffp-contract=off", "-fno-math-errno", "-D_GNU_SOURCE")
_DEVICE_FLAGS = ("-std=c++20", "-O0", *(["-DTORCH_BUILT_FOR_CUDA"] if torch.version.cuda else []))


class CannotBuild(Exception):
    """Something that it takes is not here; says what."""


@functools.cache
def libraries() -> tuple[Path, Path]:
    """The files of the driver and of the device, built if they are not there yet.

    Raises:
        CannotBuild: There is no compiler, or torch is too old, or has no headers.
        RuntimeError: The compiler failed.
    """
    compiler = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        raise CannotBuild("no C++ compiler (c++, g++ or clang++)")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        raise CannotBuild(f"torch {torch.__version__}, which does not tell its current stream without CUDA; 2.13 does")
    if torch.version.cuda is not None and platform.machine() != "x86_64":  # see `redirected` in device.cpp
        raise CannotBuild(f"torch {torch.__version__} is built for CUDA, and {platform.machine()} is not x86_64")
    home = Path(torch.__file__).parent
    if not (home / "include/ATen/ATen.h").is_file():
        raise CannotBuild(f"torch has come without its headers ({home / 'include'})")
    headers = sorted([*_CORE.glob("src/*/*.h"), *_CORE.glob("include/phalanx/*.h"), *_CORE.glob("tests/*.h")])
    sources = [*sorted(_DRIVER.glob("*.[ch]*")), *sorted(_CORE.glob("cuda/*.cu"))]
    shared = ["-fPIC", "-fvisibility=hidden", f"-I{_CORE / 'include'}", f"-I{_CORE / 'src'}", f"-I{_CORE / 'tests'}"]
    driver = _folder("driver", [*headers, *sources], _DRIVER_FLAGS) / "libcuda.so.1"
    _once(
        driver,
        sorted(_DRIVER.glob("*.cpp")),
        compiler.split(),
        [*_DRIVER_FLAGS, *shared],
        ["-Wl,-soname,libcuda.so.1", "-lpthread", "-ldl"],
    )
    about = [torch.__version__, str(torch.version.git_version), driver.parent.name, *_DEVICE_FLAGS]
    device = _folder("device", sorted(_HERE.glob("*.[ch]*")), about) / "libfake_torch_cuda.so"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    torch_headers = ["-isystem", str(home / "include"), "-isystem", str(home / "include/torch/csrc/api/include")]
    # One unit, because torch's headers take most of the time.
    first, *rest = sorted(_HERE.glob("*.cpp"))
    others = [word for source in rest for word in ("-include", str(source))]
    _once(
        device,
        [first],
        compiler.split(),
        [*_DEVICE_FLAGS, abi, *shared, *torch_headers, *others],
        [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", str(driver)],
    )
    return driver, device


def _folder(name: str, sources: Iterable[Path], words: Iterable[str]) -> Path:
    """Where a library lies that is built from these sources."""
    parts = [platform.machine(), *words, *(text for source in sources for text in (source.name, source.read_text()))]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return compiled.folder(f"{name}-{key}")


def _once(
    library: Path, sources: Iterable[Path], compiler: list[str], compile_words: list[str], link_words: list[str]
) -> None:
    """Build it if it is not there. One process builds, the others wait; it appears when it is complete."""
    if library.is_file():
        return
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(library.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # goes with the process that holds it
        if library.is_file():
            return
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch, library.name)
            _run([*compiler, *compile_words, "-shared", "-o", str(made), *map(str, sources), *link_words])
            made.replace(library)
    finally:
        os.close(lock)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed (exit status {done.returncode}):\n{done.stdout}")
