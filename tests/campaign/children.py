"""A forked child of a rank: it tries every way into the library, lets go of what it has, and ends."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from phalanx.core import UnsupportedError, ffi, lib

SECONDS = 10


def fork_and_try(world: Any, group: Any) -> str:
    """What is wrong with what a child of this process found, or ""."""
    raw = group._handle.pointer  # as a C program has it; the binding looks for a fork by itself
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        text = "".join(
            f"{name}: {found}\n" for name, attempt in _attempts(world, group, raw) if (found := _try(attempt))
        )
        os.write(writer, text.encode())
        world.finalize()
        del group
        gc.collect()
        os._exit(0)  # the functions of atexit are those of the campaign, too
    os.close(writer)
    began = time.monotonic()
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        text += f"the child ended with {status} after {time.monotonic() - began:.1f} s\n"
    return text


def _attempts(world: Any, group: Any, raw: Any) -> list[tuple[str, Callable[[], Any]]]:
    x, y = np.ones(8, "float32"), np.zeros(8, "float32")
    peer = (group.group_rank + 1) % group.group_size

    def all_reduce() -> Any:
        places = ffi.from_buffer(x), ffi.from_buffer(y)
        return lib.phx_all_reduce(raw, *places, 8, lib.PHX_DTYPE_F32, lib.PHX_OP_SUM, ffi.NULL, ffi.NULL)

    return [
        ("Group.all_reduce", lambda: group.all_reduce(x, y)),
        ("Group.barrier", group.barrier),
        ("Group.send", lambda: group.send(x, peer)),
        ("Group.agree", lambda: group.agree(1)),
        ("World.create_group", lambda: world.create_group("child", group.ranks, 500)),
        ("phx_all_reduce", all_reduce),
        ("phx_barrier", lambda: lib.phx_barrier(raw, ffi.NULL, ffi.NULL)),
    ]


def _try(attempt: Callable[[], Any]) -> str:
    try:
        status = attempt()
    except UnsupportedError:
        return ""
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return "" if status == lib.PHX_ERR_UNSUPPORTED else f"was not refused: {status}"
