"""The pictures of the documentation are what its scripts draw, and the program of its first page runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from c10d_groups import has_compiler, native_folder

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_pictures_are_what_the_scripts_draw() -> None:
    done = subprocess.run([sys.executable, DOCS / "pictures" / "draw.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_picture_is_in_a_page() -> None:
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    drawn = {path.name for path in (DOCS / "pictures").glob("*.svg")}
    assert {name for name in drawn if f"pictures/{name}" not in pages} == set()


def test_the_program_of_the_first_page_prints_what_the_page_says() -> None:
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    page = (DOCS / "index.md").read_text()
    promised = re.search(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert promised
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, DOCS / "hello.py"],
        env={**os.environ, "PHALANX_NATIVE": native_folder()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == promised[1].splitlines()
