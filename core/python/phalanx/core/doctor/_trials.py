"""What ranks do, tried: by system calls of this process and another one, by two ranks, and by two hosts."""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.core.doctor._host import FAIL, OK, WARN, Finding, Host, core_module, system_call, system_call_number

# ---- memory, descriptors, credentials, waking up, noticing an end -------------------------------

_PEER = Path(__file__).with_name("_probes.py")
_SECONDS = 10  # after which a trial has failed
_FUTEX_WAIT = 0  # linux/futex.h


def check_pidfd(host: Host) -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
        return Finding(OK, "pidfd", "works: a dead rank is noticed at once")
    except (AttributeError, OSError) as error:
        advice = "Linux 5.3 or later has it; a dead rank is noticed by its closed socket instead"
        return Finding(WARN, "pidfd", f"does not work ({error})", advice)


def check_memfd(host: Host) -> Finding:
    try:
        with _sealed_memfd():
            return Finding(OK, "memfd", "works, with seals")
    except (AttributeError, OSError) as error:
        advice = "symmetric memory is made of memfds: allow memfd_create (seccomp; sysctl vm.memfd_noexec below 2)"
        return Finding(FAIL, "memfd", f"does not work ({error})", advice)


def check_sockets(host: Host) -> Finding:
    try:
        _try_abstract_socket()
        return Finding(OK, "abstract sockets", "work, and pass descriptors and credentials")
    except OSError as error:
        advice = "ranks meet through abstract Unix sockets: allow AF_UNIX in the sandbox"
        return Finding(FAIL, "abstract sockets", f"do not work ({error})", advice)


def check_processes(host: Host) -> Finding:
    name = "two processes"
    try:
        _meet()
        return Finding(OK, name, "share a memfd, and one wakes the other by futex")
    except _NoPeerError as error:
        advice = "allow this process to start another one, so that it can be tried; ranks may work nevertheless"
        return Finding(WARN, name, f"could not be tried: {error}", advice)
    except (AttributeError, OSError) as error:
        advice = "ranks need this: allow it in the sandbox or container; the other lines say what failed"
        return Finding(FAIL, name, f"cannot communicate: {error}", advice)


class _NoPeerError(Exception):
    """A second process could not be started."""


@contextlib.contextmanager
def _sealed_memfd() -> Iterator[int]:
    fd = os.memfd_create("phalanx-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        with mmap.mmap(fd, mmap.PAGESIZE) as block:
            block[0] = 0
        with contextlib.suppress(PermissionError):
            os.ftruncate(fd, 0)
            raise OSError(errno.EINVAL, "seals have no effect")
        yield fd
    finally:
        os.close(fd)


def _try_abstract_socket() -> None:
    with (
        _listener("probe") as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
        open(os.devnull, "rb") as sent,
    ):
        client.settimeout(_SECONDS)
        client.connect(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(_SECONDS)
            _check_credentials(accepted, os.getpid())
            socket.send_fds(client, [b"x"], [sent.fileno()])
            _, received, _, _ = socket.recv_fds(accepted, 1, 1)
            for fd in received:
                os.close(fd)
            if len(received) != 1:
                raise OSError(errno.EPROTO, "no descriptor arrived")


def _meet() -> None:
    """As two ranks do: a second process gets memory through a socket, writes to it, and wakes this one."""
    with _sealed_memfd() as fd, _listener("meet") as server:
        with _start_peer(os.fsdecode(server.getsockname()[1:])) as peer:
            try:
                _await_connection(server, peer)
                accepted, _ = server.accept()
                with accepted:
                    _check_credentials(accepted, peer.pid)
                    socket.send_fds(accepted, [b"x"], [fd])
                    _await_wake(fd)
                _, errors = peer.communicate(timeout=_SECONDS)
                if peer.returncode != 0:
                    raise OSError(errno.EPROTO, _reason(errors, peer.returncode))
            except subprocess.TimeoutExpired:
                raise TimeoutError(errno.ETIMEDOUT, "the second process does not end") from None
            finally:
                peer.kill()


def _start_peer(name: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-I", "-S", str(_PEER), "peer", name, str(system_call_number("futex"))]
    try:
        return _start(command)
    except OSError as error:
        raise _NoPeerError(error) from None


def _start(command: list[str], **how: Any) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace", **how
    )


def _listener(purpose: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.settimeout(_SECONDS)
        server.bind(f"\0phalanx-doctor-{purpose}-{os.getpid()}-{time.monotonic_ns()}")
        server.listen(1)
    except OSError:
        server.close()
        raise
    return server


def _await_connection(server: socket.socket, peer: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + _SECONDS
    while not select.select([server], [], [], 0.02)[0]:
        if peer.poll() is not None:
            _, errors = peer.communicate()
            raise OSError(errno.EPROTO, _reason(errors, peer.returncode))
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "the second process does not connect")


def _check_credentials(connection: socket.socket, pid: int) -> None:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    its_pid, its_uid, _ = struct.unpack("3i", raw)
    if (its_pid, its_uid) != (pid, os.geteuid()):
        text = f"SO_PEERCRED names pid {its_pid} of user {its_uid} instead of pid {pid} of user {os.geteuid()}"
        raise OSError(errno.EPROTO, text)


def _await_wake(fd: int) -> None:
    """The peer writes 1 into the second word, then wakes who sleeps on the first, which stays 0."""
    words = (ctypes.c_uint32 * 2).from_buffer(mmap.mmap(fd, mmap.PAGESIZE))  # they keep the mapping, and are its end
    timeout = (ctypes.c_long * 2)(_SECONDS, 0)  # a timespec
    try:
        system_call("futex", ctypes.byref(words), _FUTEX_WAIT, 0, ctypes.byref(timeout), None, 0)
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, "no futex wake came from the second process") from None
    if words[1] != 1:
        raise OSError(errno.EPROTO, "the memory does not have what the second process wrote")


def _reason(errors: str, status: int) -> str:
    """Why a process has failed: the last line that it wrote to stderr."""
    return (errors.strip().splitlines() or [f"exit status {status}"])[-1]


# ---- two ranks, as threads of this process ---------------------------------------------------------

_TRIAL_MS = 20_000
_TRIAL_COUNT = 1024


def check_trial(host: Host) -> Finding | None:
    """Silent where the library cannot be loaded: see `library`."""
    if core_module() is None:
        return None
    from phalanx.core import MemoryStore, PhalanxError

    try:
        store = MemoryStore()
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda rank: _trial_rank(rank, store), range(2))
    except (PhalanxError, RuntimeError) as error:  # the latter: no thread could be started
        advice = "mend the other failures first; if there are none, please report this"
        return Finding(FAIL, "trial", f"self-test of 2 ranks failed: {error}", advice)
    if (first[:2], second[:2]) != ((3.0 * _TRIAL_COUNT, 2), (3.0 * _TRIAL_COUNT, 1)):
        text = f"self-test of 2 ranks gave wrong results: {first[:2]} and {second[:2]}"
        return Finding(FAIL, "trial", text, "please report this, with the whole output")
    text = f"self-test passed: 2 ranks, all_reduce and shared memory; host id {first[2]:#x}"
    return Finding(OK, "trial", text)


def _trial_rank(rank: int, store: Any) -> tuple[float, int, int]:
    """One rank: the sum of what it got, the byte that the other one wrote, and what it takes the host for."""
    from phalanx.core import World

    with World(rank, 2, store, timeout_ms=_TRIAL_MS, job="phalanx-doctor") as world:
        group = world.create_group("doctor", range(2))
        values = array("f", [rank + 1.0] * _TRIAL_COUNT)
        group.all_reduce(values, values)
        block = world.alloc(4096)
        block.buffer()[0] = rank + 1
        seen = int(group.rendezvous(block).buffer(1 - rank)[0])
        group.barrier()
        return sum(values), seen, world.host_id


# ---- two processes as two hosts, over UCX ----------------------------------------------------------

# UCX is loaded in processes of their own, so that a network driver that hangs or crashes harms nothing.
_HOST = "from phalanx.core.doctor import _trials; import sys; _trials.run_host(*map(int, sys.argv[1:3]), sys.argv[3])"
_HOST_SECONDS = 30
_INSTALL = "only groups that span hosts need it: apt install libucx0, or pip install libucx-cu12"


def check_hosts(host: Host) -> list[Finding]:
    """Silent where the library cannot be loaded: see `library`."""
    if core_module() is None:
        return []
    try:
        found, trial = _try_hosts()
    except (OSError, ValueError) as error:
        advice = "UCX, or a driver that it loads, may hang or crash; UCX_TLS=tcp tries it with TCP alone"
        return [Finding(WARN, "ucx", f"could not be tried: {error}", advice)]
    return [_ucx(found), _address(found), *([] if trial is None else [_two_hosts(trial)])]


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
        return Finding(OK, name, f"{address}, the loopback; no other is known", advice)
    advice = f"set {interface} for another interface; with a TCP store, the interface that reaches its server is used"
    return Finding(OK, name, f"ranks of other hosts connect to {address}", advice)


def _two_hosts(trial: dict[str, Any]) -> Finding:
    if trial["error"]:
        text = f"two processes that stand for two hosts failed over UCX: {trial['error']}"
        return Finding(WARN, "two hosts", text, "UCX_TLS=tcp, or UCX_NET_DEVICES, may name a network that works")
    text = f"two processes that stand for two hosts reduced 1 MiB over UCX in {trial['us']:.0f} us"
    return Finding(OK, "two hosts", text)


def _try_hosts() -> tuple[dict[str, str], dict[str, Any] | None]:
    """What rank 0 found of UCX, and what came of the trial: of rank 0, unless rank 1 alone says that it failed.

    Raises OSError if a process could not be started, did not end well or hangs, and ValueError if it printed something
    else.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryDirectory(prefix="phalanx-doctor-") as folder, contextlib.ExitStack() as running:
        ranks = []
        for rank in range(2):
            command = [sys.executable, "-P", "-c", _HOST, str(os.getpid()), str(rank), str(Path(folder, "store"))]
            process = running.enter_context(_start(command, env=environment, start_new_session=True))
            ranks.append(process)
            running.callback(process.kill)
        answers = [_answers(process) for process in ranks]
    trials = [answer[1] for answer in answers if len(answer) > 1]
    failed = [trial for trial in trials if trial["error"]]
    return answers[0][0], next(iter(failed or trials), None)


def _answers(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    try:
        output, errors = process.communicate(timeout=_HOST_SECONDS)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"timed out: a process has not ended after {_HOST_SECONDS} s") from None
    if process.returncode < 0:
        raise OSError(f"a process was ended by {signal.Signals(-process.returncode).name}")
    if process.returncode > 0:
        raise OSError(_reason(errors, process.returncode))
    answers = [json.loads(line) for line in output.splitlines() if line.startswith("{")]  # UCX may print warnings
    if not answers:
        raise ValueError(f"a process printed {output!r}")
    return answers


_HOST_MS = 10_000
_HOST_COUNT = 1 << 18  # float32: 1 MiB
_HOST_ROUNDS = 5


def run_host(parent: int, rank: int, path: str) -> None:
    """One of the two processes, which count as ranks of two hosts.

    Prints JSON objects, one a line: what is found of UCX, and, if it is found, what came of the trial.
    """
    from phalanx.core import PhalanxError
    from phalanx.core._ucx import describe
    from phalanx.core.commands import end_with_parent

    end_with_parent(parent)  # Ctrl-C may come before doctor has a note of this process
    found = describe()
    print(json.dumps(found), flush=True)
    if not found["path"] or found["problem"]:
        return
    try:
        print(json.dumps({"error": "", "us": _exchange(rank, path)}))
    except PhalanxError as error:
        print(json.dumps({"error": str(error)}))


def _exchange(rank: int, path: str) -> float:
    """Microseconds of a sum of 1 MiB, which sends as much in each direction."""
    from phalanx.core import FileStore, PhalanxError, World

    job, host_id = "phalanx-doctor", rank + 1
    with World(rank, 2, FileStore(path), timeout_ms=_HOST_MS, host_id=host_id, job=job) as world:
        group = world.create_group("hosts", range(2))
        took = []
        for _ in range(_HOST_ROUNDS):
            values = array("f", [rank + 1.0]) * _HOST_COUNT
            group.barrier()
            began = time.perf_counter()
            group.all_reduce(values, values)
            took.append((time.perf_counter() - began) * 1e6)
            if values.count(3.0) != _HOST_COUNT:
                raise PhalanxError("the sum of the two ranks is wrong")
        return median(took)
