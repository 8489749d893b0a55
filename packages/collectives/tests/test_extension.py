"""`Extension`: modules in C++ that are compiled on the user's host. A small one, which includes Python.h alone."""

import logging
import os
import select
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from phalanx.collectives.extension import Extension, folder

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="compiles a module, so it needs a C++ compiler"
)

SOURCE = """
#include <Python.h>
#include "number.h"
static PyMethodDef methods[] = {{nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "small", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_small() {
  PyObject *const module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "number", NUMBER + EXTRA);
  return module;
}
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_NATIVE", str(tmp_path / "native"))
    (tmp_path / "small.cpp").write_text(SOURCE)
    (tmp_path / "number.h").write_text("#define NUMBER 40")
    return tmp_path


def small(sources, extra=2, prepare=id):
    return Extension(
        "small",
        "small",
        [sources / "small.cpp"],
        "nothing needs it",
        headers=[sources / "number.h"],
        key=lambda: [str(extra)],
        flags=lambda: [f"-DEXTRA={extra}", "-I", str(sources)],
        prepare=prepare,
    )


def test_what_was_built_is_loaded_once_and_prepared(sources):
    prepared = []
    extension = small(sources, prepare=prepared.append)
    assert extension.load_built() is None and extension.find() is None and extension.module is None
    assert "was not built: run `phalanx build`" in extension.why_not()
    assert extension.ensure(False) == (extension.path(), False)
    assert extension.ensure(False) == (extension.path(), True)
    assert extension.ensure(True) == (extension.path(), False)
    assert list(folder().iterdir()) == [extension.path()]
    assert extension.load_built().number == 42 and extension.load_built() is extension.load() is extension.module
    assert prepared == [extension.module] and extension.why_not() is None


def test_the_first_use_compiles_it(sources, monkeypatch):
    assert small(sources).load().number == 42
    monkeypatch.setenv("CXX", "false")
    assert small(sources).load().number == 42  # it is there
    with pytest.raises(RuntimeError, match="false failed"):
        small(sources, extra=3).load()


def test_its_place_depends_on_sources_headers_and_key(sources):
    paths = {small(sources).path(), small(sources, extra=3).path()}
    (sources / "number.h").write_text("#define NUMBER 41")
    paths.add(small(sources).path())
    (sources / "small.cpp").write_text(SOURCE + "// more")
    paths.add(small(sources).path())
    assert len(paths) == 4 and {path.parent for path in paths} == {folder()}


def test_what_others_may_write_is_not_loaded_and_nothing_is_compiled_there(sources):
    extension = small(sources)
    path = extension.build()
    path.chmod(0o722)
    assert extension.load_built() is None and f"{path} may be written by others" in extension.why_not()
    path.unlink()
    path.parent.chmod(0o777)
    for compile_it in (extension.load, extension.build):
        with pytest.raises(RuntimeError, match="others may write .*chmod go-w"):
            compile_it()
    assert list(path.parent.iterdir()) == []


def test_a_broken_file_is_told_of_in_the_log_or_raised(sources, caplog):
    extension = small(sources)
    folder().mkdir(mode=0o700)
    extension.path().write_bytes(b"not a library")
    extension.path().chmod(0o700)
    with caplog.at_level(logging.WARNING, logger="phalanx.collectives"):
        assert extension.load_built() is None
    assert f"{extension.path()} cannot be loaded" in caplog.text and "phalanx build --force" in caplog.text
    with pytest.raises(RuntimeError, match="small-torch"):
        extension.load()


def test_without_a_compiler_or_a_folder_the_error_says_what_to_do(sources, monkeypatch):
    monkeypatch.setenv("PHALANX_NATIVE", "")
    assert small(sources).path() is None and "PHALANX_NATIVE is empty" in small(sources).why_not()
    with pytest.raises(RuntimeError, match="no cache directory: PHALANX_NATIVE is empty"):
        small(sources).load()
    monkeypatch.setenv("PHALANX_NATIVE", str(sources / "native"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler .*; nothing needs it"):
        small(sources).load()


def test_each_compilation_is_announced_before_it_begins(sources, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "false")
    with caplog.at_level(logging.WARNING, logger="phalanx.collectives"), pytest.raises(RuntimeError):
        small(sources).load()
    assert [record.getMessage().partition(", about a minute, once: ")[0] for record in caplog.records] == [
        f"compiling small for torch {torch.__version__}"
    ]


# A compiler that takes for ever, as a process and another one that it started.
SLOW_COMPILER = """#!/bin/sh
sleep 1000 &
echo $$ $! > "$PIDS"
wait
"""
BUILD = """
import sys
from pathlib import Path
from phalanx.collectives.extension import Extension
Extension("small", "small", [Path(sys.argv[1])], "").build()
"""


def test_an_interrupted_compilation_ends_the_compiler_and_leaves_no_file(sources):
    compiler, pids = sources / "compiler", sources / "pids"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o700)
    os.mkfifo(pids)
    command = [sys.executable, "-c", BUILD, str(sources / "small.cpp")]
    env = {**os.environ, "CXX": str(compiler), "PIDS": str(pids)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        running = [os.pidfd_open(int(pid)) for pid in pids.read_text().split()]  # blocks until they run
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert errors.startswith("compiling small for torch ") and "KeyboardInterrupt" in errors
    for pidfd in running:
        assert select.select([pidfd], [], [], 60)[0], "a process of the compiler still runs"
        os.close(pidfd)
    assert len(running) == 2 and list((sources / "native").iterdir()) == []
