"""Shows a result of `phalanx bench`: python -m phalanx.tools.bench.report FILE.json [--plot FILE.svg]."""

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.tools.bench._peers import OTHER, PEERS

SIZE_OF = {
    "all_reduce": "bytes of each rank's input, and of its output",
    "all_gather": "bytes of each rank's output; its input is one block of it",
    "reduce_scatter": "bytes of each rank's input; its output is one block of it",
    "all_to_all": "bytes of each rank's input, and of its output",
    "broadcast": "bytes of the buffer",
    "barrier": "nothing is moved",
}


def main(argv: list[str] | None = None) -> int:
    """Print the table of a result file.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit status: 1 if the file cannot be shown.
    """
    parser = argparse.ArgumentParser(prog="python -m phalanx.tools.bench.report", description="Show a result.")
    parser.add_argument("file", type=Path, metavar="FILE.json", help="written by phalanx bench --json")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw it (needs phalanx-tools[plot])")
    given = parser.parse_args(argv)
    try:
        result = json.loads(given.file.read_text(encoding="utf-8"))
        if not isinstance(result, dict) or result.get("benchmark") != "phalanx bench":
            raise ValueError("it is no result of phalanx bench")
    except (OSError, ValueError) as error:
        print(f"{given.file}: {error}", file=sys.stderr)
        return 1
    print(table(result))
    return 0 if given.plot is None or plot(result, given.plot) else 1


# ---- the table -------------------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """Everything, as text."""
    lines = list(_head(result))
    for collective, dtype in _sections(result):
        rows = [row for row in result["rows"] if (row["collective"], row["dtype"]) == (collective, dtype)]
        lines += ["", *(_python_table if result["level"] == "python" else _c_table)(collective, dtype, rows, result)]
    notes = {name: why for name, why in result["peers"].items() if why}
    if notes:
        lines += ["", "# absent"]
        lines += [f"#   {PEERS[name].title}: {why}" for name, why in notes.items()]
    if result["failures"]:
        lines += ["", "# FAILED", *(f"#   {failure}" for failure in result["failures"])]
    return "\n".join(lines)


def gigabytes(nanoseconds: float, size: int) -> str:
    """Speed, for the head of the table."""
    return f"{size / nanoseconds:.1f}" if nanoseconds > 0 else "?"


def _head(result: dict[str, Any]) -> Iterator[str]:
    machine, versions = result["machine"], result["versions"]
    caches = ", ".join(f"{name} {size}" for name, size in machine["caches"].items())
    yield f"# phalanx bench, {result['date']}"
    yield f"# {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}; {caches or 'caches unknown'}"
    yield "# " + ", ".join(f"{name} {text}" for name, text in versions.items())
    scheduler = ", SCHED_FIFO" if result["realtime"] else ""
    yield (
        f"# {result['ranks']} ranks pinned to {result['cores']} cores{scheduler}; {result['rounds']} rounds in turns; "
        "median, p10, p90 of all calls, each as long as on its slowest rank; microseconds, GB/s"
    )
    probes = result["probes"]
    if probes is not None:
        trip, span = probes["round_trip_ns"], probes.get("round_trip_span_ns")
        yield (
            f"# machine: clock {probes['clock_ns']:.0f} ns, bare barrier {probes['barrier_ns']:.0f} ns"
            + (f", alone {probes['barrier_once_ns']:.0f} ns" if "barrier_once_ns" in probes else "")
            + (f", cache line there and back {trip:.0f} ns" if trip else "")
            + (f" ({span[0]:.0f} to {span[1]:.0f})" if span else "")
        )
        for kind in ("copy", "pull", "reduce"):
            shown = [f"{short(int(size))} {gigabytes(ns, int(size))}" for size, ns in probes["moves_ns"][kind].items()]
            yield f"#   {kind:7} GB/s: " + ", ".join(shown[2:])


def _sections(result: dict[str, Any]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["collective"], row["dtype"]) for row in result["rows"]))


def by_way(rows: list[dict[str, Any]]) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Rows by size, participant and variant."""
    return {(row["bytes"], row["who"], row["variant"]): row for row in rows}


def best_peer(rows: list[dict[str, Any]], size: int) -> dict[str, Any] | None:
    """The fastest row of a peer at a size."""
    found = [row for row in rows if row["bytes"] == size and row["who"] in PEERS and "median_us" in row]
    return min(found, key=lambda row: float(row["median_us"]), default=None)


def _c_table(collective: str, dtype: str, rows: list[dict[str, Any]], result: dict[str, Any]) -> Iterator[str]:
    ways, peers = by_way(rows), list(result["peers"])
    what = "" if collective == "barrier" else f" {dtype}{' sum' if 'reduce' in collective else ''}"
    yield f"# {collective}{what}; size: {SIZE_OF[collective]}"
    yield (
        f"#{'size':>11}  {'buffers':9} {'median':>10} {'p10':>10} {'p90':>10} {'algbw':>7} {'busbw':>7} |"
        + "".join(f" {PEERS[name].title:>10}" for name in peers)
        + f" | {'best peer':>10} {'ratio':>6} | {'limit':>10} {'ratio':>6}"
        + (f" | {OTHER:>10} {'ratio':>6}" if any(who == OTHER for _, who, _ in ways) else "")
    )
    for size, who, variant in ways:
        if who != "phalanx":
            continue
        row, best = ways[size, who, variant], best_peer(rows, size)
        text = f" {size:>11,}  {variant:9} "
        if "median_us" in row:
            text += " ".join(f"{_us(row[key]):>10}" for key in ("median_us", "p10_us", "p90_us"))
            text += f" {row['algbw_gb_s']:>7.2f} {row['busbw_gb_s']:>7.2f} |"
        else:
            text += f"{'absent':>10} {'':>10} {'':>10} {'':>7} {'':>7} |"
        for name in peers:
            other = ways.get((size, name, "user"), {})
            text += f" {_us(other['median_us']) if 'median_us' in other else 'absent':>10}"
        ratio = f"{row['median_us'] / best['median_us']:.2f}" if best and "median_us" in row else "-"
        text += f" | {PEERS[best['who']].title if best else '-':>10} {ratio:>6}"
        limit = row.get("limit")
        against = f"{row['median_us'] / limit['us']:.2f}" if limit and limit["us"] else "-"
        text += f" | {_us(limit['us']) if limit else '-':>10} {against:>6}"
        if (size, OTHER, variant) in ways:
            other = ways[size, OTHER, variant]
            known = "median_us" in other and "median_us" in row
            ratio = f"{row['median_us'] / other['median_us']:.3f}" if known else "-"
            text += f" | {_us(other['median_us']) if 'median_us' in other else 'absent':>10} {ratio:>6}"
        yield text
    yield from _reasons(rows, result)


def _reasons(rows: list[dict[str, Any]], result: dict[str, Any]) -> Iterator[str]:
    """Why peers that are here have no figure in this table."""
    reasons = {
        (row["who"], row["absent"]): None for row in rows if "absent" in row and not result["peers"].get(row["who"])
    }
    for who, why in reasons:
        yield f"#   {PEERS[who].title if who in PEERS else who}: {why}"


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
            yield f" {size:>11}  {way(row):34} {'absent':>10}"
    yield from _reasons(rows, result)


def way(row: dict[str, Any]) -> str:
    """Name of a row at the level of Python."""
    if row["who"] not in PEERS:
        return str(row["variant"])
    title = PEERS[row["who"]].title
    return title if row["variant"] == "torch.distributed" else f"{title}, functional collectives"


def _us(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def short(size: int) -> str:
    """1024 as "1k"."""
    for unit, bits in (("g", 30), ("m", 20), ("k", 10)):
        if size and size % (1 << bits) == 0:
            return f"{size >> bits}{unit}"
    return str(size)


# ---- the plot --------------------------------------------------------------------------------------------------------


def plot(result: dict[str, Any], path: Path) -> bool:
    """Draw medians over sizes, one panel for each collective and dtype.

    Returns:
        False, with a word on standard error, when matplotlib is missing.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("svg" if path.suffix == ".svg" else "agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        print(f"{path} was not drawn: matplotlib is missing: pip install matplotlib", file=sys.stderr)
        return False
    sections = [section for section in _sections(result) if section[0] != "barrier"]
    if not sections:
        print(f"{path} was not drawn: there is nothing but a barrier", file=sys.stderr)
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
            name = PEERS[row["who"]].title
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
