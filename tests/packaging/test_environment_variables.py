"""Every environment variable that a source names has a row in the one table, and every row is named by a source."""

import re
import subprocess
from pathlib import Path

from phalanx.core.environment import variables

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["core/src", "core/torch", "core/python", "packages/*/src/*", "tools", "tests/support"]
OTHERS = ["benchmarks", "examples", "conftest.py", ".ci/run"]
TABLE = "core/src/base/environment.h"
# "PHALANX_X" in C++ and Python, where macros have no quotation marks; $PHALANX_X in shell scripts.
NAME = re.compile(r"""(?:["'`]|\$\{?)(PHALANX_[A-Z0-9_]*[A-Z0-9])\b(?!\()""")


def named() -> dict[str, str]:
    """The variables in the sources, each with one file that names it."""
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS, *OTHERS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    found = {}
    for name in listed:
        path = ROOT / name
        if name == TABLE or "/tests/test_" in name or path.suffix in (".json", ".md", ".svg") or not path.is_file():
            continue
        for match in NAME.finditer(path.read_text(encoding="utf-8", errors="ignore")):
            found.setdefault(match.group(1), name)
    return found


def test_the_table_has_the_variables_that_the_sources_name_and_no_others() -> None:
    rows, sources = {row.name for row in variables()}, named()
    unlisted = {name: file for name, file in sources.items() if name not in rows}
    assert unlisted == {}, f"add a row to {TABLE} for each"
    of_tests = {"PHALANX_TEST_FULL", "PHALANX_TEST_HUGE"}  # only tests name them
    assert rows - set(sources) - of_tests == set(), f"{TABLE} has rows that no source reads"
