"""What the ways from Python cost above the C call, beside the goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from goals_causes import Run
from readme_table import byte_count, head, microseconds

C = "phx_all_reduce (C, by cffi)"
# Microseconds above the C call, from the project's goals in numbers (goals.md, "Speed on CPU").
WAYS = {
    "phalanx.collectives.all_reduce": 3.0,
    "phalanx.collectives.all_reduce_": 3.0,
    "torch.ops.phalanx.all_reduce": 1.4,
    "torch.ops.phalanx.all_reduce_": 1.4,
    "torch.ops.phalanx.blocking_all_reduce": 1.4,
    "torch.ops.phalanx.blocking_all_reduce_": 1.4,
}
# Before there were blocking ops, those of compiled graphs were measured: complete on return, with two arguments more.
OLDER = {
    "torch.ops.phalanx_ordered.all_reduce": "torch.ops.phalanx.blocking_all_reduce",
    "torch.ops.phalanx_ordered.all_reduce_": "torch.ops.phalanx.blocking_all_reduce_",
}
# all_reduce_ above the C call in the smallest row, on a quiet machine: 0.3 us with the module of `phalanx build`, 2.8
# without (docs/adr/0014).
BUILT_US = 1.5
PAGE = 4096
LARGE = 1 << 20  # from here on what a way costs above the C call is lost in the time of the bytes


def table(runs: list[Run]) -> Iterator[str]:
    """Every size of every machine; and what the files say about the module of `phalanx build`."""
    yield from head(["machine", "bytes", "C call, us", *(f"`{way}`, goal {goal:g}" for way, goal in WAYS.items())])
    notes: list[str] = []
    for run in runs:
        rows: dict[int, dict[str, dict[str, Any]]] = {}
        for row in run.rows:
            if row["who"] == "python" and "median_us" in row:
                rows.setdefault(row["bytes"], {})[OLDER.get(row["variant"], row["variant"])] = row
        missed = 0
        for size, at in sorted(rows.items()):
            base = float(at[C]["median_us"])
            above = {way: float(at[way]["median_us"]) - base for way in WAYS if way in at}
            missed += sum(above[way] > goal for way, goal in WAYS.items() if way in above)
            cells = [
                "-" if way not in above else f"**{above[way]:+,.1f}**" if above[way] > goal else f"{above[way]:+,.1f}"
                for way, goal in WAYS.items()
            ]
            yield f"| {run.machine} | {byte_count(size)} | {microseconds(at[C])} | " + " | ".join(cells) + " |"
        smallest = rows[min(rows)]
        in_place = float(smallest["phalanx.collectives.all_reduce_"]["median_us"]) - float(smallest[C]["median_us"])
        built = "with" if in_place <= BUILT_US else "without"
        scheduler = "under" if run.result["realtime"] else "not under"
        largest = max(rows)
        new = float(rows[largest]["phalanx.collectives.all_reduce"]["median_us"]) - float(rows[largest][C]["median_us"])
        unsteady = [
            f"  At {byte_count(size)} `{way}` takes {microseconds(row)} us,"
            f" with a p10 of {row['p10_us']:,.1f} and a p90 of {row['p90_us']:,.1f}."
            for size, at in sorted(rows.items())
            for way, row in at.items()
            if size >= LARGE and way.endswith("_") and row["median_us"] - at[C]["median_us"] > WAYS.get(way, size)
        ]
        notes += [
            f"- {run.machine}: {missed} of {len(rows) * len(WAYS)} cells miss, of a run {scheduler} `SCHED_FIFO`.",
            f"  In place costs {in_place:.1f} us at {byte_count(min(rows))}: as {built} the module of `phalanx build`.",
            f"  At {byte_count(largest)} the new tensor costs {new / (largest / PAGE):.2f} us for each 4 KiB of it.",
            *unsteady,
        ]
    yield ""
    yield from notes
