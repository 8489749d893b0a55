#!/usr/bin/env python3
"""Guards the C ABI: what libphalanx.so.0 exports, how its structs lie in memory, and what its debug information says.

    python core/abi/abi.py check LIBRARY      compare a built library, and the headers, with the files in this directory
    python core/abi/abi.py names              write libphalanx.map anew from the headers; then build the library
    python core/abi/abi.py update LIBRARY     write the others anew, when a change is meant

LIBRARY must have debug information (CMAKE_BUILD_TYPE=RelWithDebInfo or Debug). Three files are kept here:

    libphalanx.map       the linker's list of every exported name: those of phalanx.h under the version that ABI 1 will
                         freeze, those of the other headers under one that says that they are experimental
    layout.c             static asserts for the size of each struct of phalanx.h and the offset of each field
    libphalanx.abi       abidw's description of the library as x86-64 sees it, compared by abidiff, without suppressions

`check` skips the third where abidw is missing (Debian: abigail-tools) or on another machine, and says so. `update`
needs cffi. While PHX_ABI_VERSION is 0 everything may change; from 1 on, `update` refuses what is not an addition.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parent / "include"
HEADER = INCLUDE / "phalanx" / "phalanx.h"
EXPERIMENTAL = [INCLUDE / "phalanx" / f"{name}.h" for name in ("cuda", "tuning", "random", "carrier")]
SYMBOLS, LAYOUT, BASELINE = HERE / "libphalanx.map", HERE / "layout.c", HERE / "libphalanx.abi"
EXIT_SKIPPED = 77


def exported(library: Path) -> list[str]:
    """Names that the library defines for others, without the version node and linker-made marks."""
    lines = run("nm", "-D", "--defined-only", "--format=posix", str(library)).splitlines()
    names = {line.split()[0].split("@")[0] for line in lines if line.split()[1] != "A"}
    return sorted(names)


def declared(*headers: Path) -> list[str]:
    """Functions that public headers declare."""
    text = "\n".join(header.read_text() for header in headers)
    return sorted(set(re.findall(r"^PHX_API [^;]*?\b(phx_\w+)\(", text, re.MULTILINE)))


def version_script() -> str:
    """libphalanx.map, from the headers."""
    stable, experimental = declared(HEADER), declared(*EXPERIMENTAL)
    return (
        "# Written by core/abi/abi.py names.\nPHALANX_0 {\n  global:\n"
        + "".join(f"    {name};\n" for name in stable)
        + "  local: *;\n};\nPHALANX_EXPERIMENTAL {\n  global:\n"
        + "".join(f"    {name};\n" for name in experimental)
        + "};\n"
    )


def listed(text: str) -> list[str]:
    """Names in a version script."""
    return sorted(re.findall(r"^    (phx_\w+);$", text, re.MULTILINE))


def abi_version() -> int:
    found = re.search(r"^#define PHX_ABI_VERSION (\d+)", HEADER.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def layout_asserts() -> str:
    """layout.c, from the header as cffi reads it."""
    import cffi

    sys.path.insert(0, str(HERE.parent / "cmake"))
    from generate_abi import declarations

    ffi = cffi.FFI()
    ffi.cdef(declarations(HEADER))
    lines = [
        "/* Frozen by core/abi/abi.py: the layout of every public struct where pointers have 64 bits. Compiled, never",
        " * run. A line here may only be added. If one fails, the header broke the ABI. */",
        "#include <stddef.h>",
        "",
        '#include "phalanx/phalanx.h"',
        "",
        "#ifdef __cplusplus",
        "#define PHX_FROZEN(fact) static_assert(fact, #fact)",
        "#else",
        "#define PHX_FROZEN(fact) _Static_assert(fact, #fact)",
        "#endif",
    ]
    for name in sorted(ffi.list_types()[0]):
        kind = ffi.typeof(name)
        if kind.kind != "struct" or kind.fields is None:
            continue
        lines += ["", f"PHX_FROZEN(sizeof({name}) == {ffi.sizeof(kind)});"]
        lines += [f"PHX_FROZEN(offsetof({name}, {field}) == {about.offset});" for field, about in kind.fields]
    return "\n".join(lines) + "\n"


def describe(library: Path, output: Path) -> None:
    """abidw's description, free of paths and source lines, so that the same ABI gives the same text."""
    run(
        "abidw",
        *("--exported-interfaces-only", "--no-elf-needed"),
        *("--header-file", str(HEADER), "--drop-private-types"),  # what is behind the opaque handles is not ABI
        *("--no-corpus-path", "--no-comp-dir-path", "--no-show-locs"),
        *("--type-id-style", "hash", "--out-file", str(output)),
        str(library),
    )
    # Whoever built it where: source paths start at core/.
    output.write_text(re.sub(r" path='[^']*/core/(src/[^']*)'", r" path='\1'", output.read_text()))


def run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def check_symbols(library: Path) -> list[str]:
    frozen = listed(SYMBOLS.read_text())
    problems = []
    if SYMBOLS.read_text() != version_script():
        problems.append(f"{SYMBOLS.name} is not what the headers give")
    declarations = declared(HEADER, *EXPERIMENTAL)
    for what, names in (("exported by the library", exported(library)), ("declared in the headers", declarations)):
        if missing := sorted(set(frozen) - set(names)):
            problems.append(f"not {what}, but in {SYMBOLS.name}: {', '.join(missing)}")
        if extra := sorted(set(names) - set(frozen)):
            problems.append(f"{what}, but not in {SYMBOLS.name}: {', '.join(extra)}")
    return problems


def check_layout() -> list[str]:
    problems = []
    for compiler, standard in (("cc", "c11"), ("c++", "c++17")):
        language = "c" if compiler == "cc" else "c++"
        flags = ["-x", language, f"-std={standard}", "-fsyntax-only", "-Wall", "-Werror", "-I", str(INCLUDE)]
        done = subprocess.run([compiler, *flags, str(LAYOUT)], capture_output=True, text=True)
        if done.returncode != 0:
            problems.append(f"{LAYOUT.name} does not hold as {standard}:\n{done.stderr}")
    return problems


def why_no_baseline() -> str:
    """Why the third check cannot be made here; empty if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{BASELINE.name} describes x86-64, this is {platform.machine()}"
    if shutil.which("abidw") is None or shutil.which("abidiff") is None:
        return "abidw and abidiff are missing (Debian: abigail-tools)"
    return ""


def check_baseline(library: Path) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="phx-abi-") as directory:
        current = Path(directory) / BASELINE.name
        describe(library, current)
        # --harmless: a change that abidiff thinks nobody notices is still one that somebody made.
        command = ["abidiff", "--harmless", "--no-corpus-path", str(BASELINE), str(current)]
        done = subprocess.run(command, capture_output=True, text=True)
    return [f"abidiff (exit {done.returncode}):\n{done.stdout}{done.stderr}"] if done.returncode else []


def check(library: Path) -> int:
    problems = check_symbols(library) + check_layout()
    skipped = why_no_baseline()
    if not skipped:
        problems += check_baseline(library)
    for problem in problems:
        print(f"ABI: {problem}")
    if problems:
        print("ABI: if this change is meant, run abi.py names, build, and run abi.py update LIBRARY")
        return 1
    print(f"ABI {abi_version()}: {len(listed(SYMBOLS.read_text()))} exported names and the layouts are as frozen")
    if skipped:
        print(f"abidiff skipped: {skipped}")
        return EXIT_SKIPPED
    print("abidiff: no difference")
    return 0


def update(library: Path) -> int:
    new_symbols, new_layout = exported(library), layout_asserts()
    declarations = declared(HEADER, *EXPERIMENTAL)
    if new_symbols != declarations:
        print("ABI: the library does not export just what the headers declare:")
        print("\n".join(sorted(set(new_symbols) ^ set(declarations))))
        return 1
    if abi_version() >= 1:
        lost = []
        frozen = [line for line in LAYOUT.read_text().splitlines() if line.startswith("PHX_FROZEN(offsetof")]
        lost += [line for line in frozen if line not in new_layout]
        if lost:
            print("ABI: refused, these are promised:", *lost, sep="\n  ")
            return 1
    if skipped := why_no_baseline():
        print(f"ABI: {skipped}")
        return 1
    LAYOUT.write_text(new_layout)
    describe(library, BASELINE)
    return 0


def names() -> int:
    stable = re.search(r"^PHALANX_0 .*?^};", SYMBOLS.read_text(), re.MULTILINE | re.DOTALL)
    lost = sorted(set(listed(stable[0] if stable else "")) - set(declared(HEADER)))
    if abi_version() >= 1 and lost:
        print("ABI: refused, these are promised:", *lost, sep="\n  ")
        return 1
    SYMBOLS.write_text(version_script())
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["check", "names", "update"])
    parser.add_argument("library", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.action == "names":
        sys.exit(names())
    if arguments.library is None:
        parser.error("LIBRARY is missing")
    sys.exit({"check": check, "update": update}[arguments.action](arguments.library.resolve()))


if __name__ == "__main__":
    main()
