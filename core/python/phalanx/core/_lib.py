"""Finds, loads and checks libphalanx.so.0. Importing this module is what loads the library."""

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.core import _log, _paths, interrupts

ABI_VERSION = 0  # of the headers that this binding was written for

_CDEF_REGION = re.compile(r"/\* cdef: begin \*/(.*?)/\* cdef: end \*/", re.DOTALL)


def cdef_of(header: Path) -> str:
    """The declarations of a public header that cffi can read."""
    regions = _CDEF_REGION.findall(header.read_text(encoding="utf-8"))
    return re.sub(r"\bPHX\w*_API\b", "", "\n".join(regions))


def load_ffi(module: str, *headers: str, base: Any = None) -> Any:
    """The FFI of a generated module; in a source tree, of its `headers`, which use the types of `base`."""
    try:
        return import_module(module).ffi
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    # In a source tree the generated module is missing: read the header itself.
    source = _paths.source_dir()
    if source is None or not all((source / header).is_file() for header in headers):
        raise ImportError(
            f"phalanx.core: the generated module {module} is missing, so this installation "
            "is incomplete: reinstall phalanx-core",
            name=module,
        )
    ffi = import_module("cffi").FFI()
    if base is not None:
        ffi.include(base)
    for header in headers:
        ffi.cdef(cdef_of(source / header))
    return ffi


def not_loaded(text: str, path: Path) -> ImportError:
    """The error to raise where a library is missing or does not fit."""
    return ImportError(f"phalanx.core: {text}", name="phalanx.core", path=str(path))


def _check(ffi: Any, lib: Any, path: Path) -> None:
    """Compare what the library was built from with what this binding declares."""
    advice = "the library and the Python package come from different builds: reinstall phalanx-core"
    version = lib.phx_abi_version()
    if version != ABI_VERSION:
        raise not_loaded(f"{path} has ABI version {version}, this binding needs {ABI_VERSION}; {advice}", path)
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
            text = f"struct {name} has {there} bytes in {path} (0: unknown there) and {here} bytes in this binding"
            raise not_loaded(f"{text}; {advice}", path)


def open_library(ffi: Any, path: Path) -> Any:
    """dlopen with an error that names the file and the loader's reason."""
    try:
        # NODELETE: at the end of the interpreter, threads may still be in functions of it.
        return ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_LOCAL | os.RTLD_NODELETE)
    except OSError as error:
        raise not_loaded(f"{path} cannot be loaded: {error}", path) from error


def _load() -> tuple[Any, Any, Path]:
    names = ("phalanx", "cuda", "tuning", "random", "carrier")
    ffi = load_ffi("phalanx.core._abi", *(f"include/phalanx/{name}.h" for name in names))
    path = _paths.library()
    lib = open_library(ffi, path)
    _check(ffi, lib, path)
    interrupts.install(ffi, lib)
    _log.install(ffi, lib)
    return ffi, lib, path


ffi, lib, library_path = _load()


def new_struct(name: str) -> Any:
    """A pointer to a struct that says its own size, as all those of the core that may grow; the rest of it is zero."""
    struct = ffi.new(f"{name} *")
    struct.struct_size = ffi.sizeof(name)
    return struct
