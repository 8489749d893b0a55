"""Plots of the kept results of benchmarks: each names the newest file of its kind, which it is made from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from readme_table import PEERS, byte_count
from svg import BLUE, GREEN, INK, MUTED, ORANGE, RED, Axes, Picture

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
COLOURS = {
    "phalanx": BLUE,
    "symmetric": GREEN,
    "gloo": RED,
    "mpich": "#8a63b8",
    "mpich-ofi": "#c0508a",
    "openmpi": ORANGE,
    "impi": "#6b7f3a",
    "oneccl": "#7a7a7a",
    "plain": "#9aa7b3",
    "torch": RED,
    "python": "#7fb0dc",
    "native": BLUE,
}
Series = list[tuple[str, str, list[tuple[float, float]]]]  # label, colour, points
Bars = list[tuple[str, list[tuple[str, float]]]]  # label of a group, its bars: key of a colour, and value
DECADES = {1e-1: "0.1", 1.0: "1", 1e1: "10", 1e2: "100", 1e3: "1,000", 1e4: "10,000", 1e5: "100,000", 1e6: "1,000,000"}


def newest(what: str) -> tuple[str, Any]:
    """The path and the content of the result whose name sorts last."""
    path = max(RESULTS.rglob(f"*-{what}.json"), key=lambda found: found.name)
    return path.relative_to(RESULTS).as_posix(), json.loads(path.read_text(encoding="utf-8"))


def pictures() -> Iterator[tuple[str, Picture]]:
    yield "all_reduce_times", all_reduce("xeon/*-c-2-ranks")
    yield "from_python", from_python()
    yield "training", training()
    yield "tensor_parallel", tensor_parallel()
    yield "dispatch", dispatch()
    yield "compiled", compiled()
    yield "between_hosts", between_hosts()
    yield "detection", detection()


# ---- two kinds of plots --------------------------------------------------------------------------------------------


def curves(p: Picture, area: tuple[float, float, float, float], title: str, series: Series, y_title: str) -> None:
    """Times by bytes, both logarithmic, with a legend at the right."""
    left, top, width, _ = area
    xs = sorted({x for _, _, points in series for x, _ in points})
    values = [y for _, _, points in series for _, y in points]
    low = max(value for value in DECADES if value <= min(values))
    high = min(value for value in DECADES if value >= max(values))
    axes = Axes(p, area, (xs[0], xs[-1]), (low, high), log_x=True, log_y=True)
    shown = xs[:: max(1, round(len(xs) / 8))]
    ticks = {value: label for value, label in DECADES.items() if low <= value <= high}
    axes.grid({x: byte_count(int(x)) for x in shown}, ticks, "bytes", y_title)
    p.text(left, top - 14, title, size=14, bold=True, anchor="start")
    for label, colour, points in series:
        axes.curve(points, colour, width=3 if label.startswith("Phalanx") else 1.5)
    ends = sorted((axes.at(*points[-1])[1], label, colour) for label, colour, points in series)
    y = -99.0
    for wanted, label, colour in ends:
        y = max(wanted, y + 17)
        p.text(
            left + width + 10, y + 4, label, size=12, colour=colour, anchor="start", bold=label.startswith("Phalanx")
        )


def bars(
    p: Picture, area: tuple[float, float, float, float], title: str, groups: Bars, names: dict[str, str], form: str
) -> None:
    """Horizontal bars from zero, a group below the other, with the value behind each bar."""
    left, top, width, height = area
    top_value = max(value for _, group in groups for _, value in group)
    p.text(left, top - 26, title, size=14, bold=True, anchor="start")
    x = left
    for key, label in names.items():
        p.box(x, top - 16, 11, 11, fill=COLOURS[key], stroke=COLOURS[key], radius=1)
        p.text(x + 16, top - 6, label, size=12, anchor="start")
        x += 30 + 6.6 * len(label)
    count = sum(len(group) for _, group in groups)
    thick = (height - 10 * len(groups)) / count
    y = top + 4
    for label, group in groups:
        p.text(left - 10, y + thick * len(group) / 2 + 4, label, size=12, anchor="end")
        for key, value in group:
            length = width * value / top_value
            p.box(left, y, length, thick - 2, fill=COLOURS[key], stroke=COLOURS[key], radius=1)
            p.text(left + length + 6, y + thick / 2 + 3, format(value, form), size=11, colour=INK, anchor="start")
            y += thick
        y += 10


def origin(path: Path, result: dict[str, Any]) -> str:
    machine = f"{result['machine']['cpu']}, {result['cores']} cores"
    return f"{result['date']}, {machine}: medians of {result['rounds']} rounds, {path.relative_to(RESULTS)}"


def source(p: Picture, *lines: str) -> Picture:
    for index, line in enumerate(lines):
        p.text(14, p.height - 10 - 15 * (len(lines) - 1 - index), line, size=11, colour=MUTED, anchor="start")
    return p


# ---- the plots -----------------------------------------------------------------------------------------------------


def all_reduce(which: str) -> Picture:
    path = max(RESULTS.glob(f"{which}.json"), key=lambda found: found.name)
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in result["rows"] if row["collective"] == "all_reduce" and "median_us" in row]

    def points(who: str, variant: str) -> list[tuple[float, float]]:
        return [(row["bytes"], row["median_us"]) for row in rows if (row["who"], row["variant"]) == (who, variant)]

    series: Series = [(label, COLOURS[who], points(who, "user")) for who, label in PEERS.items()]
    series.append(("Phalanx", COLOURS["phalanx"], points("phalanx", "user")))
    series.append(("Phalanx, symmetric memory", COLOURS["symmetric"], points("phalanx", "symmetric")))
    p = Picture(860, 395, "Time of all_reduce by size, for Phalanx and five other libraries")
    curves(
        p, (80, 50, 570, 270), "all_reduce of float32, two ranks of one host", series, "microseconds (lower is better)"
    )
    return source(p, origin(path, result))


def from_python() -> Picture:
    path = max(RESULTS.glob("xeon/*-python-2-ranks.json"), key=lambda found: found.name)
    result = json.loads(path.read_text(encoding="utf-8"))
    wanted = (
        ("gloo", "torch.distributed", "gloo", RED),
        ("gloo", "functional", "gloo, functional", "#d98880"),
        ("python", "phalanx.collectives.all_reduce", "Phalanx, new tensor", COLOURS["python"]),
        ("python", "phalanx.collectives.all_reduce_", "Phalanx, in place", BLUE),
    )
    series: Series = []
    for who, variant, label, colour in wanted:
        rows = [row for row in result["rows"] if (row["who"], row["variant"]) == (who, variant) and "median_us" in row]
        series.append((label, colour, [(row["bytes"], row["median_us"]) for row in rows]))
    p = Picture(860, 395, "Time of all_reduce called from PyTorch by size, over gloo and over Phalanx")
    curves(p, (80, 50, 570, 270), "all_reduce called from PyTorch, two ranks", series, "microseconds (lower is better)")
    return source(p, origin(path, result))


def training() -> Picture:
    groups: Bars = []
    files = []
    for what, where in (("data-parallel", "one host"), ("data-parallel-hosts", "two hosts")):
        path, result = newest(what)
        files.append(path)
        for row in result["rows"]:
            kind = {"ddp": "DDP", "fsdp": "FSDP2"}[row["kind"]]
            groups.append((f"{kind}, {where}", [("gloo", row["gloo_ms"]), ("phalanx", row["phalanx_ms"])]))
    path, result = newest("fsdp-over-tp")
    files.append(path)
    for row in result["rows"]:
        pair = [("gloo", row["ms"]["torch/gloo"]), ("phalanx", row["ms"]["ours/phalanx"])]
        groups.append((f"FSDP2 over TP, width {row['width']}", pair))
    p = Picture(860, 400, "Milliseconds of a training step, over gloo and over Phalanx")
    names = {"gloo": "PyTorch over gloo", "phalanx": "Phalanx"}
    bars(p, (200, 60, 560, 285), "A training step in milliseconds (lower is better)", groups, names, ".0f")
    return source(
        p, f"2 cores; {files[0]}, {files[1]} (network namespaces), {files[2]} (2 x 2 ranks, so two on a core)"
    )


def tensor_parallel() -> Picture:
    path, result = newest("tensor-parallel")
    names = {
        "plain": "by hand",
        "phalanx": "Phalanx",
        "python": "torch's DTensor, Phalanx",
        "gloo": "torch's DTensor, gloo",
    }
    keys = {"plain": "by_hand", "phalanx": "phalanx", "python": "torch_over_phalanx", "gloo": "torch_over_gloo"}
    groups: Bars = [
        (
            f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}, width {row['width']}, {row['length']} tokens",
            [(colour, row[f"{key}_over_by_hand"]) for colour, key in keys.items()],
        )
        for row in result["rows"]
    ]
    p = Picture(860, 290, "A tensor-parallel block by four ways, relative to the block written by hand")
    bars(
        p,
        (200, 60, 560, 185),
        "Step of a tensor-parallel block / the same by hand (lower is better)",
        groups,
        names,
        ".2f",
    )
    return source(p, f"{result['cores']} cores, torch {result['torch']}, medians of {result['rounds']} rounds: {path}")


def dispatch() -> Picture:
    path, result = newest("dtensor-dispatch")
    names = {"plain": "plain tensor", "native": "Phalanx", "python": "Phalanx, Python only", "torch": "torch's DTensor"}
    ops = ("add", "mm", "view", "mul by a number", "layer_norm", "mm, grad")
    warm = result["results"]["warm"]
    groups: Bars = [(op, [(key, warm[op][key]["median_us"]) for key in names]) for op in ops]
    p = Picture(860, 470, "What an op on a DTensor costs before the work on the tensor itself begins")
    bars(p, (140, 60, 640, 370), "An op on a small DTensor in microseconds (lower is better)", groups, names, ".1f")
    about = result["about"]
    return source(
        p, f"one rank, {about['cores']} cores, torch {about['torch']}, medians of {about['rounds']} rounds: {path}"
    )


def compiled() -> Picture:
    path, result = newest("compiled-block")
    p = Picture(860, 390, "A compiled tensor-parallel block: how many times as long gloo takes as the plug-in")
    shades = {1024: GREEN, 2048: BLUE, 4096: ORANGE}
    for index, dtype in enumerate(("float32", "bfloat16")):
        area = (70 + 385 * index, 60, 280, 250)
        rows = [row for row in result["rows"] if row["dtype"] == dtype]
        tokens = sorted({row["tokens"] for row in rows})
        axes = Axes(p, area, (tokens[0], tokens[-1]), (0.9, 3.1), log_x=True)
        axes.grid({t: str(t) for t in tokens}, {y: f"{y:g}x" for y in (1.0, 1.5, 2.0, 2.5, 3.0)}, "tokens", "")
        p.text(area[0], area[1] - 14, f"{dtype}: gloo / plug-in", size=14, bold=True, anchor="start")
        for number, (hidden, colour) in enumerate(shades.items()):
            points = [(row["tokens"], row["gloo_over_plug_in"]) for row in rows if row["hidden"] == hidden]
            axes.curve(points, colour)
            p.text(
                area[0] + 190,
                area[1] + 20 + 17 * number,
                f"hidden size {hidden}",
                size=12,
                colour=colour,
                anchor="start",
            )
    machine = result["machine"]
    text = f"{result['date']}, {machine['cpu']}, {machine['cores']} cores, {result['ranks']} ranks: {path}"
    return source(p, text, "1x: the same time as stock Inductor over gloo; 2x: half of it")


def between_hosts() -> Picture:
    path, result = newest("between-hosts")
    p = Picture(860, 780, "Time of all_reduce between two hosts by size, for Phalanx and other libraries")
    who = {
        "gloo": "gloo",
        "mpich": "MPICH over UCX",
        "mpich-ofi": "MPICH over OFI",
        "openmpi": "Open MPI",
        "phalanx": "Phalanx",
    }
    for index, (topology, title) in enumerate((("2x1", "one rank on each host"), ("2x2", "two ranks on each host"))):
        rows = [row for row in result["rows"] if (row["topology"], row["op"]) == (topology, "all_reduce")]
        series: Series = [
            (label, COLOURS[key], [(row["bytes"], row[f"{key}_us"]) for row in rows]) for key, label in who.items()
        ]
        area = (90, 50 + 360 * index, 590, 250)
        curves(p, area, f"all_reduce over TCP, two hosts, {title}", series, "microseconds (lower is better)")
    return source(p, f"{path}: {result['about']}")


def detection() -> Picture:
    path, result = newest("fault-campaign")
    kinds: Sequence[tuple[str, str]] = (
        ("kill", "killed"),
        ("nofile", "no descriptors left"),
        ("nomem", "no memory left"),
    )
    groups: Bars = []
    for kind, label in kinds:
        for ranks, times in result["kinds"][kind]["time_to_error_ms"].items():
            groups.append((f"{label}, {ranks} ranks", [("phalanx", times["p50"]), ("python", times["p99"])]))
    p = Picture(860, 400, "Milliseconds from a fault to the error on the other ranks")
    names = {"phalanx": "median", "python": "99th percentile"}
    bars(
        p, (200, 60, 560, 295), "From the fault to the error on the other ranks, in milliseconds", groups, names, ".1f"
    )
    return source(p, f"{result['date']}, {result['machine']['cores']} cores, {result['cases']} cases: {path}")
