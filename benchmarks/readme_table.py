"""Writes the figures of the README from the newest results of `phalanx bench`. With --check it only compares."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
RANKS = 2
SIZES = (1 << 8, 1 << 13, 1 << 20, 1 << 24, 1 << 26)  # bytes of the rows; the files have more
# Participant: head of the column.
PEERS = {"gloo": "gloo", "mpich": "MPICH", "openmpi": "Open MPI", "impi": "Intel MPI", "oneccl": "oneCCL"}
BUFFERS = {"user": "Phalanx", "symmetric": "Phalanx, symmetric memory"}
# Participant and way: head of the column.
PYTHON = {
    ("gloo-unpinned", "torch.distributed"): "gloo, unpinned",
    ("gloo", "functional"): "gloo, functional",
    ("python", "phalanx.collectives.all_reduce"): "`phalanx.collectives`",
    ("python", "phalanx.collectives.all_reduce_"): "the same in place",
    ("python", "torch.ops.phalanx.all_reduce"): "`torch.ops.phalanx`",
    ("python", "torch.ops.phalanx.blocking_all_reduce_"): "complete on return, in place",
    ("python", "phx_all_reduce (C, by cffi)"): "C call",
}
GLOO = ("gloo", "torch.distributed")
Rows = dict[int, dict[tuple[str, str], dict[str, Any]]]  # by bytes, then by participant and way


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the README is not what would be written")
    check = parser.parse_args().check
    found = [(level, path) for level in ("c", "python") if (path := newest_result(level)) is not None]
    if not found:
        print("no results yet: the README stays as it is")
        return 0
    sections = {"c": c_section, "python": python_section}
    names = " and ".join(path.name for _, path in found)
    before = README.read_text(encoding="utf-8")
    after = replaced(before, "\n".join(sections[level](path) for level, path in found))
    if before == after:
        print(f"README.md has the figures of {names}")
        return 0
    if check:
        print(f"README.md does not have the figures of {names}: run python benchmarks/readme_table.py")
        return 1
    README.write_text(after, encoding="utf-8")
    print(f"wrote the figures of {names}")
    return 0


def newest_result(level: str) -> Path | None:
    """The last by name, of two ranks and with all_reduce: names begin with the date. Machines have folders."""
    results = [path for path in (HERE / "results").rglob("*.json") if fits(read(path), level)]
    return max(results, key=lambda path: (path.name, path.parent.name), default=None)


def fits(result: dict[str, Any], level: str) -> bool:
    return (
        result.get("benchmark") == "phalanx bench"
        and result["level"] == level
        and result["ranks"] == RANKS
        and not result["failures"]
        and result.get("complete", True)  # not interrupted
        and bool(rows_of(result))
    )


def read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def rows_of(result: dict[str, Any]) -> Rows:
    """Those of all_reduce of float32 that have figures."""
    rows: Rows = {}
    for row in result["rows"]:
        if (row["collective"], row["dtype"]) == ("all_reduce", "float32") and "median_us" in row:
            rows.setdefault(row["bytes"], {})[row["who"], row["variant"]] = row
    return dict(sorted(rows.items()))


def shown(rows: Rows) -> list[tuple[int, dict[tuple[str, str], dict[str, Any]]]]:
    """The rows of the README."""
    return [(size, at_size) for size, at_size in rows.items() if size in SIZES]


def replaced(text: str, figures: str) -> str:
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"README.md must have one section between {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{figures}{END}", text)


def c_section(path: Path) -> str:
    """Markdown: the C functions and every peer of the run."""
    result = read(path)
    rows = rows_of(result)
    peers = [name for name in PEERS if any((name, "user") in at_size for at_size in rows.values())]
    kinds = [kind for kind in BUFFERS if any(("phalanx", kind) in at_size for at_size in rows.values())]
    lines = [
        f"`all_reduce`, float32, {RANKS} ranks of one host, C functions: median time in microseconds, and in brackets",
        "the ratio to the fastest other library (0.50: half its time).",
        "",
        *head(["bytes", *(PEERS[name] for name in peers), *(BUFFERS[kind] for kind in kinds)]),
    ]
    for size, at_size in shown(rows):
        others = [at_size[name, "user"]["median_us"] for name in peers if (name, "user") in at_size]
        cells = [byte_count(size)]
        cells += [microseconds(at_size.get((name, "user"))) for name in peers]
        for kind in kinds:
            own = at_size.get(("phalanx", kind))
            part = f" ({own['median_us'] / min(others):.2f})" if own and others else ""
            cells.append(microseconds(own) + part)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *source(path, result)]) + "\n"


def python_section(path: Path) -> str:
    """Markdown: the ways from Python and gloo."""
    result = read(path)
    rows = rows_of(result)
    ways = [way for way in PYTHON if all(way in at_size for at_size in rows.values())]
    lines = [
        "The same called from Python: median time in microseconds, and in brackets how many times as long gloo takes.",
        "",
        *head(["bytes", "gloo", *(PYTHON[way] for way in ways)]),
    ]
    for size, at_size in shown(rows):
        gloo = at_size.get(GLOO)
        cells = [byte_count(size), microseconds(gloo)]
        for way in ways:
            times = f" ({ratio(gloo['median_us'] / at_size[way]['median_us'])}x)" if gloo else ""
            cells.append(microseconds(at_size[way]) + times)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *source(path, result)]) + "\n"


def head(titles: list[str]) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---:|" * len(titles)


def source(path: Path, result: dict[str, Any]) -> Iterator[str]:
    machine = result["machine"]
    skipped = {"python", "mpi4py", "libphalanx", "isa", "compiler"}
    versions = ", ".join(
        f"{PEERS.get(name, name)} {text}" for name, text in result["versions"].items() if name not in skipped
    )
    yield f"{result['date']}; {machine['cpu']}, {machine['cores']} cores; {versions};"
    yield f"{result['rounds']} rounds in which all take turns, inputs rewritten before each call, the results of every"
    yield f"round checked. [How to measure](docs/howto/benchmark.md); [all figures]({path.relative_to(HERE.parent)})."


def microseconds(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    value = float(row["median_us"])
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def byte_count(size: int) -> str:
    for unit, bits in (("MiB", 20), ("KiB", 10)):
        if size % (1 << bits) == 0:
            return f"{size >> bits} {unit}"
    return f"{size} B"


def ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
