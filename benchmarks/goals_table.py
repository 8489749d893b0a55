"""Judges every cell of the newest results of `phalanx bench` against the goals, and prints the tables.

With --misses it lists every cell that misses a goal. What stands in the way of each is decided by the rules of
goals_causes.py; docs/explanation/goals.md explains the letters, and docs/pictures/goals.py draws the cells.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import goals_causes
import goals_python
from goals_causes import Cell, Run
from readme_table import PEERS, byte_count, head, microseconds

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

# The goals, from the project's goals in numbers (goals.md, "Speed on CPU"): time / time of the fastest peer of the run.
SIZES = (256, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
ALL_REDUCE = dict(
    zip(SIZES, (0.5, 0.5, 0.65, 0.7, 0.6, 0.75, 0.7, 0.5), strict=True)
)  # two ranks, float32, user buffers
FOUR_RANKS = 0.5  # all_reduce and barrier, four ranks on two cores
OTHERS = 0.7  # the other collectives, two ranks, float32
AHEAD = 1.0  # every other cell: ahead of every peer
BARRIER_US = 0.2  # two ranks
# Up to which ratio of the distances between cores two rows can be compared, and up to which difference of the parts of
# their calls that were made while these were far apart.
ALIKE, FAR_ALIKE = 1.5, 0.25
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
DTYPES = ("float32", "bfloat16")
BUFFERS = ("user", "symmetric")
RANKS = (2, 4)
# The goal behind the goal: time / the limit printed beside the row.
LIMIT = {"all_reduce": 1.2}
LIMIT_OTHERS = 1.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--misses", action="store_true", help="list every cell that misses a goal")
    parser.add_argument("files", nargs="*", type=Path, help="results; default: the newest of each machine and kind")
    given = parser.parse_args()
    results = [(path, read(path)) for path in given.files or found(RESULTS)]
    runs, python = newest(results, "c"), newest(results, "python")
    cells = with_float32([cell for run in runs for cell in cells_of(run)])
    if given.misses:
        print("\n".join(misses(cells)))
    else:
        for name, lines in contents(cells, runs, python):
            print("\n".join([f"## {name}", "", *lines, ""]))
    return 0


# ---- results -------------------------------------------------------------------------------------------------------


def found(folder: Path) -> list[Path]:
    """All files of results: those of other machines lie in folders of their own."""
    return sorted(folder.rglob("*.json"))


def read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def newest(results: Iterable[tuple[Path, dict[str, Any]]], level: str) -> list[Run]:
    """Of each machine, number of ranks and dtype the result whose name sorts last: names begin with the date."""
    last: dict[tuple[str, int, str], Run] = {}
    for path, result in sorted(results, key=lambda pair: pair[0].name):
        complete = not result.get("failures") and result.get("complete", True)  # not interrupted
        if result.get("benchmark") == "phalanx bench" and result["level"] == level and complete:
            # A run of one collective does not take the place of a table. Older ones do not say how far apart the cores
            # were, and their limits were made in another way.
            if level == "c" and (not set(COLLECTIVES) <= set(result["collectives"]) or "probe_tables" not in result):
                continue
            for dtype in {row["dtype"] for row in result["rows"]}:
                last[result["machine"]["cpu"], result["ranks"], dtype] = Run(path.name, result, dtype)
    return sorted(last.values(), key=lambda run: (run.machine, run.ranks, DTYPES.index(run.dtype)))


def cells_of(run: Run) -> Iterator[Cell]:
    """Every row of Phalanx that has figures and a peer."""
    rows = {
        (row["collective"], row["bytes"], row["who"], row["variant"]): row for row in run.rows if "median_us" in row
    }
    for (collective, size, who, buffers), row in rows.items():
        peers = {
            name: rows[collective, size, name, "user"] for name in PEERS if (collective, size, name, "user") in rows
        }
        if who != "phalanx" or not peers:
            continue
        best = min(peers, key=lambda name: float(peers[name]["median_us"]))
        goal = goal_of(collective, run.ranks, run.dtype, buffers, size, peers[best]["median_us"])
        yield Cell(run, collective, size, buffers, row, best, peers[best], goal, LIMIT.get(collective, LIMIT_OTHERS))


def with_float32(cells: list[Cell]) -> list[Cell]:
    """The cells, each with the time of the same row of the run with float32, if that is alike."""
    in_float32 = {key_of(cell): cell for cell in cells if cell.run.dtype == "float32"}

    def time(cell: Cell) -> float | None:
        other = in_float32.get(key_of(cell))
        if other is None or not 1 / ALIKE <= cell.apart / other.apart <= ALIKE or abs(cell.far - other.far) > FAR_ALIKE:
            return None
        return other.us

    return [replace(cell, in_float32=time(cell)) for cell in cells]


def key_of(cell: Cell) -> tuple[str, int, str, int, str]:
    return cell.run.machine, cell.run.ranks, cell.collective, cell.size, cell.buffers


def goal_of(collective: str, ranks: int, dtype: str, buffers: str, size: int, peer_us: float) -> float:
    """The largest time / time of the fastest peer that reaches the goal; of AHEAD, the first that does not."""
    if collective == "barrier":
        return FOUR_RANKS if ranks > 2 else BARRIER_US / peer_us
    if ranks > 2:
        return FOUR_RANKS if collective == "all_reduce" else AHEAD
    if dtype != "float32":
        return AHEAD
    if collective == "all_reduce":
        return ALL_REDUCE.get(size, AHEAD) if buffers == "user" else AHEAD
    return OTHERS


# ---- the tables ----------------------------------------------------------------------------------------------------


def contents(cells: list[Cell], runs: list[Run], python: list[Run]) -> Iterator[tuple[str, Iterable[str]]]:
    """Each section by name."""
    yield "runs", sources([*runs, *python])
    yield "counts", counts(cells, runs)
    yield "barrier", barriers(cells)
    yield "tables", tables(cells, runs)
    yield "absent", absent(runs)
    yield "machine", goals_causes.probes(runs)
    for letter in goals_causes.LETTERS:
        yield f"cause {letter}", goals_causes.evidence(letter, cells)
    yield "adding", goals_causes.adding(cells)
    yield "recorder", goals_causes.recorder(RESULTS)
    yield "python", goals_python.table(python)


def sources(runs: list[Run]) -> Iterator[str]:
    yield from head(["machine", "ranks", "what", "file", "date", "scheduler"])
    for run in runs:
        what = run.dtype if run.result["level"] == "c" else "from Python"
        scheduler = "`SCHED_FIFO`" if run.result["realtime"] else "ordinary"
        cells = [run.machine, str(run.ranks), what, f"`{run.file}`", run.result["date"], scheduler]
        yield "| " + " | ".join(cells) + " |"


def counts(cells: list[Cell], runs: list[Run]) -> Iterator[str]:
    yield from head(
        [
            "machine",
            "ranks",
            "dtype",
            "cells",
            "at the goal",
            "ahead of every peer",
            "within the limit's margin",
            "not measured",
        ]
    )
    for machine in sorted({run.machine for run in runs}):
        for ranks in RANKS:
            for dtype in DTYPES:
                own = [
                    cell
                    for cell in cells
                    if (cell.run.machine, cell.run.ranks, cell.run.dtype) == (machine, ranks, dtype)
                ]
                whole = len(COLLECTIVES) * len(SIZES) * len(BUFFERS) + len(BUFFERS)
                figures = [
                    len(own),
                    sum(not cell.misses_goal for cell in own),
                    sum(cell.ratio < AHEAD for cell in own),
                    sum(not cell.misses_limit for cell in own),
                    whole - len(own),
                ]
                yield f"| {machine} | {ranks} | {dtype} | " + " | ".join(map(str, figures)) + " |"


def barriers(cells: list[Cell]) -> Iterator[str]:
    """Each run measured the same call twice, once for each kind of buffer."""
    yield from head(["machine", "ranks", "run", "us", "fastest peer", "ratio", "goal", "limit", "ratio to it"])
    for cell in cells:
        if cell.collective == "barrier":
            goal = f"{BARRIER_US} us" if cell.run.ranks == 2 else f"{cell.goal}x"
            peer = f"{PEERS[cell.peer]} {microseconds(cell.peer_row)}"
            marks = marked(cell.ratio, cell.misses_goal, None, goals_causes.of_goal(cell))
            limit = marked(cell.over_limit, cell.misses_limit, None, goals_causes.of_limit(cell))
            figures = [
                cell.run.machine,
                str(cell.run.ranks),
                f"{cell.run.dtype}, {cell.buffers}",
                microseconds(cell.row),
                peer,
            ]
            yield "| " + " | ".join([*figures, marks, goal, f"{cell.limit:.2f}", limit]) + " |"


def tables(cells: list[Cell], runs: list[Run]) -> Iterator[str]:
    """Two tables for each run: against the fastest peer, and against the limit."""

    def peer(cell: Cell) -> str:
        return marked(cell.ratio, cell.misses_goal, cell.goal, goals_causes.of_goal(cell))

    def limit(cell: Cell) -> str:
        return marked(cell.over_limit, cell.misses_limit, None, goals_causes.of_limit(cell))

    for run in runs:
        own = [cell for cell in cells if cell.run is run]
        yield f"### {run.machine}, {run.ranks} ranks, {run.dtype}"
        yield ""
        yield from matrix("time / time of the fastest peer", own, peer)
        yield ""
        yield from matrix("time / limit", own, limit)
        yield ""


def matrix(title: str, cells: list[Cell], shown: Callable[[Cell], str]) -> Iterator[str]:
    at = {(cell.collective, cell.buffers, cell.size): cell for cell in cells}
    yield from head([title, *(byte_count(size) for size in SIZES)])
    for collective in COLLECTIVES:
        for buffers in BUFFERS:
            line = [f"{collective}, {buffers}"]
            for size in SIZES:
                cell = at.get((collective, buffers, size))
                line.append("-" if cell is None else shown(cell))
            yield "| " + " | ".join(line) + " |"


def marked(value: float, missed: bool, goal: float | None, letters: str) -> str:
    """A ratio; in bold, with the goal and the letters of what stands in the way, where it misses."""
    if not missed:
        return f"{value:.2f}"
    # 0.704 of 0.7 must not look as if it had reached it.
    near = goal is not None and f"{value:.2f}" == f"{goal:.2f}"
    shown = f"{value:.3f}" if near else f"{value:.2f}"
    return f"**{shown}{'' if goal is None else f' > {goal:g}'}** {letters}"


def absent(runs: list[Run]) -> Iterator[str]:
    """Which peers have no figure in which tables, with the reason that the file gives."""
    yield from head(["machine", "ranks", "dtype", "peer", "collectives", "why"])
    for run in runs:
        missing: dict[tuple[str, str], list[str]] = {}
        for row in run.rows:
            if row["who"] in PEERS and "absent" in row:
                missing.setdefault((PEERS[row["who"]], row["absent"]), []).append(row["collective"])
        for (peer, why), collectives in missing.items():
            names = ", ".join(dict.fromkeys(collectives))
            yield f"| {run.machine} | {run.ranks} | {run.dtype} | {peer} | {names} | {why} |"


def misses(cells: list[Cell]) -> Iterator[str]:
    """One line for each cell that misses its goal or the margin of the limit."""
    titles = [
        "machine",
        "ranks",
        "dtype",
        "collective",
        "bytes",
        "buffers",
        "us",
        "p10",
        "p90",
        "peer",
        "ratio",
        "goal",
    ]
    yield from head([*titles, "why", "limit", "ratio to it", "why"])
    for cell in cells:
        if cell.misses_goal or cell.misses_limit:
            run, row = cell.run, cell.row
            line = [run.machine, run.ranks, run.dtype, cell.collective, byte_count(cell.size), cell.buffers]
            line += [
                microseconds(row),
                row["p10_us"],
                row["p90_us"],
                f"{PEERS[cell.peer]} {microseconds(cell.peer_row)}",
            ]
            line += [f"{cell.ratio:.3f}", f"{cell.goal:.3g}", goals_causes.of_goal(cell) if cell.misses_goal else ""]
            line += [
                f"{cell.limit:.3g}",
                f"{cell.over_limit:.2f}",
                goals_causes.of_limit(cell) if cell.misses_limit else "",
            ]
            yield "| " + " | ".join(map(str, line)) + " |"


if __name__ == "__main__":
    sys.exit(main())
