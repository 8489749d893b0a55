"""What stands in the way of a cell that misses a goal: rules over the figures of its run.

docs/explanation/goals.md says what each letter means. `of_goal` and `of_limit` try their rules in order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from readme_table import byte_count, head

SMALL = 8 << 10  # below, what is done once in a call counts for more than its bytes
SMALL_CROWDED = 64 << 10  # the same where ranks share cores
UNSTEADY = 1.75  # p90 / p10 from which a row has two kinds of calls
CONVERTED = 1.15  # time of bfloat16 / time of float32 from which adding counts, and not moving
CHUNK = 256 << 10  # what moves between two arrivals where ranks outnumber cores (phx_tuning, chunk_bytes)
CALLS = 2  # up to as many calls of a group of one, above the limit, are what a call costs
BARRIERS = 3  # of an iteration of the benchmark's loop that measures a barrier
LETTERS = ("O", "P", "L", "N", "D", "C", "F", "S", "M", "A", "U")


@dataclass(frozen=True)
class Run:
    """The rows of one dtype in one result.

    Attributes:
        file: Name of the file.
        result: All of it.
        dtype: Which rows.
    """

    file: str
    result: Mapping[str, Any]
    dtype: str

    @property
    def machine(self) -> str:
        return str(self.result["machine"]["cpu"]).replace("(R)", "").removesuffix(" Processor")

    @property
    def ranks(self) -> int:
        return int(self.result["ranks"])

    @property
    def crowded(self) -> bool:
        """Whether ranks share cores."""
        return self.ranks > int(self.result["cores"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.result["rows"] if row["dtype"] == self.dtype]

    @property
    def call_us(self) -> float:
        """What one of our calls takes in a group of one, without the reading of the clock that every limit has."""
        return (float(self.result["call_ns"]) - float(self.result["probes"]["clock_ns"])) / 1000

    @property
    def own_barrier(self) -> Mapping[str, Any]:
        """Our own barrier's row."""
        return next(row for row in self.rows if (row["collective"], row["who"]) == ("barrier", "phalanx"))

    @property
    def turn_us(self) -> float:
        """What it takes when a rank gives its core to another one: from our barrier, which consists of that."""
        row = self.own_barrier
        return float(row["median_us"]) / (float(row["switches"]) / BARRIERS)


@dataclass(frozen=True)
class Allowed:
    """What the machine allowed while a row was measured: one of the tables of `probe_tables`."""

    table: Mapping[str, Any]

    @property
    def barrier(self) -> float:
        """Of many bare barriers in a row, in microseconds."""
        return float(self.table["barrier_ns"]) / 1000

    def barriers(self, count: int) -> float:
        """As many of them in a call, in microseconds."""
        return float(self.table["barrier_once_ns"]) / 1000 + (count - 1) * self.barrier

    def move(self, kind: str, size: float) -> float:
        """Microseconds to move that many bytes, interpolated as phalanx.tools.bench does it."""
        times = {int(key): max(1.0, float(ns)) for key, ns in self.table["moves_ns"][kind].items()}
        sizes = sorted(times)
        if size <= sizes[0]:
            return times[sizes[0]] / 1000 if size > 0 else 0.0
        if size >= sizes[-1]:
            return times[sizes[-1]] * size / sizes[-1] / 1000
        above = next(place for place, one in enumerate(sizes) if one >= size)
        low, high = sizes[above - 1], sizes[above]
        part = math.log(size / low) / math.log(high / low)
        return math.exp(math.log(times[low]) + part * math.log(times[high] / times[low])) / 1000


@dataclass(frozen=True)
class Cell:
    """One row of Phalanx beside the fastest peer of its run. Times in microseconds."""

    run: Run
    collective: str
    size: int
    buffers: str
    row: dict[str, Any]
    peer: str
    peer_row: dict[str, Any]
    goal: float  # largest time / time of the peer that reaches the goal; 1 has to be undercut
    margin: float  # the same for the limit
    # Time of the same row in the run with float32, if the cores were about as far apart.
    in_float32: float | None = None

    @property
    def allowed(self) -> Allowed:
        return Allowed(self.run.result["probe_tables"][self.row["limit"]["table"]])

    @property
    def us(self) -> float:
        return float(self.row["median_us"])

    @property
    def peer_us(self) -> float:
        return float(self.peer_row["median_us"])

    @property
    def limit(self) -> float:
        return float(self.row["limit"]["us"])

    @property
    def ratio(self) -> float:
        return self.us / self.peer_us

    @property
    def over_limit(self) -> float:
        return self.us / self.limit

    @property
    def misses_goal(self) -> bool:
        return self.ratio > self.goal or self.ratio == self.goal == 1

    @property
    def misses_limit(self) -> bool:
        return self.over_limit > self.margin

    @property
    def goal_us(self) -> float:
        return self.goal * self.peer_us

    @property
    def spread(self) -> float:
        return float(self.row["p90_us"]) / float(self.row["p10_us"])

    @property
    def apart(self) -> float:
        """How long a line took there and back while the row was measured, in nanoseconds."""
        return float(self.row["round_trip_ns"][1]) if "round_trip_ns" in self.row else 1.0

    @property
    def far(self) -> float:
        """Which part of the calls were made while the cores were far apart."""
        return float(self.row.get("far_calls", 0)) / float(self.row["calls"])

    @property
    def far_to_near(self) -> float:
        """How much longer the calls took that were made then; 1 if there are none of one kind."""
        if "near_median_us" not in self.row or "far_median_us" not in self.row:
            return 1.0
        return float(self.row["far_median_us"]) / float(self.row["near_median_us"])

    @property
    def near_us(self) -> float:
        """The median of the calls that were made while the cores were near."""
        return float(self.row.get("near_median_us", self.us))

    @property
    def near_ratio(self) -> float:
        """To the peer's calls that were made in the same rounds."""
        return self.near_us / float(self.peer_row.get("near_median_us", self.peer_us))

    @property
    def more_switches(self) -> float:
        """How often more than in a barrier each rank gave its core away."""
        return max(0.0, float(self.row["switches"]) - float(self.run.own_barrier["switches"]))

    @property
    def with_turns(self) -> float:
        """The limit with our barrier for its first bare one, and what more switches than in a barrier take."""
        own = float(self.run.own_barrier["median_us"]) - self.allowed.barriers(1)
        return self.margin * (self.limit + max(0.0, own)) + self.more_switches * self.run.turn_us

    @property
    def at_rates_of_row(self) -> float:
        """The limit if each move ran at the rate of blocks as large as the row.

        The limit takes the time of the part that is moved, whose blocks may fit into a cache that the row's do not.
        """
        turns = math.ceil(self.run.ranks / int(self.run.result["cores"]))
        limit: dict[str, Any] = self.row["limit"]
        moved = sum(
            float(size) * self.allowed.move(kind, self.size) / self.size for kind, size in limit["bytes"].items()
        )
        for kind, size in limit.get("cached", {}).items():
            moved += float(size) / min(size, CHUNK) * self.allowed.move(kind, min(size, CHUNK))
        return self.allowed.barriers(int(limit["barriers"])) + turns * moved

    @property
    def one_way(self) -> float:
        """A broadcast without an answer: half a round trip of a line, and the two copies."""
        trip = float(self.allowed.table["round_trip_ns"] or 0.0) / 2000
        return trip + self.allowed.move("stage", self.size) + self.allowed.move("pull_staged", self.size)

    @property
    def arrivals(self) -> float:
        """What the arrivals between chunks take, at the price of this run's own barrier."""
        return (math.ceil(self.size / CHUNK) + 1) * float(self.run.own_barrier["median_us"])


def of_goal(cell: Cell) -> str:
    """Why a cell misses the goal against the peers; a second letter says why it misses the margin of the limit, too."""
    letter = _first_of_goal(cell)
    return letter + of_limit(cell) if letter in "OPL" and cell.misses_limit else letter


def _first_of_goal(cell: Cell) -> str:
    rules: dict[str, Callable[[], bool]] = {
        "O": lambda: _answers_nobody(cell),
        "P": lambda: cell.limit > cell.peer_us,
        "L": lambda: cell.limit > cell.goal_us,
        "N": lambda: not cell.misses_limit,
        "D": lambda: _reaches_at_times(cell, cell.goal_us) or (cell.far > 0 and cell.near_ratio <= cell.goal),
        **_shared(cell),
    }
    return next((letter for letter, applies in rules.items() if applies()), "U")


def of_limit(cell: Cell) -> str:
    """Why a cell is further from the limit than the margin."""
    rules: dict[str, Callable[[], bool]] = {
        "C": lambda: _adds_longer(cell),
        "D": lambda: _reaches_at_times(cell, cell.margin * cell.limit),
        **_shared(cell),
    }
    return next((letter for letter, applies in rules.items() if applies()), "U")


def _reaches_at_times(cell: Cell, us: float) -> bool:
    return float(cell.row["p10_us"]) <= us and (cell.spread >= UNSTEADY or cell.far_to_near >= UNSTEADY)


def _shared(cell: Cell) -> dict[str, Callable[[], bool]]:
    crowded = cell.run.crowded
    small = cell.size <= (SMALL_CROWDED if crowded else SMALL)
    return {
        "F": lambda: not crowded and small and cell.us <= cell.limit + CALLS * cell.run.call_us,
        "S": lambda: crowded and small and cell.us <= cell.with_turns,
        "M": lambda: not small and cell.us <= cell.margin * cell.at_rates_of_row,
        "A": lambda: crowded and not small and cell.us <= cell.margin * cell.at_rates_of_row + cell.arrivals,
    }


def _answers_nobody(cell: Cell) -> bool:
    if cell.collective != "broadcast" or cell.size > SMALL:
        return False
    if cell.run.crowded:
        return float(cell.peer_row["rank0_median_us"]) < cell.allowed.barriers(1)
    return cell.peer_us < cell.limit


def _adds_longer(cell: Cell) -> bool:
    if cell.run.dtype == "float32" or "reduce" not in cell.collective or cell.in_float32 is None:
        return False
    return cell.us >= CONVERTED * cell.in_float32


# ---- figures -------------------------------------------------------------------------------------------------------

Figure = tuple[str, Callable[[Cell], float], str]
FACTOR: Figure = ("time / goal", lambda cell: cell.us / cell.goal_us, ".2f")
LIMIT_TO_GOAL: Figure = ("limit / goal", lambda cell: cell.limit / cell.goal_us, ".2f")
TO_LIMIT: Figure = ("time / limit", lambda cell: cell.over_limit, ".2f")
FAST: Figure = ("p10 / limit", lambda cell: float(cell.row["p10_us"]) / cell.limit, ".2f")
SPREAD: Figure = ("p90 / p10", lambda cell: cell.spread, ".1f")
ABOVE: Figure = ("us above the limit", lambda cell: cell.us - cell.limit, ".2f")
BARE: Figure = ("bare barriers, us", lambda cell: cell.allowed.barriers(int(cell.row["limit"]["barriers"])), ".2f")
AT_RATES: Figure = ("time / limit at the row's rates", lambda cell: cell.us / cell.at_rates_of_row, ".2f")
FIGURES: dict[str, list[Figure]] = {
    "O": [
        ("us", lambda cell: cell.us, ".2f"),
        ("peer", lambda cell: cell.peer_us, ".2f"),
        ("its root", lambda cell: float(cell.peer_row["rank0_median_us"]), ".2f"),
        ("limit", lambda cell: cell.limit, ".2f"),
        ("bare barrier", lambda cell: cell.allowed.barriers(1), ".2f"),
        ("one way", lambda cell: cell.one_way, ".2f"),
    ],
    "P": [
        ("limit / peer", lambda cell: cell.limit / cell.peer_us, ".2f"),
        TO_LIMIT,
        ("goal / limit", lambda cell: cell.goal_us / cell.limit, ".2f"),
        ("time / peer", lambda cell: cell.ratio, ".2f"),
    ],
    "L": [LIMIT_TO_GOAL, TO_LIMIT, FACTOR],
    "N": [TO_LIMIT, LIMIT_TO_GOAL, FACTOR],
    "D": [
        SPREAD,
        FAST,
        TO_LIMIT,
        ("part of the calls with cores far apart", lambda cell: cell.far, ".2f"),
        ("far / near", lambda cell: cell.far_to_near, ".2f"),
    ],
    "C": [("time / float32", lambda cell: cell.us / (cell.in_float32 or cell.us), ".2f"), TO_LIMIT],
    "F": [ABOVE, ("call in a group of one, us", lambda cell: cell.run.call_us, ".3f"), BARE, TO_LIMIT],
    "S": [
        ABOVE,
        BARE,
        ("our barrier, us", lambda cell: float(cell.run.own_barrier["median_us"]), ".2f"),
        ("switches more than a barrier", lambda cell: cell.more_switches, ".2f"),
        ("one of them, us", lambda cell: cell.run.turn_us, ".2f"),
        TO_LIMIT,
    ],
    "M": [AT_RATES, TO_LIMIT],
    "A": [
        TO_LIMIT,
        AT_RATES,
        ("arrivals / time above the limit", lambda cell: cell.arrivals / (cell.us - cell.limit), ".2f"),
    ],
    "U": [TO_LIMIT, FAST, SPREAD, AT_RATES],
}


def evidence(letter: str, cells: list[Cell]) -> Iterator[str]:
    """A table of the figures of all cells that have a letter: from the smallest to the largest."""
    to_peers = [cell for cell in cells if cell.misses_goal and of_goal(cell)[0] == letter]
    to_limit = [cell for cell in cells if cell.misses_limit and of_limit(cell) == letter]
    if not to_peers and not to_limit:
        yield "No cell of these results."
        return
    figures = FIGURES[letter]
    yield from head(["missed", "machine", "ranks", "rows", "of", "cells", *(title for title, _, _ in figures)])
    for missed, group in (("goal", to_peers), ("margin", to_limit)):
        parts: dict[tuple[str, int, str], list[Cell]] = {}
        for cell in group:
            rows = f"{cell.collective}, {cell.buffers}" if missed == "goal" else f"{cell.buffers}, {cell.run.dtype}"
            parts.setdefault((cell.run.machine, cell.run.ranks, rows), []).append(cell)
        for (machine, ranks, rows), part in parts.items():
            which = [byte_count(cell.size) if missed == "goal" else cell.collective for cell in part if cell.size]
            line = [missed, machine, str(ranks), rows, ", ".join(dict.fromkeys(which)) or "-", str(len(part))]
            line += [_span([value(cell) for cell in part], form) for _, value, form in figures]
            yield "| " + " | ".join(line) + " |"


def _span(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def adding(cells: list[Cell]) -> Iterator[str]:
    """With two ranks, an all_reduce in two shots adds as many numbers as a reduce_scatter of the same size."""
    size, kinds = 64 << 10, ("reduce_scatter", "all_reduce")
    yield from head(
        ["machine", "buffers", *(f"{kind}, {dtype}, us" for kind in kinds for dtype in ("float32", "bfloat16"))]
    )
    at = {(cell.run.machine, cell.buffers, cell.collective): cell for cell in cells if _is_bfloat16(cell, size)}
    for machine, buffers in dict.fromkeys((machine, buffers) for machine, buffers, _ in at):
        pairs = [at.get((machine, buffers, kind)) for kind in kinds]
        times = [f"{cell.in_float32 or 0:.2f} | {cell.us:.2f}" if cell else "- | -" for cell in pairs]
        yield f"| {machine} | {buffers} | " + " | ".join(times) + " |"


def _is_bfloat16(cell: Cell, size: int) -> bool:
    return (cell.run.dtype, cell.run.ranks, cell.size) == ("bfloat16", 2, size) and "reduce" in cell.collective


def probes(runs: list[Run]) -> Iterator[str]:
    """What each machine allows, and how far its runs differ in that."""
    sizes = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
    yield from head(["machine", "measured", *(byte_count(size) for size in sizes)])
    for machine in sorted({run.machine for run in runs}):
        own = [run for run in runs if run.machine == machine]
        for kind in own[0].result["probes"]["moves_ns"]:
            allowed = [Allowed(table) for run in own for table in run.result["probe_tables"]]
            rates = [[size / one.move(kind, size) / 1000 for one in allowed] for size in sizes]
            yield f"| {machine} | {kind}, GB/s | " + " | ".join(_span(rate, ".1f") for rate in rates) + " |"
    yield ""
    yield from head(
        ["machine", "ranks", "clock, ns", "line there and back, ns", "bare barrier, ns", "second-level cache", "third"]
    )
    for machine, ranks in sorted({(run.machine, run.ranks) for run in runs}):
        own = [run for run in runs if (run.machine, run.ranks) == (machine, ranks)]
        caches = own[0].result["machine"]["caches"]
        line = [machine, str(ranks)]
        for key in ("clock_ns", "round_trip_ns", "barrier_ns"):
            line.append(_span([float(run.result["probes"][key]) for run in own], ".0f"))
        yield "| " + " | ".join([*line, caches.get("L2 unified", "?"), caches.get("L3 unified", "?")]) + " |"


def recorder(folder: Path) -> Iterator[str]:
    """What the search for ranks that disagree, and the record of calls, cost (detection_cost.py)."""
    path = max(folder.rglob("*-detection-cost.json"), key=lambda one: one.name)
    result = json.loads(path.read_text(encoding="utf-8"))
    builds = list(dict.fromkeys(row["build"] for row in result["rows"]))
    yield f"Two ranks, all_reduce, median nanoseconds of {result['turns']} turns (`{path.name}`):"
    yield ""
    yield from head(["build", *(byte_count(size) for size in dict.fromkeys(row["bytes"] for row in result["rows"]))])
    for build in builds:
        times = [f"{row['median_ns']:.0f}" for row in result["rows"] if row["build"] == build]
        yield f"| {build} | " + " | ".join(times) + " |"
