"""docs/reference/behaviours.md: every row is there, and is shown by tests that exist and name it."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("collectives", "symm_mem", "inductor_plugin")
COLLECTIVES, SYMM_MEM, INDUCTOR = (ROOT / "packages" / name / "tests" for name in PACKAGES)
CORE = ROOT / "core" / "tests"
# Where the tests of a section may be; the first folder that has the file counts.
FOLDERS = {
    "F": [COLLECTIVES],
    "A": [COLLECTIVES],
    "P": [COLLECTIVES],
    "M": [SYMM_MEM, CORE],
    "I": [INDUCTOR, SYMM_MEM, CORE],
}
PAGE = (ROOT / "docs" / "reference" / "behaviours.md").read_text()
ROW = re.compile(r"^\| ([FAPMI]\d+d?) \| (.+?) \| ((?:`[^`]+`(?:, )?)+) \|$", re.MULTILINE)
ROWS = {row: (text, re.findall(r"`([^`]+)`", tests)) for row, text, tests in ROW.findall(PAGE)}
# F8d: what torch gets wrong about F8.
LAST = {"F": 29, "A": 12, "P": 42, "M": 40, "I": 11}
EXPECTED = [f"{section}{number}" for section, last in LAST.items() for number in range(1, last + 1)]
NAMES = re.compile(r"\b([FAPMI])(\d+)(d?)\b(?: to \1(\d+)\b)?")


def rows_in(text: str) -> set[str]:
    """The rows that a comment names: "P8", "F8d", "P1 to P6"."""
    found = set()
    for section, first, defect, last in NAMES.findall(text):
        found |= {f"{section}{number}{defect}" for number in range(int(first), int(last or first) + 1)}
    return found


@functools.cache
def named_in(path: Path) -> frozenset[str]:
    """The rows that the comments of a file name."""
    if path.suffix == ".cpp":
        return frozenset().union(*map(rows_in, re.findall(r"//.*", path.read_text())))
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    comments = (token.string for token in tokens if token.type == tokenize.COMMENT and "noqa" not in token.string)
    return frozenset().union(*map(rows_in, comments))


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    """The names of the tests of a file."""
    if path.suffix == ".cpp":
        return frozenset(re.findall(r"^TEST\((\w+)\)", path.read_text(), re.MULTILINE))
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_")


def where_is(file: str, row: str) -> Path:
    """The file of tests that a row means."""
    found = [folder / file for folder in FOLDERS[row[0]] if (folder / file).exists()]
    assert found, f"{row} names {file}, which is in none of {FOLDERS[row[0]]}"
    return found[0]


def test_every_row_is_there_once_and_in_order() -> None:
    assert [row for row in ROWS if row != "F8d"] == EXPECTED
    heads = len(LAST)  # of tables, which look like rows
    assert len(ROW.findall(PAGE)) == len(ROWS) == PAGE.count("\n| ") - heads


@pytest.mark.parametrize("row", ROWS)
def test_what_shows_a_row_exists_and_names_it(row: str) -> None:
    _, shown_by = ROWS[row]
    assert shown_by and len(set(shown_by)) == len(shown_by)
    for each in shown_by:
        file, _, test = each.partition("::")
        path = where_is(file, row)
        assert test in functions_of(path), each
        assert row in named_in(path), f"no comment of {file} names {row}"


def test_no_comment_names_a_row_that_is_not_there() -> None:
    in_python = [path for folder in (COLLECTIVES, SYMM_MEM, INDUCTOR) for path in folder.glob("test_*.py")]
    files = [*in_python, CORE / "test_device.cpp"]
    unknown = {path.name: named_in(path) - set(ROWS) for path in files}
    assert {name: rows for name, rows in unknown.items() if rows} == {}
