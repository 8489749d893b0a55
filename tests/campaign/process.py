"""The processes of one case: forked ranks, what they say, a deadline, and the stacks of those that hang."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


@dataclass
class Process:
    """A forked process that says lines of JSON."""

    rank: int
    pid: int
    pidfd: int
    pipe: int
    output: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    exit: int | None = None  # as subprocess counts: -9 is SIGKILL
    hung: bool = False
    unread: bytes = b""

    def said(self, event: str) -> dict[str, Any] | None:
        return next((each for each in self.events if each["event"] == event), None)

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, 65536):
                *lines, self.unread = (self.unread + data).split(b"\n")
                self.events += [json.loads(line) for line in lines]

    def signal(self, number: int) -> None:
        if self.exit is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def reap(self) -> None:
        self.exit = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.read()
        os.close(self.pidfd)
        os.close(self.pipe)


def start(rank: int, output: Path, body: Callable[[int], int]) -> Process:
    """Forks a process that runs body(pipe) and ends with what it returns."""
    reader, writer = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            _begin(parent, output)
            status = body(writer)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    os.set_blocking(reader, False)
    return Process(rank, pid, os.pidfd_open(pid), reader, output)


def _begin(parent: int, output: Path) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request above
        os._exit(1)
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:  # pipes of the ranks forked before
        with contextlib.suppress(OSError):
            if fd > 2 and os.readlink(f"/proc/self/fd/{fd}").startswith("anon_inode:[pidfd]"):
                os.close(fd)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def run(processes: list[Process], seconds: float, watch: Callable[[], None]) -> None:
    """Until all have ended, or the deadline is over: then they print where they are, and are killed.

    watch: called whenever one has said something or has ended.
    """
    deadline = time.monotonic() + seconds
    try:
        for _ in _until_ended(processes, deadline):
            watch()
        hung = [each for each in processes if each.exit is None]
        for each in hung:
            each.hung = True
            each.signal(signal.SIGUSR1)
        if hung:
            time.sleep(0.5)  # faulthandler prints while the rest goes on
    finally:
        for each in processes:
            if each.exit is None:
                each.signal(signal.SIGKILL)
                each.reap()


def _until_ended(processes: list[Process], deadline: float) -> Iterator[None]:
    while running := [each for each in processes if each.exit is None]:
        poll = select.poll()
        for each in running:
            poll.register(each.pidfd, select.POLLIN)
            if not (each.events and each.events[-1]["event"] == "done"):
                poll.register(each.pipe, select.POLLIN)
        left = deadline - time.monotonic()
        ready = {fd for fd, _ in poll.poll(max(0.0, left) * 1000)}
        if not ready:
            return
        for each in running:
            if each.pidfd in ready:
                each.reap()
            elif each.pipe in ready:
                each.read()
        yield


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return text[text.rindex(")") + 2] == "T"
    return False
