"""The C++ module of memory pools, which is compiled at its first use on a host."""

from pathlib import Path
from typing import Any

from phalanx.collectives.extension import Extension
from phalanx.core import UnsupportedError

_HERE = Path(__file__).parent
EXTENSION = Extension(
    "symm_mem_pool",
    "phalanx_pool",
    [_HERE / "pools.cpp"],
    "install one, or set CXX to its name; phalanx.symm_mem.empty needs none",
    headers=[_HERE / "heap.h"],
)


def module() -> Any:
    """The module, which can replace torch's CPU allocator. It is compiled if it does not exist.

    Raises:
        UnsupportedError: It cannot be compiled or loaded; the text says why, and what to do.
    """
    try:
        return EXTENSION.load()
    except RuntimeError as error:
        raise UnsupportedError(
            f"get_mem_pool: a memory pool needs a C++ module that is compiled at its first use, which failed: {error}"
        ) from error
