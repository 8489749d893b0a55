"""Every example in Python ends well. (The one in C++ is built and run by test_native.py.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from c10d_groups import has_compiler, native_folder

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


@pytest.mark.slow  # the part examples of .ci/run runs them too
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path) -> None:
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    done = subprocess.run(
        [sys.executable, str(example)],
        env={**os.environ, "PHALANX_NATIVE": native_folder()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout
