"""Runs commands as people and scripts do: on a terminal, without one, with Ctrl-C, and with a reader that goes away.

Everything a command starts has a mark in its environment, and its temporary files have a folder of their own: so what
it leaves behind is seen.
"""

import contextlib
import errno
import fcntl
import os
import re
import select
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

DEADLINE_SECONDS = 120
COLUMNS = 100
PHALANX = [sys.executable, "-m", "phalanx.core._cli"]
_MARK = "PHX_STARTED_BY"
# Makes the terminal that is its standard input the one of its session, which Ctrl-C needs, and becomes the command.
_ON_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell may have started this in the background, where it is ignored
os.execvp(sys.argv[1], sys.argv[1:])
"""


@dataclass
class Ended:
    """What a command printed, and what it left.

    Attributes:
        status: Its exit status.
        out: On standard output; on a terminal everything.
        err: On standard error.
        processes: Of those that it started, the ones that still run.
        files: Temporary files that are still there.
    """

    status: int
    out: str
    err: str = ""
    processes: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.out + self.err


def marked(mark: str) -> list[int]:
    """The processes that have a mark in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if f"{_MARK}={mark}".encode() in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


class Command:
    """`phalanx` with some arguments."""

    def __init__(self, *words: str, **variables: str) -> None:
        self.words = [*PHALANX, *words]
        self.mark = uuid.uuid4().hex
        self.folder = tempfile.TemporaryDirectory(prefix="phx-terminals-")
        self.env = {**os.environ, "TERM": "xterm", _MARK: self.mark, "TMPDIR": self.folder.name, **variables}
        self.env.pop("NO_COLOR", None)
        self.env |= {name: variables[name] for name in ("NO_COLOR",) if name in variables}

    def ended(self, status: int, out: str, err: str = "") -> Ended:
        deadline = time.monotonic() + 5  # a process that was killed may still be on its way out
        while (processes := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        files = sorted(
            name for name in os.listdir(self.folder.name) if not name.startswith("torchinductor_")
        )  # a cache
        self.folder.cleanup()
        return Ended(status, out, err, processes, files)


def without_terminal(*words: str, **variables: str) -> Ended:
    """Standard output and error are pipes, and nothing can be read."""
    command = Command(*words, **variables)
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command.words, env=command.env, timeout=DEADLINE_SECONDS, check=False, **pipes)
    return command.ended(done.returncode, done.stdout, done.stderr)


def closed_pipe(*words: str, **variables: str) -> Ended:
    """As `phalanx ... | head -c 1`."""
    command = Command(*words, **variables)
    with subprocess.Popen(
        command.words, env=command.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        first = os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        errors = process.stderr.read()
    return command.ended(process.returncode, first.decode(), errors.decode())


def on_terminal(*words: str, ctrl_c: str | Callable[[str, list[int]], bool] | None = None, **variables: str) -> Ended:
    """On a terminal of 100 columns.

    Args:
        words: Arguments of `phalanx`.
        ctrl_c: The text after which Ctrl-C is pressed, or a function of the text so far and the processes that runs,
            which says whether it is time.
        variables: Of the environment.
    """
    command = Command(*words, **variables)
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (40, COLUMNS))
    modes = termios.tcgetattr(slave)
    modes[3] &= ~termios.ECHO  # no "^C" among what the command prints
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_TERMINAL, *command.words],
        env=command.env,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    fcntl.fcntl(master, fcntl.F_SETFL, os.O_NONBLOCK)
    text, deadline = b"", time.monotonic() + DEADLINE_SECONDS
    try:
        while time.monotonic() < deadline:
            select.select([master], [], [], 0.05)
            try:
                text += os.read(master, 65536)
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno != errno.EIO:  # the other end is closed
                    raise
                break
            seen = text.decode(errors="replace")
            if ctrl_c is not None and (
                ctrl_c in seen if isinstance(ctrl_c, str) else ctrl_c(seen, marked(command.mark))
            ):
                os.write(master, b"\x03")
                ctrl_c = None
        status = process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return command.ended(status, text.decode(errors="replace").replace("\r\n", "\n"))


def shown(text: str) -> str:
    """What a terminal has on it in the end: without colours, and without what was written over."""
    lines = []
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            if part.startswith("\x1b[K"):  # erase what is there
                cells.clear()
            part = re.sub(r"\x1b\[[A-Z]", "", part)
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return "\n".join(lines)
