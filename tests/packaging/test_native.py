"""The C and C++ side: its own tests, its ABI, and programs that use the installed package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOBS = str(len(os.sched_getaffinity(0)))


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def cmake_dir() -> str:
    return run(sys.executable, "-m", "phalanx.core", "--cmake-dir").strip()


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    for tool in ("cmake", "cc", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


@pytest.mark.slow  # the part ctest of .ci/run builds and runs them too
@pytest.mark.timeout(900)
def test_the_tests_in_c_and_cpp_pass(tmp_path: Path) -> None:
    run("cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DPHX_BUILD_TORCH=OFF")
    run("cmake", "--build", str(tmp_path), "-j", JOBS)
    run("ctest", "--test-dir", str(tmp_path), "--output-on-failure", "--no-tests=error")


def test_a_project_outside_the_tree_finds_the_installed_package(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "embed_cpp", tmp_path / "project")
    run("cmake", "-S", "project", "-B", "build", f"-DCMAKE_PREFIX_PATH={cmake_dir()}", cwd=tmp_path)
    run("cmake", "--build", "build", cwd=tmp_path)
    assert run("build/phalanx_embed", cwd=tmp_path).count(": 1 + 2 = 3\n") == 2
    for program in ("two_ranks_c", "two_ranks_cpp", "tensor_parallel", "more"):
        assert "all is right" in run(f"build/phalanx_{program}", cwd=tmp_path)


def test_a_newer_version_than_the_installed_one_is_not_found(tmp_path: Path) -> None:
    text = "cmake_minimum_required(VERSION 3.24)\nproject(p CXX)\nfind_package(phalanx 99.0 REQUIRED)\n"
    (tmp_path / "CMakeLists.txt").write_text(text)
    command = ["cmake", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={cmake_dir()}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "99.0" in done.stderr


@pytest.mark.parametrize(("compiler", "standard"), [("cc", "c99"), ("cc", "c11"), ("c++", "c++17")])
def test_the_public_header_stands_alone(compiler: str, standard: str, tmp_path: Path) -> None:
    source = tmp_path / ("use.c" if compiler == "cc" else "use.cpp")
    source.write_text("#include <phalanx/phalanx.h>\nint main(void) { return phx_abi_version() > 1000; }\n")
    flags = [f"-std={standard}", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    run(compiler, *flags, "-I", f"{cmake_dir()}/../include", str(source))


def test_the_library_exports_what_is_frozen_and_structs_lie_as_frozen() -> None:
    sys.path.insert(0, str(ROOT / "core" / "abi"))
    try:
        import abi
    finally:
        sys.path.pop(0)
    library = Path(cmake_dir()).parent / "lib" / "libphalanx.so.0"
    assert abi.check_symbols(library) == []
    assert abi.check_layout() == []
