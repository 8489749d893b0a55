"""phalanx build: what it compiles does what is done in Python without it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.collectives import _native, _op_table, extension

TESTS = Path(__file__).parent
ROOT = TESTS.parents[2]
# A compiler that takes no time: the result is there already.
COMPILER = """#!/bin/sh
for word; do
  [ "$before" = -o ] && out=$word
  before=$word
done
cp "$READY" "$out"
"""
LOADED = """
import torch
import phalanx.collectives
print(any(name.startswith("phalanx_autograd::") for name in torch._C._dispatch_get_all_op_names()))
"""


def run(*words, native, **environment):
    env = {**os.environ, "PHALANX_NATIVE": str(native), **environment}
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=280)


def build(native, *words, **environment):
    code = f"import sys; from phalanx.core import _cli; sys.exit(_cli.main({['build', 'collectives', *words]!r}))"
    return run("-c", code, native=native, **environment)


def is_loaded(native):
    done = run("-c", LOADED, native=native)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1] == "True", done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a build of the session."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("native")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("compiling collectives for torch ")
    assert [str(each) for each in folder.iterdir()] == [done.stdout.strip().removeprefix("compiled: ")]
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_holds_in_python_holds_for_what_is_compiled(built):  # F26
    assert is_loaded(built) == (True, "")
    names = (
        "collectives_async",
        "collectives_autograd",
        "collectives_blocking",
        "collectives_values",
        "fast_path",
        "transports",
    )
    files = [str(TESTS / f"test_{name}.py") for name in names]
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *files, native=built)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.slow
def test_a_second_build_does_nothing_unless_it_is_forced(built, tmp_path):
    (made,) = built.iterdir()
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    before = made.stat()
    assert build(built).stdout.strip() == f"already compiled: {made}"
    assert made.stat().st_mtime_ns == before.st_mtime_ns
    assert build(built, "--force", CXX=str(compiler), READY=str(made)).returncode == 0
    assert list(built.iterdir()) == [made] and made.stat().st_mtime_ns > before.st_mtime_ns


@pytest.mark.slow
def test_a_file_that_others_may_write_is_not_loaded(built, tmp_path):
    (made,) = built.iterdir()
    copy = tmp_path / made.name
    shutil.copy(made, copy)
    assert is_loaded(tmp_path)[0]
    copy.chmod(0o722)
    assert not is_loaded(tmp_path)[0]
    copy.chmod(0o700)
    tmp_path.chmod(0o777)
    assert not is_loaded(tmp_path)[0]


def test_a_folder_that_others_may_write_is_refused_before_anything_is_compiled(tmp_path):
    tmp_path.chmod(0o777)
    done = build(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"others may write {tmp_path}" in done.stderr and "chmod" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_broken_file_is_told_of_and_passed_over(monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_NATIVE", str(tmp_path))
    path = _native.extension(tuple(_op_table.OPS)).path()
    path.write_bytes(b"not a library")
    path.chmod(0o700)
    loaded, told = is_loaded(tmp_path)
    assert not loaded
    assert f"{path} cannot be loaded" in told and "phalanx build --force" in told


def test_without_a_compiler_it_says_so_and_leaves_nothing(tmp_path):
    done = build(tmp_path / "native", PATH="", CXX="")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "phalanx build: collectives: there is no C++ compiler (c++, g++ or clang++); the ops work without one, slower\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_quoted(tmp_path):
    done = build(tmp_path, CXX="false")
    assert done.returncode == 1
    assert "phalanx build: collectives: false failed (exit status 1)" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_does_not_exist_is_refused(tmp_path):
    done = build(tmp_path, "colectives")
    assert done.returncode == 2
    assert "there is no module 'colectives'; expected some of c10d, collectives" in done.stderr


def test_where_it_is(monkeypatch):
    for name in ("PHALANX_NATIVE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert extension.folder() is None and _native.extension(("x",)).find() is None
    monkeypatch.setenv("HOME", "/users/me")
    assert extension.folder() == Path("/users/me/.cache/phalanx/native")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert extension.folder() == Path("/cache/phalanx/native")
    monkeypatch.setenv("PHALANX_NATIVE", "/n")
    assert extension.folder() == Path("/n")
    monkeypatch.setenv("PHALANX_NATIVE", "")
    assert extension.folder() is None
