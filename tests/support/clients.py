"""Tests of clients, which are libraries of others that people run on Phalanx. Each is installed with the tests' torch.

    from clients import Client, Rank, assert_equal

    lightning = Client("lightning==2.6.*")

    def ddp(rank: Rank) -> dict[str, Any]:   # a function of the test file, called once in every process
        import lightning                      # the client is imported in functions only: the tests do not have it
        ...
        for _ in rank.steps(5):               # the steps that are timed
            ...
        return {"losses": losses}             # tensors, and what is made of plain Python

    def test_ddp_trains_as_over_gloo() -> None:
        results = lightning.run(ddp)          # on 2 ranks with each of two backends: rank.backend
        assert_equal(results["phalanx"], results["gloo"])

A client's environment sees every package of the environment that runs the tests, so that pip finds torch there and
fetches no other. It is made at the first use, in a folder of the cache of tests ($PHALANX_TEST_CACHE). Where that fails
the test is skipped with the reason.

This file is two things: the module that tests import, and the program that each rank runs. It is run as `ranks.py`
runs its ranks, but in interpreters of the client's environment and with the variables that torchrun sets.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["Client", "Rank", "assert_equal", "print_times", "times"]

BACKENDS = ("phalanx", "gloo")
GRACE_SECONDS = 10.0  # once one rank has failed, how long the others may take to notice before they are ended
# With --times: steps that are not timed, then turns. One backend takes the steps of a turn while the other waits.
WARM_STEPS, TURNS, STEPS_OF_A_TURN = 5, 20, 5
CONTEXT = "PHX_CLIENT_CONTEXT"  # what a rank has to know, as JSON

times: list[dict[str, Any]] = []  # one row for each function that was run with turns
in_turns = False  # set by --times
realtime = False  # set by --realtime


# ---- inside a rank ------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """What a function is told that runs in every process.

    Attributes:
        backend: The name for init_process_group.
        rank: The number of this process.
        size: How many processes there are.
        folder: A folder that the ranks of this backend share. It is removed at the end.
    """

    backend: str
    rank: int
    size: int
    folder: Path
    turns: str = ""  # the address of who gives turns; "" if nobody does
    realtime: bool = False  # whether the rest of the machine has to wait during a turn
    _connection: Any = None
    _warm: bool = False
    _turns_taken: int = 0
    _seconds: list[float] = field(default_factory=list)
    _began: float = 0.0

    @classmethod
    def current(cls) -> Rank:
        """The rank that this process is, for functions that a client calls in processes of its own."""
        context = json.loads(os.environ[CONTEXT])
        names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # of torchrun, and of two kinds of mpiexec
        rank = next((int(os.environ[name]) for name in names if name in os.environ), 0)
        return cls(
            context["backend"], rank, context["size"], Path(context["folder"]), context["turns"], context["realtime"]
        )

    def count(self, steps: int) -> int:
        """How many steps to take where a test takes `steps`: with --times many more."""
        return WARM_STEPS + TURNS * STEPS_OF_A_TURN if self.turns else steps

    def steps(self, steps: int) -> Iterator[int]:
        """The numbers of the steps. The body of the loop is what is timed."""
        for number in range(self.count(steps)):
            self.begin_step()
            yield number
            self.end_step()

    def begin_step(self) -> None:
        """Where a client has the loop: call it before each step, and `end_step` after it."""
        if self.turns and not self._seconds:
            self._wait_for_turn()
        self._began = time.perf_counter()

    def end_step(self) -> None:
        self._seconds.append(time.perf_counter() - self._began)
        if self.turns and len(self._seconds) == (STEPS_OF_A_TURN if self._warm else WARM_STEPS):
            self._schedule(os.SCHED_OTHER, 0)
            self._connection.sendall(json.dumps(self._seconds).encode() + b"\n")
            self._turns_taken += self._warm
            self._warm, self._seconds = True, []
            if self._turns_taken == TURNS:
                self._connection.close()
                self.turns = ""  # further steps are not timed

    def _wait_for_turn(self) -> None:
        if self._connection is None:
            self._connection = socket.socket(socket.AF_UNIX)
            self._connection.connect(self.turns)
        assert self._connection.recv(1) == b"."
        self._schedule(os.SCHED_RR, 1)

    def _schedule(self, policy: int, priority: int) -> None:
        for thread in os.listdir("/proc/self/task") if self.realtime else []:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def _rank_program(module_file: str, name: str) -> None:
    here = str(Path(__file__).parent)
    sys.path[:] = [*(path for path in sys.path if path != here), here]  # last: a client may have a module `proc`
    sys.modules["clients"] = sys.modules["__main__"]
    if os.getppid() == json.loads(os.environ[CONTEXT])["parent"]:  # not started by a launcher: ends with the test
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    rank = Rank.current()
    try:
        import torch

        spec = importlib.util.spec_from_file_location(Path(module_file).stem, module_file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        args = torch.load(rank.folder / "args", weights_only=False)
        result = getattr(module, name)(rank, *args)
        torch.save(result, rank.folder / f"part.{rank.rank}")
        (rank.folder / f"part.{rank.rank}").rename(rank.folder / f"result.{rank.rank}")
    finally:
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()


# ---- the test's side ----------------------------------------------------------------------------------------------


def assert_equal(actual: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Fail unless both hold the same numbers, bit by bit or within a tolerance; a test says why it needs one.

    Args:
        actual: Tensors, numbers, text, and lists and mappings of them.
        expected: The same.
        rtol: The allowed difference, relative to what is expected.
        atol: The allowed difference that does not depend on it.
    """
    import torch

    def compare(a: Any, b: Any, where: str) -> None:
        if isinstance(b, Mapping):
            assert list(a) == list(b), f"{where}: {list(a)} instead of {list(b)}"
            for key in b:
                compare(a[key], b[key], f"{where}[{key!r}]")
        elif isinstance(b, (list, tuple)):
            assert len(a) == len(b), f"{where}: {len(a)} elements instead of {len(b)}"
            for number, (x, y) in enumerate(zip(a, b, strict=True)):
                compare(x, y, f"{where}[{number}]")
        elif isinstance(b, (torch.Tensor, float)):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}")
        else:
            assert a == b, f"{where}: {a!r} instead of {b!r}"

    compare(actual, expected, "")


class Client:
    """A library that people run on Phalanx, in an environment of its own.

    Args:
        requirements: What pip installs; the client itself comes first. Its name is what skipped tests show.
        options: Further options of pip. Without any, only wheels are installed.
        build: What has to be installed before, to build the client from its sources.
        check: A line of Python that has to work in the environment; else the tests are skipped.
    """

    def __init__(
        self,
        *requirements: str,
        options: Sequence[str] = ("--only-binary", ":all:"),
        build: Sequence[str] = (),
        check: str = "",
    ) -> None:
        self.requirements, self.options, self.build, self.check = requirements, list(options), build, check
        self.name = requirements[0].split("=")[0].split("<")[0].split(">")[0].split("[")[0].strip()
        self._why = ""

    @property
    def folder(self) -> Path:
        import torch

        import compiled

        what = [*self.requirements, *self.options, *self.build, self.check, torch.__version__, sys.prefix, sys.version]
        return compiled.folder("clients") / f"{self.name}-{hashlib.sha256(repr(what).encode()).hexdigest()[:12]}"

    @property
    def python(self) -> Path:
        """The interpreter of the environment, which is made if it is not there. Skips the test if it cannot be."""
        import pytest

        folder = self.folder
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._why and not (folder / "version").exists():
                self._why = self._install(folder)
                if self._why:
                    shutil.rmtree(folder)
        if self._why:
            pytest.skip(f"{self.name} cannot be installed here: {self._why}")
        return folder / "bin" / "python"

    @property
    def version(self) -> str:
        assert self.python
        return (self.folder / "version").read_text()

    def _install(self, folder: Path) -> str:
        """Makes the environment; returns why that failed, or nothing."""
        import torch

        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = folder / "bin" / "python"
        places = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        own = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
        )
        lines = [f"import site; site.addsitedir({place!r})\n" for place in places]
        Path(own.stdout.strip(), "of_the_tests.pth").write_text("".join(lines))
        constraints = folder / "constraints"
        constraints.write_text(f"torch=={torch.__version__}\n")
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", constraints]
        try:
            if self.build:
                subprocess.run([*command, *self.build], capture_output=True, timeout=600)
            done = subprocess.run(
                [*command, *self.options, *self.requirements], capture_output=True, text=True, timeout=600
            )
        except subprocess.TimeoutExpired:
            return "pip was not done after 600 s"
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return errors[-1] if errors else done.stderr[-300:]
        code = f"import torch; assert torch.__file__ == {torch.__file__!r}, torch.__file__; {self.check or 'pass'}"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            return done.stderr.strip().splitlines()[-1]
        code = f"import importlib.metadata as m; print(m.version({self.name!r}), end='')"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        (folder / "version").write_text(done.stdout)
        return ""

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        backends: Sequence[str] = BACKENDS,
        ranks: int = 2,
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str | Path] = (),
        seconds: float = 240,
        what: str = "",
    ) -> dict[str, list[Any]]:
        """Calls function(rank, *args) in `ranks` processes for each backend, all at a time.

        With the option --times the two backends take turns at `rank.steps`, and a row of times is kept.

        Args:
            function: A function of a test file.
            args: Given to the function: tensors, and what is made of plain Python.
            backends: What `rank.backend` is, in turn.
            ranks: How many processes there are for each backend.
            env: Environment variables of the processes.
            launcher: A command that starts all ranks of a backend, such as ["mpiexec", "-n", "2", client.python].
                Without it each rank is started with the variables that torchrun sets.
            seconds: A deadline for everything; with --times five times as many.
            what: What the times are of; the name of the function says it otherwise.

        Returns:
            What the function returned, by the backend and the number of the rank.

        Raises:
            RanksFailed: With the traceback and the output of each rank that raised, died or was still running.
        """
        import pytest

        import ranks as of_tests
        from c10d_groups import has_compiler

        python = self.python
        if "phalanx" in backends and not has_compiler():
            pytest.skip("needs a C++ compiler")
        of_tests._runs += 1  # the fixture looks for what the test leaves behind
        timed = in_turns and len(backends) == 2
        file = sys.modules[function.__module__].__file__
        command = [*(launcher or [python]), __file__, file, function.__name__]
        seconds *= 5 if timed else 1
        deadline = time.monotonic() + seconds * float(os.environ.get("PHX_TEST_TIMEOUT_SCALE", "1"))
        with contextlib.ExitStack() as stack:
            worlds = []
            for backend in backends:
                folder = tempfile.TemporaryDirectory(prefix="phx-client-", ignore_cleanup_errors=True)
                worlds.append(_World(backend, Path(stack.enter_context(folder)), ranks, timed))
                stack.callback(worlds[-1].close)
                worlds[-1].start(command, bool(launcher), args, env or {})
            if timed:
                if row := _take_turns(worlds, deadline):
                    of_client = {"client": self.name, "version": self.version, "case": what or function.__name__}
                    times.append({**of_client, "ranks": ranks, **row})
                else:  # the ranks that have not failed wait for their turn
                    deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and sum(world.ended() for world in worlds) < len(worlds):
                time.sleep(0.05)
            failures = {f"{rank} of {world.backend}": text for world in worlds for rank, text in world.failures()}
            if failures:
                raise of_tests.RanksFailed(f"{self.name}, {function.__name__}: a rank failed", failures)
            return {world.backend: world.results() for world in worlds}


@dataclass
class _World:
    """The processes of one backend, as the test sees them."""

    backend: str
    folder: Path
    size: int
    timed: bool
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)
    files: list[Any] = field(default_factory=list)
    listener: socket.socket | None = None
    first_failure: float = 0.0

    def start(self, command: Sequence[Any], launched: bool, args: Sequence[Any], env: Mapping[str, str]) -> None:
        import torch

        from c10d_groups import native_folder
        from ranks import DEFAULT_ENV

        torch.save(args, self.folder / "args")
        context: dict[str, Any] = {"backend": self.backend, "size": self.size, "folder": str(self.folder), "turns": ""}
        if self.timed:
            context["turns"] = str(self.folder / "turns")
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(context["turns"])
            self.listener.listen()
            self.listener.settimeout(0.05)
        context |= {"parent": os.getpid(), "realtime": self.timed and realtime}
        home = self.folder / "home"
        home.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        every = {**os.environ, **DEFAULT_ENV, "PHALANX_NATIVE": native_folder(), CONTEXT: json.dumps(context)}
        # Clients write into the user's folder, look for GPUs, and ask their site for files that nobody needs here.
        every |= {
            "HOME": home,
            "XDG_CACHE_HOME": home,
            "TMPDIR": home,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        for rank in range(1 if launched else self.size):
            of_rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": self.size, "RANK": rank}
            of_rank |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self.size}
            self.files.append(open(self.folder / f"output.{rank}", "wb"))  # noqa: SIM115 - closed in close()
            self.processes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    env={key: str(value) for key, value in {**every, **({} if launched else of_rank), **env}.items()},
                    cwd=home,
                    stdin=subprocess.DEVNULL,
                    stdout=self.files[-1],
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def connected(self) -> bool:
        """Whether all ranks have come to their first step."""
        assert self.listener is not None
        if len(self.connections) < self.size:
            with contextlib.suppress(TimeoutError):
                self.connections.append(self.listener.accept()[0])
        return len(self.connections) == self.size

    def turn(self, deadline: float) -> list[float]:
        """Lets the ranks take the steps of a turn. Returns the time of each on the slowest rank, or raises OSError."""
        for connection in self.connections:
            connection.sendall(b".")
        of_ranks = []
        for connection in self.connections:
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            line = b""
            while not line.endswith(b"\n"):
                part = connection.recv(1 << 16)
                if not part:
                    raise ConnectionError("a rank has ended")
                line += part
            of_ranks.append(json.loads(line))
        return [max(step) for step in zip(*of_ranks, strict=True)]

    def ended(self) -> bool:
        """Whether all ranks have; those that run long after another has failed are ended."""
        codes = [process.poll() for process in self.processes]
        if any(codes) and not self.first_failure:
            self.first_failure = time.monotonic()
        if self.first_failure and time.monotonic() > self.first_failure + GRACE_SECONDS:
            self.kill()
        return None not in codes

    def failures(self) -> Iterator[tuple[int, str]]:
        """The ranks that failed, each with why and what it printed."""
        for rank in range(self.size):
            problems = []
            if rank < len(self.processes) and (code := self.processes[rank].poll()) != 0:
                problems.append("was still running" if code is None else f"ended with exit status {code}")
            elif not (self.folder / f"result.{rank}").exists():
                problems.append("ended before the function returned")
            if problems:
                output = self.folder / f"output.{min(rank, len(self.processes) - 1)}"
                yield rank, "\n".join([*problems, "output:", output.read_text(errors="replace")[-20000:] or "(none)"])

    def results(self) -> list[Any]:
        import torch

        return [torch.load(self.folder / f"result.{rank}", weights_only=False) for rank in range(self.size)]

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the rank has started, too
            process.wait()

    def close(self) -> None:
        self.kill()
        for each in [*self.connections, *self.files, *([self.listener] if self.listener else [])]:
            each.close()


def _take_turns(worlds: Sequence[_World], deadline: float) -> dict[str, float]:
    """Gives each backend its turns until the steps are done. Returns nothing if a rank has failed."""
    while sum(world.connected() for world in worlds) < len(worlds):
        if time.monotonic() > deadline or any(world.ended() for world in worlds):
            return {}
    found: dict[str, list[float]] = {world.backend: [] for world in worlds}
    try:
        for world in worlds:
            world.turn(deadline)  # the steps that warm up
        for number in range(TURNS):
            for world in worlds if number % 2 else reversed(worlds):
                found[world.backend].append(median(world.turn(deadline)))
    except OSError:
        return {}
    first, second = (found[world.backend] for world in worlds)
    ratio = median(a / b for a, b in zip(first, second, strict=True))
    names = [world.backend for world in worlds]
    milliseconds = {f"{name}_ms": round(1000 * median(found[name]), 3) for name in names}
    return {**milliseconds, f"{names[0]}_over_{names[1]}": round(ratio, 3)}


def print_times(path: Path, write: Callable[[str], Any]) -> None:
    """Writes the rows that were kept into a file, and as a table."""
    import torch

    about = {"torch": torch.__version__, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    about |= {"realtime": realtime, "turns": TURNS, "steps_of_a_turn": STEPS_OF_A_TURN}
    path.write_text(json.dumps({"about": about, "rows": times}, indent=1) + "\n")
    write(f"{'client':16} {'version':10} {'case':36} {'phalanx ms':>10} {'gloo ms':>10} {'ratio':>6}")
    for row in times:
        line = "{client:16} {version:10} {case:36} {phalanx_ms:10.2f} {gloo_ms:10.2f} {phalanx_over_gloo:6.2f}"
        write(line.format(**row))


if __name__ == "__main__":
    _rank_program(*sys.argv[1:])
