"""Starts the ranks, watches them, and sees to it that none is left when the demo ends, however it ends."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time

from phalanx.tools._torch_compat import TCPStore
from phalanx.tools.demo.options import Options
from phalanx.tools.demo.rank import NOBODY_READS, Job, error_key
from phalanx.tools.demo.show import say

_GRACE_SECONDS = 10.0  # for the other ranks to notice that one has failed, and to say so
_END_SECONDS = 5.0  # for a rank that was told to end
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # one core for each rank


def launch(options: Options) -> int:
    """Run the demo's ranks to their end. A signal that raises here ends them.

    Args:
        options: Of the run.

    Returns:
        Exit status: 0, or 1 if a rank failed.

    Raises:
        BrokenPipeError: Nobody reads the output of rank 0.
    """
    cores = _cores(options)
    where = f"each pinned to a core: {', '.join(map(str, cores))}" if cores else "not pinned"
    say(f"ranks: {options.ranks}, {where}")
    with _Ranks(options, cores) as ranks:
        try:
            ranks.watch()
        except KeyboardInterrupt:
            say()
            raise
        failures = ranks.failures()
    for text in failures:
        print(f"phalanx demo: {text}", file=sys.stderr)
    return 1 if failures else 0


class _Ranks:
    """The processes, and the store through which they meet. Leaving the context ends those that still run."""

    def __init__(self, options: Options, cores: list[int]) -> None:
        self._options = options
        self._cores = cores
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: list[int] = []  # ranks, in this order

    def __enter__(self) -> "_Ranks":
        # The socket is made here, so that nobody but this machine can reach it.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        try:
            for rank in range(self._options.ranks):
                self._processes.append(self._start(rank, port))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def watch(self) -> None:
        """Wait for all ranks; once one has failed, for the others only so long."""
        deadline = None
        while running := self._running():
            with contextlib.ExitStack() as stack:
                poll = select.poll()
                for rank in running:
                    pidfd = os.pidfd_open(self._processes[rank].pid)
                    stack.callback(os.close, pidfd)
                    poll.register(pidfd, select.POLLIN)
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not poll.poll(None if left is None else left * 1000):
                    return
            self._collect()
            if any(self._processes[rank].returncode == NOBODY_READS for rank in self._ended):
                raise BrokenPipeError
            if deadline is None and any(self._processes[rank].returncode for rank in self._ended):
                deadline = time.monotonic() + _GRACE_SECONDS

    def failures(self) -> list[str]:
        """What ended the ranks that failed, the likeliest cause first."""
        by_signal, by_error = [], []
        late = set(self._running())
        for rank in [*self._ended, *late]:
            process = self._processes[rank]
            who = f"rank {rank} (pid {process.pid})"
            if rank in late:
                by_error.append(f"{who} did not end after another rank had failed")
            elif process.returncode < 0:
                by_signal.append(f"{who} was killed by {signal.Signals(-process.returncode).name}")
            elif process.returncode and self._store.check([error_key(rank)]):
                by_error.append(f"{who}: {self._store.get(error_key(rank)).decode()}")
            elif process.returncode:
                by_error.append(f"{who} ended with exit status {process.returncode}")
        return by_signal + by_error

    def _start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        core = self._cores[rank] if self._cores else -1
        job = Job(rank, port, os.getpid(), core, self._options)
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **_ENVIRONMENT}
        # -P: a file of the current directory must not replace a module.
        command = [sys.executable, "-P", "-m", "phalanx.tools.demo.rank", job.to_text()]
        # The rank inherits both, so all its threads have them from the start. A terminal sends Ctrl-C to every process,
        # and this one alone is to answer it.
        allowed, unblocked = os.sched_getaffinity(0), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            if core >= 0:
                os.sched_setaffinity(0, {core})
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        finally:
            os.sched_setaffinity(0, allowed)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def _running(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.returncode is None]

    def _collect(self) -> None:
        for rank in self._running():
            if self._processes[rank].poll() is not None:
                self._ended.append(rank)

    def _end(self) -> None:
        for rank in self._running():
            self._processes[rank].terminate()  # that leaves nothing behind: shared memory of Phalanx has no name
        deadline = time.monotonic() + _END_SECONDS
        for rank in self._running():
            process = self._processes[rank]
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _cores(options: Options) -> list[int]:
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[: options.ranks] if options.pin and len(allowed) >= options.ranks else []
