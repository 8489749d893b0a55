"""The two examples of the original proposal run, by themselves and under torchrun."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]])
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("symm_mem_signal.py", ["rank 0: got 42 from rank 1"]),  # M25
        ("symm_mem_copy.py", ["rank 0: copied 43 to rank 1", "rank 1: has 43"]),  # M26
    ],
)
def test_the_example_runs(name, lines, launcher):  # M25 M26
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in lines:
        assert line in done.stdout
