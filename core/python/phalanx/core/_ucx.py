"""UCX, which moves what crosses between hosts: where it is when it came as a wheel, and what the core says of it."""

import importlib.util
import os
from functools import cache
from pathlib import Path

from phalanx.core._lib import ffi, lib
from phalanx.core.errors import check


def wheel_directory() -> Path | None:
    """The directory of libucp.so.0 in the wheel libucx-cu12 (or libucx-cu13), if it is installed. Imports nothing."""
    try:
        spec = importlib.util.find_spec("libucx")
    except (ImportError, ValueError):
        return None
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(place) / "lib" for place in places if (Path(place) / "lib" / "libucp.so.0").is_file()), None)


@cache
def use_wheel() -> None:
    """Tell the core where the wheel is. It looks there when it needs UCX and the system has none."""
    directory = wheel_directory()
    if directory is not None:
        check(lib.phx_ucx_set_directory(os.fsencode(directory)))


def describe() -> dict[str, str]:
    """What phx_ucx_describe says, by name: path, version, transports, problem, address, address problem."""
    use_wheel()
    text, size = ffi.new("char[]", 16384), ffi.new("size_t *")
    check(lib.phx_ucx_describe(text, len(text), size))
    lines = ffi.string(text).decode(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
