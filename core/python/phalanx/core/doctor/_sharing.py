"""What ranks do with each other, tried: memory, descriptors, credentials, waking up, noticing an end."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.core.doctor import _calls
from phalanx.core.doctor._finding import FAIL, OK, WARN, Finding
from phalanx.core.doctor._host import Host

_PEER = Path(__file__).with_name("_peer.py")
_SECONDS = 10  # after which a trial has failed
_FUTEX_WAIT = 0  # linux/futex.h


def check_pidfd(host: Host) -> Iterator[Finding]:
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Finding(OK, "pidfd", "works: a dead rank is noticed at once")
    except (AttributeError, OSError) as error:
        advice = "Linux 5.3 or later has it; a dead rank is noticed by its closed socket instead"
        yield Finding(WARN, "pidfd", f"does not work ({error})", advice)


def check_memfd(host: Host) -> Iterator[Finding]:
    try:
        with _sealed_memfd():
            yield Finding(OK, "memfd", "works, with seals")
    except (AttributeError, OSError) as error:
        advice = "symmetric memory is made of memfds: allow memfd_create (seccomp; sysctl vm.memfd_noexec below 2)"
        yield Finding(FAIL, "memfd", f"does not work ({error})", advice)


def check_sockets(host: Host) -> Iterator[Finding]:
    try:
        _try_abstract_socket()
        yield Finding(OK, "abstract sockets", "work, and pass descriptors and credentials")
    except OSError as error:
        advice = "ranks meet through abstract Unix sockets: allow AF_UNIX in the sandbox"
        yield Finding(FAIL, "abstract sockets", f"do not work ({error})", advice)


def check_processes(host: Host) -> Iterator[Finding]:
    name = "two processes"
    try:
        _meet()
        yield Finding(OK, name, "share a memfd, and one wakes the other by futex")
    except _NoPeerError as error:
        advice = "allow this Python to start another, so that it can be tried; ranks may work all the same"
        yield Finding(WARN, name, f"could not be tried: {error}", advice)
    except (AttributeError, OSError) as error:
        advice = "ranks need this: compare the lines above, and allow it in the sandbox or container"
        yield Finding(FAIL, name, f"do not come together: {error}", advice)


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
                    raise OSError(errno.EPROTO, _last_line(errors) or f"exit status {peer.returncode}")
            except subprocess.TimeoutExpired:
                raise TimeoutError(errno.ETIMEDOUT, "the second process does not end") from None
            finally:
                peer.kill()


def _start_peer(name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(_PEER), name, str(_calls.number("futex"))]
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except OSError as error:
        raise _NoPeerError(error) from None


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


def _await_connection(server: socket.socket, peer: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not select.select([server], [], [], 0.02)[0]:
        if peer.poll() is not None:
            _, errors = peer.communicate()
            raise OSError(errno.EPROTO, _last_line(errors) or f"exit status {peer.returncode}")
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
        _calls.call("futex", ctypes.byref(words), _FUTEX_WAIT, 0, ctypes.byref(timeout), None, 0)
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, "no futex wake came from the second process") from None
    if words[1] != 1:
        raise OSError(errno.EPROTO, "what the second process wrote is not seen")


def _last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or [""])[-1]
