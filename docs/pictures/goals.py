"""The goals as heat maps: for each machine and number of ranks, how long each collective takes compared with others."""

from __future__ import annotations

import math
from collections.abc import Iterator

import goals_causes
import goals_table
from goals_causes import Cell, Run
from readme_table import PEERS, byte_count
from svg import INK, LINE, MUTED, RED, Picture

WIDTH, HEIGHT, LEFT = 43, 21, 158


def pictures() -> Iterator[tuple[str, Picture]]:
    results = [(path, goals_table.read(path)) for path in goals_table.found(goals_table.RESULTS)]
    runs = goals_table.newest(results, "c")
    cells = goals_table.with_float32([cell for run in runs for cell in goals_table.cells_of(run)])
    for machine, ranks in sorted({(run.machine, run.ranks) for run in runs}):
        own = [run for run in runs if (run.machine, run.ranks) == (machine, ranks)]
        yield f"goals_{machine.split()[-1].lower()}_{ranks}", heat_map(machine, ranks, own, cells)


def heat_map(machine: str, ranks: int, runs: list[Run], cells: list[Cell]) -> Picture:
    size = len(goals_table.SIZES) * WIDTH
    p = Picture(
        LEFT + 2 * size + 60, 690, f"{machine}, {ranks} ranks: time compared with the fastest peer and the limit"
    )
    p.text(14, 24, f"{machine}, {ranks} ranks on {runs[0].result['cores']} cores", bold=True, anchor="start", size=15)
    for column, run in enumerate(runs):
        own = [cell for cell in cells if cell.run is run]
        left = LEFT + column * (size + 40)
        reached = sum(not cell.misses_goal for cell in own)
        ahead = sum(cell.ratio < goals_table.AHEAD for cell in own)
        text = f"{run.dtype}: {ahead} of {len(own)} cells ahead of every peer, {reached} at the goal"
        p.text(left, 46, text, bold=True, anchor="start", size=12)
        panel(p, left, 70, own, of_limit=False, labels=column == 0)
        panel(p, left, 372, own, of_limit=True, labels=column == 0)
    scale(p, p.height - 18)
    return p


def panel(p: Picture, left: float, top: float, cells: list[Cell], *, of_limit: bool, labels: bool) -> None:
    title = "time / limit of the machine" if of_limit else "time / time of the fastest peer"
    p.text(left, top - 5, title, size=11, colour=MUTED, anchor="start")
    at = {(cell.collective, cell.buffers, cell.size): cell for cell in cells}
    rows = [(name, buffers) for name in (*goals_table.COLLECTIVES, "barrier") for buffers in goals_table.BUFFERS]
    for line, (collective, buffers) in enumerate(rows):
        y = top + HEIGHT * line
        if labels:
            p.text(left - 8, y + 15, f"{collective}, {buffers}", size=11, anchor="end")
        for index, size in enumerate(goals_table.SIZES):
            cell = at.get((collective, buffers, 0 if collective == "barrier" else size))
            if cell is None or (collective == "barrier" and index):
                continue
            value, missed = (cell.over_limit, cell.misses_limit) if of_limit else (cell.ratio, cell.misses_goal)
            letters = (goals_causes.of_limit if of_limit else goals_causes.of_goal)(cell) if missed else ""
            note = f"{cell.us:.2f} us; {PEERS[cell.peer]} {cell.peer_us:.2f} us; limit {cell.limit:.2f} us"
            x = left + WIDTH * index
            p.box(x, y, WIDTH - 1, HEIGHT - 1, fill=colour(value), stroke=RED if missed else LINE, radius=1, note=note)
            p.text(x + WIDTH / 2, y + 14, f"{value:.2f} {letters}".strip(), size=10 if len(letters) < 2 else 9)
    for index, size in enumerate(goals_table.SIZES):
        p.text(left + WIDTH * (index + 0.5), top + HEIGHT * len(rows) + 14, byte_count(size), size=10, colour=MUTED)


def colour(ratio: float) -> str:
    """From green (half the time) over white (the same time) to red (twice as long)."""
    step = max(-1.0, min(1.0, math.log2(ratio)))
    red, green, blue = (120, 190, 130) if step < 0 else (235, 130, 115)
    return "#" + "".join(f"{round(255 - (255 - part) * abs(step)):02x}" for part in (red, green, blue))


def scale(p: Picture, y: float) -> None:
    for index, ratio in enumerate((0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)):
        p.box(LEFT + WIDTH * index, y - 12, WIDTH - 1, 18, f"{ratio:g}", fill=colour(ratio), size=10, radius=1)
    text = "0.5: half the time, 2: twice. Red frame: misses its goal"
    p.text(LEFT + WIDTH * 9 + 12, y + 1, text, size=11, colour=INK, anchor="start")
