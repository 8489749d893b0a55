"""The two examples of the original proposal, and a collective of one's own, run by themselves and under torchrun."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]])
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("symm_mem_signal.py", ["rank 0: got 42 from rank 1"]),  # M25
        ("symm_mem_copy.py", ["rank 0: copied 43 to rank 1", "rank 1: has 43"]),  # M26
        ("own_collective.py", ["Python, C++", "ranks have gathered what torch gathers"]),  # M32
    ],
)
def test_the_example_runs(name, lines, launcher):  # M25 M26 M32
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in lines:
        assert line in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
def test_the_collective_in_numba_gives_the_same():  # M32
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_collective.py")], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Python, C++, numba: 3 ranks have gathered what torch gathers" in done.stdout


def test_the_kernel_of_ones_own_runs_on_a_gpu():  # M32
    command = [sys.executable, str(EXAMPLES / "own_kernel_cuda.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.removeprefix("skipped: ").strip())
    assert "all_reduce and rms_norm in one kernel on the GPU: as torch computes them" in done.stdout
