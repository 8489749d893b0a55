"""The compiled part of memory pools: found in the user's cache directory, or compiled at its first use on this host."""

from functools import cache
from pathlib import Path
from typing import Any

from phalanx.collectives import building
from phalanx.core import UnsupportedError

_HERE = Path(__file__).parent
_SOURCES = tuple(sorted(_HERE.glob("*.cpp")))
_MODULE = "phalanx_pool"  # as module.cpp says
_ADVICE = "phalanx.symm_mem.empty needs none"


def path() -> Path | None:
    """Where the compiled module is, or would be; None if there is no cache directory."""
    return building.file_of("symm_mem_pool", (*_SOURCES, *sorted(_HERE.glob("*.h"))), [])


@cache
def module() -> Any:
    """The compiled module, with torch's CPU allocator in its hands. Compiles it if it is not there.

    Raises:
        UnsupportedError: It cannot be had; says why and what to do.
    """
    try:
        where = path()
        if where is None:
            raise RuntimeError("there is no cache directory: set PHALANX_NATIVE to one, or HOME")
        if not building.is_trusted(where):
            where.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with building.turn(where.parent):
                if not building.is_trusted(where):  # else another rank of this host was first
                    building.compile_file(where, _SOURCES, [], f"install one, or set CXX to its name; {_ADVICE}")
        found = building.load_file(_MODULE, where)
    except (RuntimeError, OSError, ImportError) as error:
        raise UnsupportedError(
            f"memory pools are compiled at their first use, and this one cannot be: {error}"
        ) from error
    return found
