"""The pictures of the documentation are what its scripts draw, its first program runs, and .ci/site.py finds faults."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from c10d_groups import has_compiler, native_folder

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


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
    assert all(line in done.stdout for line in promised[1].splitlines())  # both ranks write to it at once


def look_at(folder: Path, body: str) -> tuple[int, str]:
    (folder / "index.html").write_text(f"<!doctype html><body style='margin: 0'><article>{body}</article>")
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "site.py", folder], capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("link", ["nowhere.html", "index.html#nothing", "#nothing"])
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # without Chromium
    assert look_at(tmp_path, '<p id="here"><a href="index.html#here">here</a></p>')[0] == 0
    code, text = look_at(tmp_path, f'<a href="{link}">there</a>')
    assert code == 1 and f"index.html: {link}" in text and "skipped: " in text


def test_a_line_of_code_that_is_cut_off_and_a_page_that_is_too_wide_are_found(tmp_path: Path) -> None:
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("needs Chromium")
    lines = "\n".join(["short", "long " * 100, "short", "long " * 100])
    code, text = look_at(tmp_path, f"<pre style='white-space: break-spaces'>{lines}</pre>")
    assert code == 0, text
    code, text = look_at(tmp_path, f"<pre style='overflow: auto'>{lines}</pre><div style='width: 1000px'>wide</div>")
    assert code == 1 and "index.html: 2 lines of code are cut off at 1280 px" in text
    assert "index.html: is 1000 px wide in a window of 390 px" in text and "in a window of 1280 px" not in text
