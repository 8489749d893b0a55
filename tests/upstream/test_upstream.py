"""A sample of torch's own tests of process groups; `.ci/run upstream` runs all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from c10d_groups import native_folder


@pytest.mark.slow
def test_a_sample_of_torchs_own_tests_passes_in_gloos_place():
    program = Path(__file__).parent / "run.py"
    command, env = [sys.executable, program, "--every", "12"], {**os.environ, "PHALANX_NATIVE": native_folder()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
