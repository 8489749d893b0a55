"""Writes the figures of the README from the newest file in benchmarks/results/. With --check it only compares."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
GLOO = "gloo"
# Name of the row: head of the column.
COLUMNS = {
    "gloo, unpinned": "gloo, unpinned",
    "phalanx.collectives.all_reduce": "`phalanx.collectives`",
    "phalanx.collectives.all_reduce_": "the same in place",
    "torch.ops.phalanx.all_reduce": "`torch.ops.phalanx`",
    "phx_all_reduce (C, by cffi)": "C call",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the README is not what would be written")
    check = parser.parse_args().check
    newest = newest_result()
    if newest is None:
        print("no results yet: the README stays as it is")
        return 0
    before = README.read_text(encoding="utf-8")
    after = replaced(before, section(newest))
    if before == after:
        print(f"README.md has the figures of {newest.name}")
        return 0
    if check:
        print(f"README.md does not have the figures of {newest.name}: run python benchmarks/readme_table.py")
        return 1
    README.write_text(after, encoding="utf-8")
    print(f"wrote the figures of {newest.name}")
    return 0


def newest_result() -> Path | None:
    """The last by name among the results of all_reduce_vs_gloo.py: names begin with the date."""
    results = [
        path for path in (HERE / "results").glob("*.json") if read(path).get("benchmark") == "all_reduce_vs_gloo"
    ]
    return max(results, key=lambda path: path.name, default=None)


def read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def replaced(text: str, figures: str) -> str:
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"README.md must have one section between {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{figures}{END}", text)


def section(path: Path) -> str:
    """Markdown: a table, and how it was measured."""
    result = read(path)
    rows: dict[int, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        rows.setdefault(row["bytes"], {})[row["way"]] = row
    ways = [way for way in COLUMNS if all(way in at_size for at_size in rows.values())]
    lines = [
        f"`all_reduce`, float32, {result['ranks']} ranks of one host, called from Python: median time, and in brackets",
        "how many times as long gloo takes.",
        "",
        "| bytes | gloo | " + " | ".join(COLUMNS[way] for way in ways) + " |",
        "|---:|" + "---:|" * (len(ways) + 1),
    ]
    for size, at_size in sorted(rows.items()):
        cells = [f"{at_size[way]['median_us']:,.1f} us ({ratio(at_size[way]['gloo_ratio'])}x)" for way in ways]
        lines.append(f"| {byte_count(size)} | {at_size[GLOO]['median_us']:,.1f} us | " + " | ".join(cells) + " |")
    machine, versions = result["machine"], result["versions"]
    pinned = "each pinned to a core" if result["pinned"] else "not pinned"
    lines += [
        "",
        f"{result['date']}; {machine['cpu']}, {machine['cores']} cores; ranks {pinned};",
        f"torch {versions['torch']}, Python {versions['python']}; {result['rounds']} rounds in which all take turns,",
        "inputs rewritten before each call, the results of every round checked.",
        "[benchmarks/README.md](benchmarks/README.md) says more; the figures are in",
        f"[{path.name}](benchmarks/results/{path.name}).",
    ]
    return "\n".join(lines) + "\n"


def byte_count(size: int) -> str:
    for unit, bits in (("MiB", 20), ("KiB", 10)):
        if size % (1 << bits) == 0:
            return f"{size >> bits} {unit}"
    return f"{size} B"


def ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
