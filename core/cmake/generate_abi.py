"""Writes a cffi module, in out-of-line ABI mode, for the marked regions of the headers of one library.

    python generate_abi.py --output _abi.py include/phalanx/{phalanx,cuda,tuning,random,carrier}.h
    python generate_abi.py --output _abi_torch.py --base include/phalanx/phalanx.h torch/phalanx_torch.h

The second module takes the types of the base header from phalanx.core._abi. A module must not declare functions that
its library does not have: cffi raises an error of its own when somebody lists the attributes of such a library.

A region lies between a line `/* cdef: begin */` and a line `/* cdef: end */`. It holds plain declarations without
preprocessor lines; only the macros PHX_API and PHX..._API are taken out. The same text gives the same module, byte for
byte.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import cffi

BEGIN, END = "/* cdef: begin */", "/* cdef: end */"


def declarations(header: Path) -> str:
    """The marked regions of a header, as cffi reads them, with the line numbers of the header kept."""
    lines = []
    inside = False
    seen = False
    for number, line in enumerate(header.read_text(encoding="utf-8").splitlines(), start=1):
        mark = line.strip()
        if mark in (BEGIN, END):
            if inside == (mark == BEGIN):
                raise SystemExit(f"{header}:{number}: unexpected {mark}")
            inside = mark == BEGIN
            seen = True
            lines.append("")
        elif inside:
            if line.lstrip().startswith("#"):
                raise SystemExit(f"{header}:{number}: a preprocessor line inside a cdef region")
            lines.append(re.sub(r"\bPHX\w*_API\s+", "", line))
        else:
            lines.append("")
    if inside or not seen:
        raise SystemExit(f"{header}: {'no ' + END if inside else 'no cdef region'}")
    return "\n".join(lines) + "\n"


def module_of(output: Path) -> str:
    return f"phalanx.core.{output.stem}"


def read(header: Path, ffi: cffi.FFI) -> None:
    try:
        ffi.cdef(declarations(header))
    except cffi.CDefError as error:
        raise SystemExit(f"{header}: cffi cannot read it: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="the header whose types are those of phalanx.core._abi")
    parser.add_argument("headers", type=Path, nargs="+")
    arguments = parser.parse_args()
    ffi = cffi.FFI()
    if arguments.base is not None:
        base = cffi.FFI()
        read(arguments.base, base)
        base.set_source(module_of(Path("_abi.py")), None)
        ffi.include(base)
    for header in arguments.headers:
        read(header, ffi)
    ffi.set_source(module_of(arguments.output), None)
    ffi.emit_python_code(str(arguments.output))


if __name__ == "__main__":
    main()
