"""Shows a result of `phalanx bench`: python -m phalanx.tools.bench.report FILE.json [--plot FILE.svg]."""

import argparse
import importlib
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.core.commands import Parser
from phalanx.tools._arguments import new_file, short
from phalanx.tools.bench._peers import OTHER, PEERS, peer_variant

SIZE_OF = {
    "all_reduce": "bytes of each rank's input, and of its output",
    "all_gather": "bytes of each rank's output; its input is one block of it",
    "reduce_scatter": "bytes of each rank's input; its output is one block of it",
    "all_to_all": "bytes of each rank's input, and of its output",
    "broadcast": "bytes of the buffer",
    "barrier": "nothing is moved",
}


def parser() -> argparse.ArgumentParser:
    """The parser of `python -m phalanx.tools.bench.report`."""
    made = Parser(
        prog="python -m phalanx.tools.bench.report",
        description="Print the tables of a result of `phalanx bench`.",
    )
    made.add_argument("file", type=Path, metavar="FILE.json", help="a file that `phalanx bench --json` wrote")
    made.add_argument("--plot", type=new_file, metavar="FILE.svg", help="draw the result; needs phalanx-tools[plot]")
    return made


def main(argv: list[str] | None = None) -> int:
    """Print the table of a result file.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit status: 1 if the file cannot be shown.
    """
    given = parser().parse_args(argv)
    try:
        result = json.loads(given.file.read_text(encoding="utf-8"))
        if not isinstance(result, dict) or result.get("benchmark") != "phalanx bench":
            raise ValueError("not a result of `phalanx bench --json`")
    except (OSError, ValueError) as error:
        print(f"{given.file}: {error}", file=sys.stderr)
        return 1
    print(table(result))
    return 0 if given.plot is None or plot(result, given.plot) else 1


# ---- the table -------------------------------------------------------------------------------------------------------


WIDTH = 100  # of every line, as far as its words allow


def table(result: dict[str, Any]) -> str:
    """Everything, as text."""
    lines = [line for text in _head(result) for line in _comment(text)]
    for collective, dtype in _sections(result):
        rows = [row for row in result["rows"] if (row["collective"], row["dtype"]) == (collective, dtype)]
        lines += ["", *(_python_table if result["level"] == "python" else _c_table)(collective, dtype, rows, result)]
    notes = {name: why for name, why in result["peers"].items() if why}
    if notes:
        lines += ["", "# not measured"]
        lines += [line for name, why in notes.items() for line in _comment(f"  {PEERS[name].title}: {why}")]
    if result["failures"]:
        lines += ["", "# FAILED", *(line for text in result["failures"] for line in _comment(f"  {text}"))]
    if not result.get("complete", True):
        done = f"{result['rows_measured']} of {result['rows_planned']} rows were measured"
        lines += ["", f"# interrupted: {done}"]
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    wrapper = textwrap.TextWrapper(
        WIDTH, f"# {indent}", f"#   {indent}", break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text.strip())


def _head(result: dict[str, Any]) -> Iterator[str]:
    machine, versions = result["machine"], result["versions"]
    caches = ", ".join(f"{name} {size}" for name, size in machine["caches"].items())
    yield f"phalanx bench, {result['date']}"
    yield f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}; {caches or 'caches unknown'}"
    yield ", ".join(f"{name} {text}" for name, text in versions.items())
    scheduler = ", SCHED_FIFO" if result["realtime"] else ""
    yield (
        f"{result['ranks']} ranks pinned to {result['cores']} cores{scheduler}; {result['rounds']} rounds in turns; "
        "microseconds: median, p10 and p90 of all calls, where a call takes as long as on its slowest rank; GB/s"
    )
    probes = result["probes"]
    if probes is not None:
        trip, span = probes["round_trip_ns"], probes.get("round_trip_span_ns")
        yield (
            f"this machine: clock {probes['clock_ns']:.0f} ns, bare barrier {probes['barrier_ns']:.0f} ns"
            + (f" (alone {probes['barrier_once_ns']:.0f} ns)" if "barrier_once_ns" in probes else "")
            + (f", round trip of a cache line between two cores {trip:.0f} ns" if trip else "")
            + (f" ({span[0]:.0f} to {span[1]:.0f})" if span else "")
        )
        for kind in ("copy", "pull", "reduce"):
            speeds = [(int(size), int(size) / ns) for size, ns in probes["moves_ns"][kind].items() if ns > 0]
            yield f"{kind}, GB/s: " + ", ".join(f"{short(size)} {speed:.1f}" for size, speed in speeds[2:])


def _sections(result: dict[str, Any]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["collective"], row["dtype"]) for row in result["rows"]))


def by_way(rows: list[dict[str, Any]]) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Rows by size, participant and variant."""
    return {(row["bytes"], row["who"], row["variant"]): row for row in rows}


def best_peer(rows: list[dict[str, Any]], size: int, variant: str = "user") -> dict[str, Any] | None:
    """The fastest row of a peer at a size."""
    found = [row for row in rows if row["bytes"] == size and row["who"] in PEERS and "median_us" in row]
    found = [row for row in found if row["variant"] == peer_variant(variant)]
    return min(found, key=lambda row: float(row["median_us"]), default=None)


def _c_table(collective: str, dtype: str, rows: list[dict[str, Any]], result: dict[str, Any]) -> Iterator[str]:
    """Two tables: Phalanx, and what it is compared with."""
    ways = by_way(rows)
    own = [(size, variant, ways[size, who, variant]) for size, who, variant in ways if who == "phalanx"]
    against = any(who == OTHER for _, who, _ in ways)
    peers = [name for name in result["peers"] if any(row["who"] == name and "median_us" in row for row in rows)]
    what = "" if collective == "barrier" else f" {dtype}{' sum' if 'reduce' in collective else ''}"
    yield f"# {collective}{what}; size: {SIZE_OF[collective]}"
    yield (
        f"#{'size':>11} {'buffers':9} {'median':>9} {'p10':>9} {'p90':>9} {'algbw':>6} {'busbw':>6} |"
        f" {'best peer':14} {'/ peer':>6} | {'/ limit':>7}"
    )
    for size, variant, row in own:
        best = best_peer(rows, size, variant)
        text = f" {size:>11,} {variant:9} "
        if "median_us" in row:
            text += " ".join(f"{_us(row[key]):>9}" for key in ("median_us", "p10_us", "p90_us"))
            text += f" {row['algbw_gb_s']:>6.2f} {row['busbw_gb_s']:>6.2f} |"
        else:
            text += f"{'failed':>9} {'':>9} {'':>9} {'':>6} {'':>6} |"
        text += f" {PEERS[best['who']].title if best else '-':14} {_ratio(row, best['median_us'] if best else None):>6}"
        yield text + f" | {_ratio(row, row.get('limit', {}).get('us')):>7}"
    yield "# microseconds of the limit of this machine, and of others"
    heads = [PEERS[name].title.replace("gloo, unpinned", "unpinned") for name in peers]
    yield (
        f"#{'size':>11} {'buffers':9} {'limit':>9}"
        + "".join(f" {title:>9}" for title in heads)
        + (f" {OTHER:>9} {'/ other':>7}" if against else "")
    )
    for size, variant, row in own:
        text = f" {size:>11,} {variant:9} {_us(row.get('limit', {}).get('us')):>9}"
        theirs = [ways.get((size, name, peer_variant(variant)), {}) for name in peers]
        text += "".join(f" {_us(one.get('median_us')):>9}" for one in theirs)
        if against:
            other = ways.get((size, OTHER, variant), {}).get("median_us")
            text += f" {_us(other):>9} {_ratio(row, other):>7}"
        yield text
    yield from _reasons(rows, result)


def _ratio(row: dict[str, Any], other_us: float | None) -> str:
    """The median of a row divided by another time."""
    if "median_us" not in row or not other_us:
        return "-"
    ratio = row["median_us"] / other_us
    if ratio < 0.001:
        return "<0.001"
    return f"{ratio:.2g}" if ratio < 0.095 else f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"


def _reasons(rows: list[dict[str, Any]], result: dict[str, Any]) -> Iterator[str]:
    """Why a library that takes part has no figure in this table."""
    reasons = {
        (row["who"], row["absent"]): None for row in rows if "absent" in row and not result["peers"].get(row["who"])
    }
    for who, why in reasons:
        yield from _comment(f"  {PEERS[who].title if who in PEERS else who}: {why}")


def _python_table(collective: str, dtype: str, rows: list[dict[str, Any]], result: dict[str, Any]) -> Iterator[str]:
    yield f"# {collective} {dtype} sum, called from Python; size: {SIZE_OF[collective]}"
    yield f"#{'size':>11}  {'way':34} {'median':>10} {'p10':>10} {'p90':>10}  gloo / this"
    last = None
    for row in rows:
        size = f"{row['bytes']:,}" if row["bytes"] != last else ""
        last = row["bytes"]
        if "median_us" in row:
            gloo = by_way(rows).get((row["bytes"], "gloo", "torch.distributed"), {}).get("median_us")
            times = " ".join(f"{_us(row[key]):>10}" for key in ("median_us", "p10_us", "p90_us"))
            ratio = f"{gloo / row['median_us']:.2f}x" if gloo else "-"
            yield f" {size:>11}  {way(row):34} {times}  {ratio:>11}"
        else:
            yield f" {size:>11}  {way(row):34} {'failed':>10}"
    yield from _reasons(rows, result)


def way(row: dict[str, Any]) -> str:
    """Name of a row at the level of Python."""
    if row["who"] not in PEERS:
        return str(row["variant"])
    title = PEERS[row["who"]].title
    return title if row["variant"] == "torch.distributed" else f"{title}, functional collectives"


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


# ---- the plot --------------------------------------------------------------------------------------------------------


def plot(result: dict[str, Any], path: Path) -> bool:
    """Draw medians over sizes, one panel for each collective and dtype.

    Returns:
        False, with a message on standard error, where matplotlib is missing.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("svg" if path.suffix == ".svg" else "agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        print(
            f"{path} was not drawn: matplotlib is not installed; install it with `pip install matplotlib`",
            file=sys.stderr,
        )
        return False
    sections = [section for section in _sections(result) if section[0] != "barrier"]
    if not sections:
        print(f"{path} was not drawn: the result has only barriers, which have no size", file=sys.stderr)
        return False
    wide = min(3, len(sections))
    tall = -(-len(sections) // wide)
    matplotlib.rcParams["svg.hashsalt"] = "phalanx"  # the same file from the same result
    figure, axes = pyplot.subplots(tall, wide, figsize=(6 * wide, 4.5 * tall), squeeze=False, layout="constrained")
    for place, axis in enumerate(axes.flat):
        if place < len(sections):
            _panel(axis, *sections[place], result)
        else:
            axis.set_axis_off()
    machine = result["machine"]
    figure.suptitle(f"{result['ranks']} ranks on {result['cores']} cores; {machine['cpu']}; {result['date']}")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return True


def _panel(axis: Any, collective: str, dtype: str, result: dict[str, Any]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in result["rows"]:
        if (row["collective"], row["dtype"]) != (collective, dtype) or "median_us" not in row:
            continue
        if result["level"] == "python":
            name = way(row)
        elif row["who"] in PEERS:
            name = PEERS[row["who"]].title + (", list" if row["variant"] == "list" else "")
        else:
            name = f"Phalanx, {row['variant']}"
            if "limit" in row:
                lines.setdefault(f"limit, {row['variant']}", []).append((row["bytes"], row["limit"]["us"]))
        lines.setdefault(name, []).append((row["bytes"], row["median_us"]))
    for name, points in lines.items():
        style = ":" if name.startswith("limit") else "-"
        weight = 2.2 if name.lower().startswith("phalanx") else 1.1
        axis.plot(*zip(*points, strict=True), style, linewidth=weight, marker=".", label=name)
    axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="median, us", title=f"{collective} {dtype}")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


if __name__ == "__main__":
    sys.exit(main())
