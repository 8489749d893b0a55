"""Finds, loads and checks libphalanx.so.0. Importing this module is what loads the library."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.core import _paths

ABI_VERSION = 0  # of the headers that this binding was written for

_CDEF_REGION = re.compile(r"/\* cdef: begin \*/(.*?)/\* cdef: end \*/", re.DOTALL)


def cdef_of(header: Path) -> str:
    """The declarations of a public header that cffi can read."""
    regions = _CDEF_REGION.findall(header.read_text(encoding="utf-8"))
    return re.sub(r"\bPHX\w*_API\b", "", "\n".join(regions))


def _ffi_from_source() -> Any:
    # In a source tree the generated module is missing: read the headers themselves.
    source = _paths.source_dir()
    if source is None:
        raise ImportError(
            "phalanx.core: the generated module phalanx.core._abi is missing, so this installation "
            "is incomplete: reinstall phalanx-core",
            name="phalanx.core._abi",
        )
    ffi = import_module("cffi").FFI()
    ffi.cdef(cdef_of(source / "include" / "phalanx" / "phalanx.h"))
    torch_header = source / "torch" / "phalanx_torch.h"
    if torch_header.is_file():
        ffi.cdef(cdef_of(torch_header))
    return ffi


def _load_ffi() -> Any:
    try:
        return import_module("phalanx.core._abi").ffi
    except ModuleNotFoundError as error:
        if error.name != "phalanx.core._abi":
            raise
    return _ffi_from_source()


def _check(ffi: Any, lib: Any, path: Path) -> None:
    """Compare what the library was built from with what this binding declares."""
    advice = "the library and the Python package come from different builds: reinstall phalanx-core"
    version = lib.phx_abi_version()
    if version != ABI_VERSION:
        raise ImportError(
            f"phalanx.core: {path} has ABI version {version}, this binding needs {ABI_VERSION}; {advice}",
            name="phalanx.core",
            path=str(path),
        )
    unknown_size = getattr(ffi, "error", ValueError)  # the FFI of the generated module has its own
    for name in ffi.list_types()[0]:
        if not name.startswith("phx_") or ffi.typeof(name).kind != "struct":
            continue
        try:
            here = ffi.sizeof(name)
        except unknown_size:
            continue
        there = lib.phx_struct_size(name.encode())
        if here != there:
            raise ImportError(
                f"phalanx.core: struct {name} has {there} bytes in {path} (0: unknown there) and "
                f"{here} bytes in this binding; {advice}",
                name="phalanx.core",
                path=str(path),
            )


def open_library(ffi: Any, path: Path) -> Any:
    """dlopen with an error that names the file and the loader's reason."""
    try:
        return ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_LOCAL)
    except OSError as error:
        raise ImportError(
            f"phalanx.core: {path} cannot be loaded: {error}", name="phalanx.core", path=str(path)
        ) from error


def _load() -> tuple[Any, Any, Path]:
    ffi = _load_ffi()
    path = _paths.library()
    lib = open_library(ffi, path)
    _check(ffi, lib, path)
    return ffi, lib, path


ffi, lib, library_path = _load()
