"""Python modules in C++ that are compiled on the user's host, for the torch and the Python that are installed.

`Extension` is shared by the packages that build on this one. A compiled module is kept in the user's cache directory,
under a name that depends on torch, Python and the sources, and is loaded only if no other user can have written it.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from phalanx.core.cache import cache_path

__all__ = ["Extension", "folder"]

log = logging.getLogger("phalanx.collectives")

_TURN_TIMEOUT_S = 600.0  # how long to wait for another process that compiles
_POLL_S = 0.1
_UNIT_BYTES = 40_000  # sources of this size take about as long to compile as torch's headers


def folder() -> Path | None:
    """The folder of compiled modules: $PHALANX_NATIVE, else phalanx/native in the user's cache directory.

    Returns:
        The path, whether or not it exists; None if there is no such directory, or if PHALANX_NATIVE is empty: then no
        compiled module is used.
    """
    return cache_path("PHALANX_NATIVE", "native")


class Extension:
    """A Python module in C++. `load_built` uses it if `phalanx build` was run; `load` compiles it at the first use.

    Args:
        name: The beginning of its file name.
        module: The name of the Python module, as in its source.
        sources: The C++ files. They are compiled in one unit per core, or in fewer units if they are short, as torch's
            headers take most of the time: names in unnamed namespaces must be unique among all files.
        without: The end of the error text if there is no compiler: what to do, or what works without the module.
        headers: The headers that it includes.
        key: Gives further strings that the file name depends on.
        flags: Gives further flags of the compiler.
        prepare: Is called once with the loaded module.
    """

    def __init__(
        self,
        name: str,
        module: str,
        sources: Sequence[Path],
        without: str,
        *,
        headers: Sequence[Path] = (),
        key: Callable[[], Iterable[str]] = tuple,
        flags: Callable[[], Iterable[str]] = tuple,
        prepare: Callable[[Any], object] = id,
    ) -> None:
        self.name, self.sources = name, tuple(sources)
        self._module_name, self._headers, self._without = module, tuple(headers), without
        self._key, self._flags, self._prepare = key, flags, prepare
        self._module: Any = None

    @property
    def module(self) -> Any:
        """The loaded module, or None."""
        return self._module

    def path(self) -> Path | None:
        """The path of the compiled module, whether or not it exists; None without a folder for it."""
        where = folder()
        about = [torch.__version__, str(torch.version.git_version), platform.machine()]
        about += [str(sysconfig.get_config_var("SOABI"))]
        about += [*(source.read_text() for source in (*self.sources, *self._headers)), *self._key()]
        digest = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
        return None if where is None else where / f"{self.name}-torch{torch.__version__}-{digest}.so"

    def find(self) -> Path | None:
        """The path of the compiled module if it exists and no other user can have written it."""
        path = self.path()
        return path if path is not None and _is_trusted(path) else None

    def why_not(self) -> str | None:
        """The reason for which `load_built` did not load the module; None if it is loaded."""
        path = self.path()
        if self._module is not None:
            return None
        if path is None:
            return "PHALANX_NATIVE is empty, or there is no cache directory"
        if not path.exists():
            return f"{path} was not built: run `phalanx build`"
        return f"{path} was not loaded" if _is_trusted(path) else f"{path} may be written by others"

    def build(self) -> Path:
        """Compile the module, whether or not it exists. Other processes may do so at the same time.

        Returns:
            The path.

        Raises:
            RuntimeError: There is no folder that only this user can write, or no compiler, or the compiler failed; the
                text says which.
        """
        path = self._path()
        _compile(path, self.sources, self._flags(), self._without)
        return path

    def ensure(self, force: bool) -> tuple[Path, bool]:
        """Compile the module if it does not exist, or if `force`: for `phalanx build`.

        Args:
            force: Whether to compile it again if it exists.

        Returns:
            The path, and whether it existed before.

        Raises:
            RuntimeError: As `build`.
        """
        path = self.find()
        return (path, True) if path is not None and not force else (self.build(), False)

    def load_built(self) -> Any:
        """The module, or None if it was not built. A broken file is reported in the log."""
        path = self.find() if self._module is None else None
        if path is not None:
            try:
                self._load(path)
            except ImportError as error:
                log.warning("%s cannot be loaded: %s; `phalanx build --force` compiles it again", path, error)
        return self._module

    def load(self) -> Any:
        """The module, which is compiled if it does not exist. Only one process of the host compiles it.

        Raises:
            RuntimeError: It cannot be compiled or loaded; the text gives the reason.
        """
        if self._module is None:
            try:
                path = self._path()
                if not _is_trusted(path):
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    with _turn(path.parent):
                        if not _is_trusted(path):  # otherwise another process compiled it meanwhile
                            _compile(path, self.sources, self._flags(), self._without)
                self._load(path)
            except (OSError, ImportError) as error:
                raise RuntimeError(str(error)) from error
        return self._module

    def _path(self) -> Path:
        path = self.path()
        if path is None:
            raise RuntimeError("there is no cache directory: PHALANX_NATIVE is empty, or HOME is not set; set one")
        return path

    def _load(self, path: Path) -> None:
        loader = ExtensionFileLoader(self._module_name, str(path))
        spec = spec_from_file_location(self._module_name, path, loader=loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
        self._prepare(module)
        self._module = module


def _is_ours(path: Path) -> bool:
    """Whether this user owns the path, and no other user may write it."""
    about = path.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_trusted(path: Path) -> bool:
    """Whether the file exists, and no other user can have written it."""
    try:
        return _is_ours(path) and _is_ours(path.parent)
    except OSError:
        return False


def _compile(path: Path, sources: Sequence[Path], flags: Iterable[str], without: str) -> None:
    """Compile sources to a file, on all cores. The file appears at once, when it is complete."""
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

    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        most = 1 + sum(source.stat().st_size for source in sources) // _UNIT_BYTES
        count = min(len(os.sched_getaffinity(0)), len(sources), most)
        units = [f"unit{i}" for i in range(count)]  # stable names, for compiler caches
        for i, unit in enumerate(units):
            Path(scratch, f"{unit}.cpp").write_text("".join(f'#include "{source}"\n' for source in sources[i::count]))
        # It takes a while, so say it. Without a handler of its own, logging prints it on stderr.
        name = path.name.split("-")[0]
        log.warning("compiling %s for torch %s, about a minute, once: %s", name, torch.__version__, path)
        linked = Path(scratch, path.name)
        objects = [f"{unit}.o" for unit in units]
        libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        _run(compiler, scratch, [[*common, "-c", f"{unit}.cpp", "-o", f"{unit}.o"] for unit in units])
        _run(compiler, scratch, [["-shared", "-o", linked.name, *objects, *libraries]])
        linked.chmod(0o700)
        linked.replace(path)  # atomic: other processes may look for it, or build it too


def _run(compiler: str, scratch: str, commands: Sequence[Sequence[str]]) -> None:
    """Run the compiler several times at once. None is left running if one fails, or if this process is interrupted.

    Raises:
        RuntimeError: It failed; the text has its output.
    """
    with contextlib.ExitStack() as stack:
        running = []
        with _interrupts_later():
            for words in commands:
                output = stack.enter_context(tempfile.TemporaryFile("w+", dir=scratch))
                process = subprocess.Popen(
                    [*compiler.split(), *words],
                    cwd=scratch,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # a compiler starts processes of its own, which are ended with it
                )
                stack.callback(_end, process)
                running.append((process, output))
        for process, output in running:
            if process.wait() != 0:
                output.seek(0)
                text = output.read().strip() or "it printed nothing"
                raise RuntimeError(f"{compiler} failed (exit status {process.returncode}): {text}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Put off Ctrl-C until the end, so that it does not come between the start of a process and the note of it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


@contextlib.contextmanager
def _turn(where: Path) -> Iterator[None]:
    """Wait until no other process compiles in this folder. The lock ends with the process that holds it.

    Raises:
        RuntimeError: Another process has been compiling for ten minutes.
    """
    deadline = time.monotonic() + _TURN_TIMEOUT_S
    lock = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"another process has been compiling in {where} for more than {_TURN_TIMEOUT_S:.0f} s"
                    raise RuntimeError(text) from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)
