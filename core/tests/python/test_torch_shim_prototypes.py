"""libphalanx_torch.so has prototypes of its own for torch's stable C shim: do they fit the installed torch?"""

import ctypes
import importlib.util
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SOURCE = Path(__file__).resolve().parents[2] / "torch"
FUNCTION = re.compile(r"^[\w ]+?[ *](\w+)\(", re.MULTILINE)
OPTIONAL_FIELD = re.compile(r"\(\*(\w+)\)\(")
OLDEST = "0x020b000000000000"  # torch 2.11, in the form of TORCH_TARGET_VERSION

PROGRAM = """
#include <type_traits>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>
#define PHXT_SHIM_NAMESPACE_BEGIN namespace ours {
#define PHXT_SHIM_NAMESPACE_END }
#include "torch_shim.h"
"""


def symbols_listed() -> set[str]:
    lines = (SOURCE / "torch_symbols.txt").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def functions_declared() -> set[str]:
    text = (SOURCE / "torch_shim.h").read_text(encoding="utf-8")
    return set(FUNCTION.findall(text[text.index('extern "C" {') :]))


def compiles(program: str, directory: Path, include: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++, which compiles the comparison with torch's headers")
    source = directory / "program.cpp"
    source.write_text(program, encoding="utf-8")
    torch_include = Path(torch.__file__).parent / "include"
    command = [compiler, "-std=c++20", "-fsyntax-only", "-w", *flags, f"-I{include}", f"-I{torch_include}", str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def same_types(functions: set[str]) -> str:
    check = 'static_assert(std::is_same_v<decltype(&ours::{0}), decltype(&::{0})>, "{0}");'
    return PROGRAM + "\n".join(check.format(name) for name in sorted(functions))


def library() -> Path:
    given = os.environ.get("PHALANX_LIBRARY")
    if given:
        directories = [Path(given).parent]
    else:
        try:
            spec = importlib.util.find_spec("phalanx.core")
        except ModuleNotFoundError:
            spec = None
        directories = [Path(entry) / "lib" for entry in (spec.submodule_search_locations or [])] if spec else []
    for directory in directories:
        if (directory / "libphalanx_torch.so").is_file():
            return directory / "libphalanx_torch.so"
    pytest.skip(
        "no libphalanx_torch.so: install phalanx-core, or set PHALANX_LIBRARY to the libphalanx.so.0 of a build"
    )


def dynamic_section(path: Path) -> tuple[set[str], dict[int, list[str]]]:
    """Of a 64-bit little-endian ELF file: undefined dynamic symbols, and the strings of the dynamic entries by tag."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    # Of each section header: type, offset, size, link.
    sections = [struct.unpack_from("<4xI16xQQI", data, table + i * entry_size) for i in range(count)]

    def text(start: int) -> str:
        return data[start : data.index(b"\0", start)].decode()

    undefined: set[str] = set()
    strings: dict[int, list[str]] = {}
    for kind, offset, size, link in sections:
        names = sections[link][1]
        if kind == 11:  # SHT_DYNSYM
            for at in range(offset, offset + size, 24):
                name, section = struct.unpack_from("<I2xH", data, at)
                if section == 0:
                    undefined.add(text(names + name))
        elif kind == 6:  # SHT_DYNAMIC
            for at in range(offset, offset + size, 16):
                tag, value = struct.unpack_from("<QQ", data, at)
                if tag in (1, 14, 15, 29):  # NEEDED, SONAME, RPATH, RUNPATH
                    strings.setdefault(tag, []).append(text(names + value))
    return undefined, strings


def test_the_list_of_symbols_names_exactly_the_functions_declared():
    assert functions_declared() == symbols_listed()


def test_our_prototypes_have_the_types_of_torchs_headers_as_of_2_11(tmp_path):
    result = compiles(same_types(functions_declared()), tmp_path, SOURCE, f"-DTORCH_TARGET_VERSION={OLDEST}")
    assert result.returncode == 0, result.stderr


def test_a_prototype_with_another_type_would_be_noticed(tmp_path):
    text = (SOURCE / "torch_shim.h").read_text(encoding="utf-8")
    wrong = text.replace(
        "aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t *",
        "aoti_torch_get_dtype(AtenTensorHandle tensor, int64_t *",
    )
    assert wrong != text
    (tmp_path / "torch_shim.h").write_text(wrong, encoding="utf-8")
    result = compiles(same_types({"aoti_torch_get_dtype"}), tmp_path, tmp_path)
    assert result.returncode != 0
    assert "aoti_torch_get_dtype" in result.stderr


def test_calls_that_are_looked_up_by_name_have_the_types_of_torchs_headers(tmp_path):
    text = (SOURCE / "optional_shim.h").read_text(encoding="utf-8")
    cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    symbols = {name: re.sub("^(aoti_)?", r"\1torch_", name) for name in OPTIONAL_FIELD.findall(text)}
    of_cuda = {"aoti_get_current_cuda_stream"}  # declared in any build
    fields = {name: symbol for name, symbol in symbols.items() if name in of_cuda or hasattr(cpu, symbol)}
    check = 'static_assert(std::is_same_v<decltype(phxt::OptionalShim::{0}), decltype(&::{1})>, "{0}");'
    program = PROGRAM + '#include "optional_shim.h"\n'
    program += "\n".join(check.format(name, symbol) for name, symbol in fields.items())
    result = compiles(program, tmp_path, SOURCE, "-DUSE_CUDA")
    assert result.returncode == 0, result.stderr


def test_the_library_uses_of_torch_only_what_is_listed_and_the_installed_torch_exports_all_of_it():
    undefined, _ = dynamic_section(library())
    used = {name for name in undefined if name.startswith(("aoti_torch_", "torch_"))}
    assert used == symbols_listed()
    assert not [name for name in undefined if name.startswith(("_ZN3c10", "_ZN2at", "_ZN5torch", "_ZNK3c10"))]
    cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    assert [name for name in sorted(used) if not hasattr(cpu, name)] == []


def test_the_library_needs_torch_by_the_name_that_torch_gives_itself_and_the_core_beside_it():
    _, strings = dynamic_section(library())
    needed = strings[1]
    assert "libtorch_cpu.so" in needed
    assert "libphalanx.so.0" in needed
    assert not {"libtorch.so", "libc10.so", "libtorch_python.so"} & set(needed)
    assert strings.get(29, strings.get(15)) == ["$ORIGIN"]
