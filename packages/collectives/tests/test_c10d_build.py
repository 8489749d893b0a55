"""The compiled backend: made once, at the first use; and what happens where that cannot be."""

import os
import subprocess
import sys

import pytest

from c10d_groups import has_compiler, native_folder
from phalanx.collectives.c10d import _build

SAY = "from phalanx.collectives import c10d; print(c10d.implementation(), c10d.implementation())"
# A compiler that takes no time: it notes what it is asked for, and the result is there already.
COMPILER = """#!/bin/sh
for word; do
  [ "$before" = -o ] && out=$word
  case $word in -shared) shared=1 ;; *.cpp) source=$word ;; esac
  before=$word
done
echo "${source##*/}" >> "$LOG"
if [ -n "$shared" ]; then cp "$READY" "$out"; else : > "$out"; fi
"""


def start(native, choice="auto", **environment):
    env = {**os.environ, "PHALANX_NATIVE": str(native), "PHALANX_C10D": choice, **environment}
    return subprocess.Popen(
        [sys.executable, "-c", SAY], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def say(native, choice="auto", **environment):
    process = start(native, choice, **environment)
    out, err = process.communicate(timeout=280)
    return process.returncode, out, err


def ready():
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_NATIVE", native_folder())
        return _build.path()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_many_ranks_that_start_at_once_one_compiles(tmp_path):
    compiler, native = tmp_path / "compiler", tmp_path / "native"
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    env = {"CXX": str(compiler), "LOG": str(tmp_path / "log"), "READY": str(ready())}
    processes = [start(native, **env) for _ in range(3)]
    assert [process.communicate(timeout=280)[0] for process in processes] == ["cpp cpp\n"] * 3
    compiled = sorted((tmp_path / "log").read_text().split("\n")[:-1])
    assert compiled == ["", *(f"unit{i}.cpp" for i in range(len(compiled) - 1))]  # each once, and the link
    assert 2 <= len(compiled) <= len(_build._SOURCES) + 1
    assert [each.name for each in native.iterdir()] == [ready().name]  # no lock, no scratch
    assert say(native, **{**env, "CXX": "false"})[1] == "cpp cpp\n"  # found


@pytest.mark.slow
def test_without_a_compiler_groups_are_served_in_python_which_is_said(tmp_path):  # P28
    status, out, err = say(tmp_path / "native", PATH="", CXX="")
    assert (status, out) == (0, "python python\n")
    assert err.count("served in Python") == 1 and "no C++ compiler" in err
    status, out, err = say(tmp_path / "native", choice="cpp", PATH="", CXX="")
    assert status != 0 and "PHALANX_C10D is cpp" in err and "no C++ compiler" in err


def test_a_choice_is_obeyed(tmp_path, monkeypatch):
    assert say(tmp_path, choice="python") == (0, "python python\n", "")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("PHALANX_C10D", "Rust")
    with pytest.raises(ValueError, match="PHALANX_C10D is 'rust'; use one of auto, cpp, python"):
        _build.choice()
    monkeypatch.setenv("PHALANX_C10D", "")
    assert _build.choice() == "auto"


@pytest.mark.slow
def test_what_others_may_write_and_what_is_broken_is_passed_over(tmp_path):
    broken = tmp_path / ready().name
    broken.write_bytes(b"not a library")
    broken.chmod(0o700)
    status, out, err = say(tmp_path)
    assert (status, out) == (0, "python python\n") and str(broken) in err
    broken.unlink()
    tmp_path.chmod(0o777)
    status, out, err = say(tmp_path)
    assert (status, out) == (0, "python python\n") and f"others may write {tmp_path}" in err
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_quoted_once(tmp_path):
    status, out, err = say(tmp_path, CXX="false")
    assert (status, out) == (0, "python python\n") and err.count("false failed (exit status 1)") == 1
