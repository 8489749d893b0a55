"""One rank process: it sleeps in recv until the benchmark asks it for something."""

import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from typing import Any

from . import _native
from ._engine import Engine, Measured, Request, Seat

_PR_SET_PDEATHSIG = 1
_REALTIME_PRIORITY = 50
# Where mpiexec says which rank this is.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_ENGINES = {
    "phalanx": "_engine_phalanx",
    "python": "_engine_python",
    "gloo": "_engine_gloo",
    "gloo-unpinned": "_engine_gloo",
    "mpich": "_engine_mpi",
    "openmpi": "_engine_mpi",
    "impi": "_engine_mpi",
    "oneccl": "_engine_oneccl",
    "limits": "_engine_limits",
}


def main(text: str) -> None:
    """Serve until the benchmark says "end" or is gone.

    Args:
        text: JSON from `_team`.
    """
    given: dict[str, Any] = json.loads(text)
    # A rank outlives nobody: neither the benchmark nor the mpiexec that started it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(given["socket"])
    rank = given["rank"] if given["rank"] is not None else _rank_of_launcher()
    cores: list[int] = given["cores"]
    # Before any library is loaded: its threads inherit both.
    os.sched_setaffinity(0, {cores[rank % len(cores)]} if given["pinned"] else cores)
    if given["realtime"]:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_REALTIME_PRIORITY))
    seat = Seat(rank=rank, **given["seat"])
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        print(json.dumps({"rank": rank, "pid": os.getpid()}), file=stream, flush=True)
        _serve(stream, seat)


def _rank_of_launcher() -> int:
    for name in _RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    raise RuntimeError(f"the launcher sets none of {', '.join(_RANK_VARIABLES)}")


def _serve(stream: Any, seat: Seat) -> None:
    server = _Server(seat)
    for line in stream:
        command = json.loads(line)
        try:
            answer = server.answer(**command)
        except _native.UnsupportedError as error:
            answer = {"absent": str(error)}
        except Exception as error:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            wrong = isinstance(error, _native.WrongResultError)
            answer = {"error": f"{'' if wrong else type(error).__name__ + ': '}{error}"}
        print(json.dumps(answer), file=stream, flush=True)
        if command["do"] == "end":
            break
    else:
        os._exit(1)  # the benchmark is gone; so may be the other ranks, for whom an orderly end would wait
    sys.stdout.flush()
    sys.stderr.flush()


def _switches() -> int:
    """How often this thread has given its core away, or had to."""
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_nvcsw + used.ru_nivcsw


class _Server:
    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.engine: Engine | None = None
        self.measured: dict[str, Measured] = {}

    def answer(self, do: str, **arguments: Any) -> dict[str, Any]:
        if do == "invite":
            module = importlib.import_module(f".{_ENGINES[self.seat.participant]}", __package__)
            self.engine = module.engine(self.seat)
            assert self.engine is not None
            return {"invitation": self.engine.invite() if self.seat.rank == 0 else ""}
        assert self.engine is not None
        if do == "start":
            return {"versions": self.engine.start(arguments["invitation"])}
        if do == "prepare":
            request = Request(**arguments)
            self.measured[request.variant] = self.engine.prepare(request)
            return {}
        if do == "round":
            before, started = _switches(), time.perf_counter_ns()
            times = self.measured[arguments.pop("variant")].round(**arguments)
            return {"times": times, "wall_ns": time.perf_counter_ns() - started, "switches": _switches() - before}
        if do == "finish":
            self._close()
            return {}
        if do == "probe":
            return self.engine.probe(**arguments)
        if do == "end":
            self._close()
            self.engine.end()
            return {}
        raise ValueError(f"no command {do!r}")

    def _close(self) -> None:
        while self.measured:
            self.measured.popitem()[1].close()
