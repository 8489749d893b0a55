"""Every example in Python ends well, and a user's program. (The example in C++ is built and run by test_native.py.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from c10d_groups import has_compiler, native_folder, needs_torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow  # the part examples of .ci/run runs them too
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path) -> None:
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    run(native_folder(), str(example))


@pytest.mark.slow
def test_the_elastic_example_changes_the_members_of_its_group() -> None:
    needs_torch(2, 14, "reconfigure")
    run(native_folder(), str(ROOT / "examples" / "elastic.py"), "--reconfigure")


def test_the_page_on_examples_lists_every_program() -> None:
    page = (ROOT / "docs" / "howto" / "examples.md").read_text()
    assert [path.name for path in EXAMPLES if f"`{path.name}`" not in page] == []


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("--compile",), marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_a_program_with_every_package_runs(arguments: tuple[str, ...]) -> None:
    if arguments and not has_compiler():
        pytest.skip("needs a C++ compiler")
    run("", str(Path(__file__).with_name("user_program.py")), *arguments)  # the part mypy of .ci/run checks its types


def run(native: str, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PHALANX_NATIVE": native},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout
