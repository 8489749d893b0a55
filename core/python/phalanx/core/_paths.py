"""Where the files of this package are: installed, in an editable install, or in the source tree."""

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def package_dirs() -> list[Path]:
    """Directories that make up phalanx.core; an editable install has more than one."""
    package = sys.modules.get("phalanx.core")
    listed = [Path(entry) for entry in getattr(package, "__path__", [])]
    return list(dict.fromkeys([_HERE, *listed]))


def source_dir() -> Path | None:
    """The `core` directory of the source tree, or None when this package is installed."""
    core = _HERE.parents[2]
    return core if (core / "include" / "phalanx" / "phalanx.h").is_file() else None


def library() -> Path:
    """Find libphalanx.so.0. The environment variable PHALANX_LIBRARY overrides the search."""
    wished = os.environ.get("PHALANX_LIBRARY")
    candidates = [Path(wished)] if wished else [folder / "lib" / "libphalanx.so.0" for folder in package_dirs()]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    places = ", ".join(map(str, candidates))
    reason = (
        "PHALANX_LIBRARY names a file that does not exist"
        if wished
        else "install phalanx-core, or build it with CMake and set PHALANX_LIBRARY to the libphalanx.so.0 built"
    )
    raise ImportError(f"phalanx.core: no library at {places}; {reason}", name="phalanx.core")


def data_dir(name: str) -> Path:
    """Find a directory that ships with the library: "cmake", "include" or "lib".

    In the source tree, the headers are where they are written.
    """
    for folder in package_dirs():
        if (folder / name).is_dir():
            return folder / name
    source = source_dir()
    if source is not None and name == "include":
        return source / name
    raise FileNotFoundError(
        f"phalanx.core: no directory {name!r} in {', '.join(map(str, package_dirs()))}; "
        "it is part of the built wheel: install phalanx-core from its sources, by `pip install ./core`"
    )
