"""Multi-rank tests: real processes with a deadline, and a check that they leave nothing behind.

    from ranks import run_ranks

    def sums(rank, world_size):              # a function of the test module, called once in every process
        ...
        return value                         # anything that can be pickled

    def test_ranks_agree_on_the_sum():
        assert run_ranks(sums, 2) == [3.0, 3.0]

Every rank is a process of its own. Where torch is installed, ranks are forked from a *template*: a process that has
imported torch and the package whose tests these are, and has started no thread pool. That saves a second of imports
for each rank, and most of another at its end: such a rank runs its atexit functions and leaves, without taking every
module apart. A rank whose environment has what our packages read when they are imported comes from a template without
them. Otherwise, and with fresh=True, each rank is a new interpreter with an ordinary end.

This file is three things: the module that tests import, a pytest plugin (the fixture `nothing_left_behind`, which is
active for every test), and the program that ranks and the template run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

import proc

__all__ = ["RanksFailed", "run_ranks", "scratch"]

# Once one rank has failed, how long the others may take to notice before they are ended.
GRACE_SECONDS = 10.0
# Every rank starts with these, unless the test's env says otherwise: ranks share few cores, and gloo shall not ask DNS.
DEFAULT_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
# Read when our packages are imported: a process that is forked from a template with them would not see a change.
READ_AT_IMPORT = ("PHALANX_NATIVE", "PHALANX_LIBRARY")
# The same of other libraries, and of any template.
READ_AT_LOAD = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHON", "TORCH_", "MALLOC_", "GLIBC_", "ASAN_")

_PR_SET_PDEATHSIG = 1
_runs = 0  # calls of run_ranks in this process; the fixture looks whether a test made one


class RanksFailed(AssertionError):
    """At least one rank did not end as expected. `failures` maps its rank to a text with traceback and output."""

    def __init__(self, title: str, failures: Mapping[int, str]):
        self.failures = dict(failures)
        parts = [f"---- rank {rank} ----\n{text.rstrip()}" for rank, text in sorted(self.failures.items())]
        super().__init__("\n".join([title, *parts]))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    start_torch: bool = False,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    expect_exit: Mapping[int, int] | None = None,
    check_leaks: bool = False,
    fresh: bool = False,
    loaded: bool | None = None,
) -> list[Any]:
    """Calls fn(rank, world_size, *args) in `world_size` processes and returns what they return, in rank order.

    Args:
        fn: a function of a module (not a lambda, not nested). Its module is imported in each process.
        world_size: how many processes.
        args: anything that can be pickled; every rank gets a copy of its own.
        timeout: seconds for everything. At the deadline each rank that is left prints where all of its threads are,
            and is killed.
        start_torch: call torch.distributed.init_process_group("gloo") before fn, and destroy_process_group after it.
        env: environment variables on top of this process's: one mapping for all ranks, or a sequence of one per rank.
        expect_exit: the exit status that a rank must end with, as subprocess counts (-9: by SIGKILL). Such a rank is
            meant to die before it returns, and has None as its result.
        check_leaks: each rank also fails if fn left behind an open file descriptor or a shared mapping.
        fresh: start new interpreters even if a template could be forked.
        loaded: whether ranks may have imported the package of this test when they begin; None: unless env has what it
            reads then.

    Raises:
        RanksFailed: with the traceback and the output of every rank that raised, died, hung, or left a process behind.
    """
    global _runs
    _runs += 1
    expect_exit = dict(expect_exit or {})
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if bad := [rank for rank in expect_exit if not 0 <= rank < world_size]:
        raise ValueError(f"expect_exit names the ranks {bad}, but there are only {world_size}")
    rank_envs = _rank_envs(env, world_size)
    fresh = fresh or any(key.startswith(READ_AT_LOAD) for rank_env in rank_envs for key in rank_env)
    if loaded is None:
        loaded = not any(key in rank_env for rank_env in rank_envs for key in READ_AT_IMPORT)
    template = None if fresh else _Template.get(_package_of(_module_file(fn)) if loaded else "")
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="phx-ranks-", ignore_cleanup_errors=True) as directory:
        spec = Path(directory) / "spec"
        spec.write_bytes(
            pickle.dumps(
                {
                    "path": sys.path,
                    "module": _module_name(fn),
                    "file": _module_file(fn),
                    "name": fn.__qualname__,
                    "args": pickle.dumps(args),
                    "world_size": world_size,
                    "start_torch": start_torch,
                    "check_leaks": check_leaks,
                    "timeout": timeout,
                    "directory": directory,
                    "env": [{**os.environ, **DEFAULT_ENV, **rank_env} for rank_env in rank_envs],
                }
            )
        )
        (Path(directory) / "scratch").mkdir()
        ranks: list[_Rank] = []
        try:
            deadline = time.monotonic() + timeout * float(os.environ.get("PHX_TEST_TIMEOUT_SCALE", "1"))
            for rank in range(world_size):
                ranks.append(_Rank.start(rank, spec, rank_envs[rank], template))
            _wait_for_all(ranks, deadline, expect_exit)
            return _results(ranks, Path(directory), expect_exit, _describe(fn, world_size))
        finally:
            for process in ranks:
                process.close()


def scratch() -> Path:
    """Inside a rank: a directory that the ranks of one run_ranks call share. It is removed at the end of the call."""
    return Path(os.environ["PHX_TEST_SCRATCH"])


# ---- the parent's side ------------------------------------------------------------------------------------------


def _rank_envs(env: Mapping[str, str] | Sequence[Mapping[str, str]] | None, world_size: int) -> list[dict[str, str]]:
    if env is None or isinstance(env, Mapping):
        return [dict(env or {}) for _ in range(world_size)]
    if len(env) != world_size:
        raise ValueError(f"env has {len(env)} mappings for {world_size} ranks")
    return [dict(rank_env) for rank_env in env]


def _module_name(fn: Callable[..., Any]) -> str:
    if "<" in fn.__qualname__:
        raise ValueError(f"{fn.__qualname__} is not a function of a module, so other processes cannot import it")
    return fn.__module__


def _module_file(fn: Callable[..., Any]) -> str:
    module = sys.modules[fn.__module__]
    if not getattr(module, "__file__", None):
        raise ValueError(f"the module {fn.__module__} has no file, so other processes cannot import it")
    return str(module.__file__)


def _package_of(file: str) -> str:
    """The module that the template imports for tests in this file; "" for none."""
    parts = Path(file).parts
    folder = parts[parts.index("packages") + 1] if "packages" in parts else ""
    # The plug-in itself takes a second to import, and reads the environment.
    name = {"inductor_plugin": "collectives"}.get(folder, folder)
    return f"phalanx.{name}" if name and importlib.util.find_spec(f"phalanx.{name}") is not None else ""


def _describe(fn: Callable[..., Any], world_size: int) -> str:
    return f"run_ranks({fn.__module__}.{fn.__qualname__}, {world_size})"


@dataclass
class _Rank:
    """One rank's process, as its parent sees it."""

    rank: int
    pid: int
    pidfd: int
    directory: Path
    reap: Callable[[], int]
    exit: int | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, rank: int, spec: Path, env: Mapping[str, str], template: _Template | None) -> _Rank:
        if template is not None:
            pid = template.ask(start=str(spec), rank=rank)

            def reap() -> int:
                return template.ask(reap=pid)
        else:
            process = subprocess.Popen(
                [sys.executable, __file__, "rank", str(spec), str(rank), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **DEFAULT_ENV, **env},
            )
            pid, reap = process.pid, process.wait
        return cls(rank, pid, os.pidfd_open(pid), spec.parent, reap)

    def ended(self, seconds: float) -> bool:
        """Waits at most that long for the process to end; then collects its exit status."""
        if self.exit is None and _readable([self.pidfd], seconds):
            self.exit = self.reap()
        return self.exit is not None

    def stop(self, why: str) -> None:
        """Ends a process that should have ended by itself, after asking it where it is."""
        if self.exit is not None:
            return
        self.notes.append(why)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)  # faulthandler prints the stacks
        if not self.ended(0.5):  # it goes on after printing, so this is for the ones that had just ended
            self.kill()

    def kill(self) -> None:
        if self.exit is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.exit = self.reap()

    def leftovers(self) -> list[int]:
        """Processes that the rank started and left running (they share its process group). They are killed."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return []
        pids = [pid for pid, stat in proc.processes() if stat.group == self.pid and stat.state != "Z"]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return pids

    def close(self) -> None:
        self.kill()
        self.leftovers()
        os.close(self.pidfd)

    def output(self) -> str:
        path = self.directory / f"output.{self.rank}"
        return path.read_text(errors="replace").strip() if path.exists() else ""


def _readable(fds: Sequence[int], seconds: float) -> list[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)]


def _wait_for_all(ranks: Sequence[_Rank], deadline: float, expect_exit: Mapping[int, int]) -> None:
    reason = "was still running at the deadline, and was killed"
    while running := [rank for rank in ranks if rank.exit is None]:
        ready = _readable([rank.pidfd for rank in running], deadline - time.monotonic())
        if not ready:
            break
        for rank in running:
            if rank.pidfd in ready and rank.ended(0) and rank.exit != expect_exit.get(rank.rank, 0):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                reason = f"was still running {GRACE_SECONDS:.0f} s after rank {rank.rank} had failed, and was killed"
    for rank in ranks:
        rank.stop(reason)


def _results(ranks: Sequence[_Rank], directory: Path, expect_exit: Mapping[int, int], title: str) -> list[Any]:
    results: list[Any] = []
    failures: dict[int, str] = {}
    for rank in ranks:
        wanted = expect_exit.get(rank.rank, 0)
        kind, value = _read_result(directory / f"result.{rank.rank}")
        problems = list(rank.notes)
        if kind == "error":
            problems.append(value)
        elif rank.exit != wanted and not rank.notes:
            problems.append(f"ended with exit status {rank.exit} instead of {wanted}" + (kind and " after fn returned"))
        elif kind == "" and wanted == 0 and not rank.notes:
            problems.append("exited before fn returned")
        if left := rank.leftovers():
            problems.append(f"left processes behind: {left}")
        if problems:
            failures[rank.rank] = "\n".join([*problems, "output:", rank.output() or "(none)"])
        elif output := rank.output():
            print(f"---- rank {rank.rank} ----\n{output}")
        results.append(value if rank.rank not in expect_exit else None)
    if failures:
        raise RanksFailed(f"{title}: {len(failures)} of {len(ranks)} ranks failed", failures)
    return results


def _read_result(path: Path) -> tuple[str, Any]:
    if not path.exists():
        return "", None
    with path.open("rb") as file:
        kind = pickle.load(file)
        try:
            return kind, pickle.load(file)
        except Exception:
            return "error", "its result cannot be unpickled:\n" + traceback.format_exc()


class _Template:
    """A process that has imported torch, and perhaps a package of ours, and forks ranks on demand."""

    current: ClassVar[dict[str, _Template]] = {}  # by the package: one at most, and one without

    @classmethod
    def get(cls, package: str) -> _Template | None:
        """The template of this process with that package, started at the first call. None where there is no torch.

        Nor where importing torch has started a driver of GPUs, which does not work in a process that is forked then.
        """
        if any(each.owner != os.getpid() for each in cls.current.values()):
            cls.current.clear()  # a fork of the test process: the templates are not its own
        if package not in cls.current and importlib.util.find_spec("torch") is not None:
            for other in [name for name in cls.current if name and package]:  # of tests that are done
                cls.current.pop(other).end()
            cls.current[package] = cls(package)
        found = cls.current.get(package)
        return found if found is None or found.can_fork else None

    def __init__(self, package: str) -> None:
        self.owner = os.getpid()
        self.socket, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "template", str(other.fileno()), str(self.owner), package, *sys.path],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                # So torch asks without starting the driver, if it asks whether there is a GPU.
                env={**os.environ, **DEFAULT_ENV, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            )
        self.file = self.socket.makefile("rw")
        atexit.register(self.end)
        # Returns when torch is imported, so that a test's deadline begins after it.
        self.can_fork = self.ask(holds_gpus=True) == 0

    def ask(self, **request: Any) -> int:
        self.file.write(json.dumps(request) + "\n")
        self.file.flush()
        answer = self.file.readline()
        if not answer:
            raise RuntimeError(f"the template process died with status {self.process.wait()}")
        return int(answer)

    def end(self) -> None:
        if self.owner == os.getpid() and not self.file.closed:
            self.file.close()
            self.socket.close()
            self.process.wait()


# ---- the rank's side --------------------------------------------------------------------------------------------


def _main(role: str, *arguments: str) -> None:
    sys.modules["ranks"] = sys.modules["__main__"]  # modules of tests import this file, which need not be read again
    if role == "template":
        request = _serve_template(int(arguments[0]), int(arguments[1]), arguments[2], arguments[3:])
        if request is None:
            return
        spec_path, rank = request
    else:
        spec_path, rank = arguments[0], int(arguments[1])
        _end_with_parent(int(arguments[2]))
    spec = pickle.loads(Path(spec_path).read_bytes())
    # Only now: in a process forked from the template this replaces what the template was started with.
    os.environ.clear()
    os.environ.update(spec["env"][rank])
    os.environ["PHX_TEST_SCRATCH"] = str(Path(spec["directory"]) / "scratch")
    os.setpgid(0, 0)
    output = os.open(Path(spec["directory"]) / f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.path[:] = spec["path"]
    status = _run_rank(spec, rank)
    if role == "template":
        _leave(status)
    sys.exit(status)


def _serve_template(fd: int, parent: int, package: str, path: Sequence[str]) -> tuple[str, int] | None:
    """Answers requests until the parent is gone. Returns, with the request, only in a newly forked rank."""
    _end_with_parent(parent)
    # The second is what torch imports with the first collective or mesh, and takes as long as the first. The others are
    # what modules of tests import.
    for name in ("torch", "torch._dynamo", "pytest", "hypothesis", "numpy", "expecttest"):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    if package:
        sys.path[:] = path
        importlib.import_module(package)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page of these modules, which takes longer than most tests
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's operators, which ranks would unregister one by one at their end
    template = os.getpid()
    with socket.socket(fileno=fd) as connection, connection.makefile("rw") as file:
        for line in file:
            request = json.loads(line)
            answer = 0
            if "start" in request:
                answer = os.fork()
                if answer == 0:
                    _end_with_parent(template)
                    break  # out of the with block, so that the rank does not keep the connection
            elif "holds_gpus" in request:
                answer = int(any(proc.is_of_gpu_driver(fd) for fd in os.listdir("/proc/self/fd")))
            elif "reap" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
            file.write(f"{answer}\n")
            file.flush()
        else:
            return None
    return request["start"], request["rank"]


def _leave(status: int) -> None:
    """The visible part of an interpreter's end. To finalize torch's modules takes longer than most tests."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins the threads that an ordinary end would join
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request above
        os._exit(1)


def _run_rank(spec: dict[str, Any], rank: int) -> int:
    path = Path(spec["directory"]) / f"result.{rank}"
    try:
        fn: Any = _import_module(spec["module"], spec["file"])
        for name in spec["name"].split("."):
            fn = getattr(fn, name)
        args = pickle.loads(spec["args"])
        before = proc.held(()) if spec["check_leaks"] else set()
        with _torch_distributed(spec, rank) if spec["start_torch"] else contextlib.nullcontext():
            value = fn(rank, spec["world_size"], *args)
        if spec["check_leaks"] and (left := proc.settled(lambda: proc.held(()) - before)):
            raise AssertionError(f"fn left open or mapped: {sorted(left)}")
        answer = pickle.dumps("value") + pickle.dumps(value)
        status = 0
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        answer = pickle.dumps("error") + pickle.dumps(traceback.format_exc())
        status = 1
    written = path.with_suffix(".part" + path.suffix)
    written.write_bytes(answer)
    written.rename(path)  # so that a rank killed while writing has no result instead of half of one
    return status


def _import_module(name: str, file: str) -> Any:
    """The module of fn, under the name it has in the parent, whichever import mode pytest found it by."""
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None and Path(found.origin).samefile(file):
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _torch_distributed(spec: dict[str, Any], rank: int) -> Iterator[None]:
    import datetime

    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec['directory']}/torch_store",
        rank=rank,
        world_size=spec["world_size"],
        timeout=datetime.timedelta(seconds=spec["timeout"]),
    )
    # A rank whose function sends nothing could end before another has connected to it, for which gloo fails there.
    directory = Path(spec["directory"])
    (directory / f"connected.{rank}").touch()
    while len(list(directory.glob("connected.*"))) < spec["world_size"]:
        time.sleep(0.001)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- what is left behind ----------------------------------------------------------------------------------------


def _of_templates() -> tuple[set[int], set[int]]:
    """The processes of the templates, and the descriptors of the connections to them."""
    templates = _Template.current.values()
    return {each.process.pid for each in templates}, {each.socket.fileno() for each in templates}


def pytest_collection_finish() -> None:
    """What is here now is not garbage: the collections after tests with ranks look only at what is made later."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that ran ranks leaves no process, no file descriptor and no file in /dev/shm."""
    runs = _runs
    pids, sockets = _of_templates()
    fds, shared, processes = proc.fds(sockets), proc.shared_memory_files(), set(proc.descendants(pids))
    yield
    if _runs == runs:
        return
    gc.collect()

    def left() -> set[str]:
        pids, sockets = _of_templates()
        new = {f"process {pid}: {command}" for pid, command in proc.descendants(pids).items() if pid not in processes}
        new |= proc.fds(sockets) - fds
        new |= {f"/dev/shm/{name}" for name in proc.shared_memory_files() - shared if not proc.in_use(name)}
        return new

    found = proc.settled(left)
    assert not found, f"the test left behind: {sorted(found)}"


if __name__ == "__main__":
    # The script's own directory is first in sys.path; the parent's path, set later, replaces it.
    _main(*sys.argv[1:])
