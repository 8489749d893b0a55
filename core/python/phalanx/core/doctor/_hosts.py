"""What groups that span hosts need: UCX, an address, and both tried by two processes that count as two hosts.

UCX is loaded in processes of their own, so that a network driver that hangs or crashes harms nothing.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.core.doctor._finding import OK, WARN, Finding
from phalanx.core.doctor._host import Host

_RANK = "from phalanx.core.doctor import _hosts_rank; import sys; _hosts_rank.main(int(sys.argv[1]), sys.argv[2])"
_SECONDS = 30
_INSTALL = "groups that span hosts need it: apt install libucx0, or pip install libucx-cu12; within a host nothing does"


def check_hosts(host: Host) -> Iterator[Finding]:
    """Silent where the library cannot be loaded: see `library`."""
    try:
        from phalanx.core import _lib  # noqa: F401
    except ImportError:
        return
    try:
        found, trial = _try()
    except (OSError, ValueError) as error:
        advice = "UCX, or a driver that it loads, may hang or crash; UCX_TLS=tcp tries it with TCP alone"
        yield Finding(WARN, "ucx", f"could not be tried: {error}", advice)
        return
    yield _ucx(found)
    yield _address(found)
    if trial is not None:
        yield _two_hosts(trial)


def _ucx(found: dict[str, str]) -> Finding:
    if found["path"] and not found["problem"]:
        return Finding(OK, "ucx", f"{found['version']}, {found['path']}; transports {found['transports'] or 'none'}")
    if found["path"]:
        return Finding(WARN, "ucx", f"{found['path']}: {found['problem']}", "see UCX_TLS and UCX_NET_DEVICES")
    if os.environ.get("PHALANX_UCX"):
        return Finding(WARN, "ucx", found["problem"], "unset PHALANX_UCX, or give the path of a libucp.so.0")
    return Finding(OK, "ucx", "not found", _INSTALL)


def _address(found: dict[str, str]) -> Finding:
    name, interface = "host address", "PHALANX_SOCKET_IFNAME"
    address, problem = found["address"], found["address problem"]
    if problem:
        return Finding(WARN, name, problem, f"name an interface in {interface}, or unset it and GLOO_SOCKET_IFNAME")
    if address.startswith(("127.", "[::1]")):
        advice = f"ranks of other hosts cannot connect: name an interface in {interface}"
        return Finding(OK, name, f"{address}, of the loopback; no other is known", advice)
    advice = f"{interface} names another interface; with a TCP store, the one on the way to its server is taken"
    return Finding(OK, name, f"ranks of other hosts connect to {address}", advice)


def _two_hosts(trial: dict[str, Any]) -> Finding:
    if trial["error"]:
        advice = "compare the lines above; UCX_TLS=tcp, or UCX_NET_DEVICES, may name a network that works"
        return Finding(WARN, "two hosts", f"two processes cannot work together over UCX: {trial['error']}", advice)
    text = f"two processes, as two hosts, add 1 MiB over UCX in {trial['us']:.0f} us"
    return Finding(OK, "two hosts", text)


def _try() -> tuple[dict[str, str], dict[str, Any] | None]:
    """What rank 0 found of UCX, and what came of the trial: of rank 0, unless rank 1 alone says that it failed.

    Raises:
        OSError: A process could not be started, did not end well or hangs.
        ValueError: It printed something else.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryDirectory(prefix="phalanx-doctor-") as folder, contextlib.ExitStack() as running:
        ranks = []
        for rank in range(2):
            command = [sys.executable, "-P", "-c", _RANK, str(rank), str(Path(folder, "store"))]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
                start_new_session=True,
            )
            ranks.append(running.enter_context(process))
            running.callback(process.kill)
        answers = [_answers(process) for process in ranks]
    trials = [answer[1] for answer in answers if len(answer) > 1]
    failed = [trial for trial in trials if trial["error"]]
    return answers[0][0], next(iter(failed or trials), None)


def _answers(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    try:
        output, errors = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"timed out: a process has not ended after {_SECONDS} s") from None
    if process.returncode < 0:
        raise OSError(f"a process was ended by {signal.Signals(-process.returncode).name}")
    if process.returncode > 0:
        raise OSError((errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1])
    answers = [json.loads(line) for line in output.splitlines() if line.startswith("{")]  # UCX may print warnings
    if not answers:
        raise ValueError(f"a process printed {output!r}")
    return answers
