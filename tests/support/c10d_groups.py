"""Tests of the c10d backend, which is compiled once for all of them.

from c10d_groups import join, run_groups

def sums(rank, size):
    join(rank, size)                  # init_process_group("phalanx")
    ...

def test_ranks_agree_on_the_sum():
    run_groups(sums, 2)
"""

from __future__ import annotations

import ctypes.util
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest

import compiled
from ranks import run_ranks, scratch

__all__ = [
    "apart",
    "everybody_is_done",
    "has_compiler",
    "join",
    "native_folder",
    "needs_torch",
    "needs_ucx",
    "run_groups",
]


def apart(size: int) -> list[dict[str, str]]:
    """Environments of ranks whose group the core cannot serve: each on a host of its own, and no UCX."""
    return [{"PHALANX_HOST_ID": str(7 + rank), "PHALANX_UCX": "/nonexistent/libucp.so.0"} for rank in range(size)]


def has_compiler() -> bool:
    return any(map(shutil.which, (*os.environ.get("CXX", "").split()[:1], "c++", "g++", "clang++")))


def needs_ucx() -> None:
    """Skip the test where there is no UCX, which groups on several hosts need."""
    if not os.environ.get("PHALANX_UCX") and ctypes.util.find_library("ucp") is None:
        pytest.skip("needs UCX (Debian: libucx0)")


def needs_torch(major: int, minor: int, what: str) -> None:
    """Skip the test where torch is older than this version, which is the first that has what the test is about."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < (major, minor):
        pytest.skip(f"needs torch {major}.{minor}, which has {what}")


@functools.cache
def native_folder() -> str:
    """Where the compiled backend is: $PHALANX_NATIVE, or a folder of the tests. Compiled if it is not there yet."""
    folder = os.environ.get("PHALANX_NATIVE") or str(compiled.native_folder("c10d"))
    env = {**os.environ, "PHALANX_NATIVE": folder}
    code = "from phalanx.collectives import c10d; c10d.load()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


def run_groups(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    **more: Any,
) -> list[Any]:
    """`run_ranks` of ranks that may make process groups of the backend `phalanx`."""
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    # The folder has the backend alone, which is looked for at the first use.
    of_each = [env or {}] * size if env is None or isinstance(env, Mapping) else env
    told = [{"PHALANX_NATIVE": native_folder(), **each} for each in of_each]
    return run_ranks(fn, size, *args, env=told, loaded=True, **more)


def join(
    rank: int, size: int, seconds: float = 30, backend: str = "phalanx", name: str = "store", options: Any = None
) -> None:
    """Inside a rank: make the default process group."""
    import torch.distributed as dist

    from phalanx.collectives import c10d

    c10d.register()
    store = f"file://{scratch() / name}"
    dist.init_process_group(
        backend,
        init_method=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        pg_options=options,
    )


def everybody_is_done(rank: int, ranks: Sequence[int], what: str = "all") -> None:
    """Inside a rank: wait until all of `ranks` have come here. Peers are told of a rank that leaves sooner."""
    import torch.distributed as dist

    store = dist.FileStore(str(scratch() / f"done-{what}"), 1)
    store.set(str(rank), b"")
    store.wait([str(each) for each in ranks], timedelta(seconds=30))
