"""The page of goals explains every cell that misses, and each cell is judged by its own goal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "explanation" / "goals.md").read_text()


@pytest.fixture(scope="module")
def goals(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("goals_table")


def test_the_page_counts_the_cells_of_the_results(goals: ModuleType) -> None:
    results = [(path, goals.read(path)) for path in goals.found(goals.RESULTS)]
    cells = [cell for run in goals.newest(results, "c") for cell in goals.cells_of(run)]
    ahead = sum(cell.ratio < goals.AHEAD for cell in cells)
    reached = sum(not cell.misses_goal for cell in cells)
    assert f"ahead of every peer in {ahead} of {len(cells)} cells, and reaches its goal in {reached}." in PAGE


def test_every_cell_that_misses_has_letters_that_the_page_explains(goals: ModuleType) -> None:
    explained = set(re.findall(r"^### (\w): ", PAGE, re.MULTILINE))
    assert explained == set(goals.goals_causes.LETTERS)
    results = [(path, goals.read(path)) for path in goals.found(goals.RESULTS)]
    cells = [cell for run in goals.newest(results, "c") for cell in goals.cells_of(run)]
    assert cells
    for cell in cells:
        assert set(goals.goals_causes.of_goal(cell)) <= explained
        assert set(goals.goals_causes.of_limit(cell)) <= explained


def test_every_row_of_phalanx_in_the_results_is_a_cell(goals: ModuleType) -> None:
    results = [(path, goals.read(path)) for path in goals.found(goals.RESULTS)]
    for run in goals.newest(results, "c"):
        rows = [row for row in run.rows if row["who"] == "phalanx" and "median_us" in row]
        assert len(list(goals.cells_of(run))) == len(rows), run.file


@pytest.mark.parametrize(
    ("cell", "goal"),
    [
        (("all_reduce", 2, "float32", "user", 256), 0.5),
        (("all_reduce", 2, "float32", "user", 8 << 10), 0.65),
        (("all_reduce", 2, "float32", "user", 4 << 20), 0.75),
        (("all_reduce", 2, "float32", "symmetric", 256), 1.0),
        (("all_reduce", 2, "bfloat16", "user", 256), 1.0),
        (("all_reduce", 4, "bfloat16", "symmetric", 256), 0.5),
        (("broadcast", 2, "float32", "symmetric", 256), 0.7),
        (("broadcast", 4, "float32", "user", 256), 1.0),
        (("barrier", 2, "float32", "user", 0), 0.4),
        (("barrier", 4, "float32", "user", 0), 0.5),
    ],
)
def test_a_cell_is_judged_by_its_own_goal(goals: ModuleType, cell: tuple[str, int, str, str, int], goal: float) -> None:
    assert goals.goal_of(*cell, peer_us=0.5) == pytest.approx(goal)


def test_the_newest_result_of_a_machine_is_taken_and_a_failed_one_is_not(goals: ModuleType) -> None:
    def result(**changed: object) -> dict[str, object]:
        whole = {
            "benchmark": "phalanx bench",
            "level": "c",
            "ranks": 2,
            "failures": [],
            "machine": {"cpu": "one"},
            "collectives": list(goals.COLLECTIVES),
            "rows": [{"dtype": "float32"}],
            "probe_tables": [],
        }
        return {**whole, **changed}

    before = result()
    del before["probe_tables"]  # made before results said how far apart the cores were
    results = [
        (Path("2026-01-05-c.json"), before),
        (Path("2026-01-03-c.json"), result(failures=["gloo"])),
        (Path("b/2026-01-02-c.json"), result()),
        (Path("a/2026-01-01-c.json"), result()),
        (Path("2026-01-04-c.json"), result(collectives=["all_reduce"])),
        (Path("2026-01-01-c.json"), result(machine={"cpu": "two"})),
    ]
    assert {(run.machine, run.file) for run in goals.newest(results, "c")} == {
        ("one", "2026-01-02-c.json"),
        ("two", "2026-01-01-c.json"),
    }
