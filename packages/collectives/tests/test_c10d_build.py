"""The compiled backend: made once, at the first use; and what happens where that cannot be."""

import os
import subprocess
import sys

import pytest

from c10d_groups import has_compiler, native_folder
from phalanx.collectives._c10d import _build

LOAD = "from phalanx.collectives import c10d; c10d.load(); c10d.load(); print('loaded')"
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


def start(native, **environment):
    env = {**os.environ, "PHALANX_NATIVE": str(native), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", LOAD], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def load(native, **environment):
    process = start(native, **environment)
    out, err = process.communicate(timeout=280)
    return process.returncode, out, err


def ready():
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_NATIVE", native_folder())
        return _build.EXTENSION.path()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_many_ranks_that_start_at_once_one_compiles(tmp_path):
    compiler, native = tmp_path / "compiler", tmp_path / "native"
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    env = {"CXX": str(compiler), "LOG": str(tmp_path / "log"), "READY": str(ready())}
    processes = [start(native, **env) for _ in range(3)]
    assert [process.communicate(timeout=280)[0] for process in processes] == ["loaded\n"] * 3
    compiled = sorted((tmp_path / "log").read_text().split("\n")[:-1])
    assert compiled == ["", *(f"unit{i}.cpp" for i in range(len(compiled) - 1))]  # each once, and the link
    assert 2 <= len(compiled) <= len(_build.EXTENSION.sources) + 1
    assert [each.name for each in native.iterdir()] == [ready().name]  # no lock, no scratch
    assert load(native, **{**env, "CXX": "false"})[1] == "loaded\n"  # found


JOIN = """
import sys
import torch, torch.distributed as dist
rank, store = int(sys.argv[1]), "file://" + sys.argv[2]
try:
    dist.init_process_group("phalanx", init_method=store, rank=rank, world_size=2)
except dist.DistBackendError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_a_compiler_on_one_rank_every_rank_is_told_what_to_do(tmp_path):  # P28
    own = [{"PHALANX_NATIVE": native_folder()}, {"PHALANX_NATIVE": str(tmp_path / "native"), "PATH": "", "CXX": ""}]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, str(rank), str(tmp_path / "store")],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **own[rank]},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        text = process.communicate(timeout=280)[0]
        assert "rank 1: the backend 'phalanx' is written in C++" in text and "there is no C++ compiler" in text, text
        assert "PHALANX_NATIVE" in text and "use the backend gloo: the functional collectives" in text, text


def test_what_cannot_be_compiled_is_refused_in_a_text_that_quotes_why(tmp_path):
    status, out, err = load(tmp_path, CXX="false")
    assert (status, out) == (1, "") and "false failed (exit status 1)" in err
    status, out, err = load("")
    assert (status, out) == (1, "") and "there is no cache directory: PHALANX_NATIVE is empty" in err


@pytest.mark.slow
def test_what_others_may_write_and_what_is_broken_is_passed_over(tmp_path):
    broken = tmp_path / ready().name
    broken.write_bytes(b"not a library")
    broken.chmod(0o700)
    status, out, err = load(tmp_path)
    assert (status, out) == (1, "") and str(broken) in err
    broken.unlink()
    tmp_path.chmod(0o777)
    status, out, err = load(tmp_path)
    assert (status, out) == (1, "") and f"others may write {tmp_path}" in err
    assert list(tmp_path.iterdir()) == []
