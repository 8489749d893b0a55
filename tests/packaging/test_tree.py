"""No file of the repository names a machine, a registry's host, or a path that exists on one machine only."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Put together here so that this file does not match itself.
HOSTS = ["py" + r"pi\.org", "pytho" + "nhosted", r"download\." + "pytorch"]
FORBIDDEN = re.compile("|".join([*HOSTS, r"(?<![\w.])/ho" + "me/", r"(?<![\w.])/wo" + "rk/"]))  # not src/work/
BINARY = {".png", ".gz", ".whl", ".so", ".npz"}


def files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_host_or_a_path_of_one_machine() -> None:
    found = []
    for path in files():
        if path.suffix not in BINARY:
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
                if match := FORBIDDEN.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


def test_no_large_file_is_in_the_repository() -> None:
    assert [str(path.relative_to(ROOT)) for path in files() if path.stat().st_size > 1 << 20] == []
