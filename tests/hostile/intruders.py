"""Programs that are no ranks: other users, and processes that find a rank's socket and talk to it."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import wire
from phalanx.core import set_log

NOBODY = 65534  # of whom ranks of these tests have nothing

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


def as_user(uid: int, call: Callable[..., Any], *args: Any, closing: Sequence[int] = ()) -> Any:
    """What call(*args) returns in a process of that user. It starts as a copy of this one, without some descriptors."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        for fd in (reader, *closing):
            os.close(fd)
        status = 1
        try:
            if uid != os.geteuid():
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            os.write(writer, pickle.dumps(call(*args)))
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the process of user {uid} ended with {status}"
    return pickle.loads(answer)


def listening(pid: int) -> bytes:
    """The uuid of the only world of that process, which is the name of its socket."""
    inodes = {target[8:-1] for target in _links(pid) if target.startswith("socket:[")}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[6] in inodes and fields[7].startswith("@phalanx-"):
            name = fields[7].removeprefix("@phalanx-")
            uuid = bytes.fromhex(name[:16])[::-1] + bytes.fromhex(name[16:])[::-1]
            if wire.socket_name(uuid).decode().endswith(name):
                return uuid
    raise AssertionError(f"process {pid} listens on no socket of a rank")


def _links(pid: int) -> list[str]:
    targets = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            targets.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    return targets


class Log:
    """What the core logs in this process."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        set_log(lambda level, file, line, message: self.lines.append(message))

    def has(self, *words: str) -> bool:
        return any(all(word in line for word in words) for line in self.lines)
