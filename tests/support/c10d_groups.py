"""Tests of the c10d backend: ranks whose process groups are served in C++, and ranks whose are served in Python.

from c10d_groups import implementations, join, run_groups

def sums(rank, size):
    join(rank, size)                  # init_process_group("phalanx")
    ...

@implementations
def test_ranks_agree_on_the_sum(how):
    run_groups(sums, 2, how)
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest

import compiled
from ranks import run_ranks, scratch

__all__ = ["has_compiler", "implementations", "join", "native_folder", "run_groups"]

implementations = pytest.mark.parametrize("how", ["cpp", pytest.param("python", marks=pytest.mark.thorough)])


def has_compiler() -> bool:
    return any(map(shutil.which, (*os.environ.get("CXX", "").split()[:1], "c++", "g++", "clang++")))


@functools.cache
def native_folder() -> str:
    """Where the compiled backend is: $PHALANX_NATIVE, or a folder of the tests. Compiled if it is not there yet."""
    folder = os.environ.get("PHALANX_NATIVE") or str(compiled.native_folder("c10d"))
    env = {**os.environ, "PHALANX_NATIVE": folder, "PHALANX_C10D": "cpp"}
    code = "from phalanx.collectives import c10d; print(c10d.implementation())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "cpp\n", done.stderr
    return folder


def run_groups(
    fn: Callable[..., Any], size: int, how: str, *args: Any, env: Mapping[str, str] | None = None, **more: Any
) -> list[Any]:
    """`run_ranks` with the backend in C++ ("cpp") or in Python ("python")."""
    folder = ""
    if how == "cpp":
        if not has_compiler():
            pytest.skip("needs a C++ compiler")
        folder = native_folder()
    told = {"PHALANX_C10D": how, "PHALANX_NATIVE": folder, **(env or {})}
    # The folder has the backend alone, which is looked for at the first use.
    return run_ranks(fn, size, *args, env=told, loaded=True, **more)


def join(rank: int, size: int, seconds: float = 30, backend: str = "phalanx", name: str = "store") -> None:
    """Inside a rank: make the default process group."""
    import torch.distributed as dist

    from phalanx.collectives import c10d

    c10d.register()
    store = f"file://{scratch() / name}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
