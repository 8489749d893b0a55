#!/usr/bin/env python3
"""Checks that the rooms of core/src include only downwards, and that no files include each other in a circle.

.ci/layers.py               prints each include that goes upwards, and each circle; exit status 1 if there is any
.ci/layers.py --svg FILE    draws the rooms and what each includes (docs/explanation/rooms.svg)
"""

import argparse
import html
import re
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "core" / "src"
ROOMS = {  # from the bottom; each may include those before it
    "base": "errors, deadlines, waiting, progress, descriptors, configuration, tuning",
    "kernels": "reduce, copy, random fill",
    "store": "memory, file, TCP, wrapped and prefixed stores",
    "world": "identity, links, monitor, allocators and blocks",
    "group": "members, lanes, exchange, failure, derived groups, recorder",
    "symm": "symmetric allocations, rendezvous, signals, directory",
    "gpu": "driver, memory, kernels, workspaces, messages, multicast, tuning",
    "net": "carriers between hosts: UCX",
    "p2p": "messages: rings, matching, eager and rendezvous",
    "ops": "collectives: plans, algorithms, zero copy, coalesced calls",
    "api": 'every extern "C" function',
}
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def includes() -> dict[str, list[str]]:
    """The project's own includes of each file of core/src, public headers aside."""
    found = {}
    for path in sorted(SOURCES.rglob("*")):
        if path.suffix in {".h", ".cpp"}:
            names = INCLUDE.findall(path.read_text())
            found[str(path.relative_to(SOURCES))] = [name for name in names if not name.startswith("phalanx/")]
    return found


def room(name: str) -> str:
    return name.split("/")[0]


def upward(files: dict[str, list[str]]) -> list[str]:
    """What goes against the order of the rooms."""
    order = list(ROOMS)
    problems = [f"core/src/{name}: {room(name)} is no room" for name in files if room(name) not in ROOMS]
    for name, names in files.items():
        for included in names:
            if included not in files:
                if not included.startswith("phx_"):  # made by the build
                    problems.append(f"core/src/{name} includes {included}, which is not in core/src")
            elif order.index(room(included)) > order.index(room(name)):
                problems.append(f"core/src/{name} includes {included}: {room(included)} lies above {room(name)}")
    return problems


def circles(files: dict[str, list[str]]) -> list[str]:
    """Files that include each other."""
    problems: list[str] = []
    state: dict[str, int] = {}

    def visit(name: str, path: list[str]) -> None:
        state[name] = 1
        for included in files[name]:
            if included not in files:
                continue
            if state.get(included) == 1:
                problems.append("a circle: " + " -> ".join([*path[path.index(included) :], included]))
            elif included not in state:
                visit(included, [*path, included])
        state[name] = 2

    for name in files:
        if name not in state:
            visit(name, [name])
    return problems


def extern_c(files: dict[str, list[str]]) -> list[str]:
    """Public functions are defined in api/ alone; elsewhere, `extern "C"` is for what others have defined."""
    defines = re.compile(r"^(?:extern \"C\" )?(?:const )?\w+ \**(phx_\w+)\([^;{]*\)\s*(?:noexcept )?\{", re.MULTILINE)
    return [
        f"core/src/{name} defines {function}, which belongs into api/"
        for name in files
        if name.endswith(".cpp") and room(name) != "api"
        for function in defines.findall((SOURCES / name).read_text())
    ]


def draw(files: dict[str, list[str]], path: Path) -> None:
    """A row for each room, the top one first, and an arrow for each room that it includes."""
    order = list(reversed(ROOMS))
    height, width, box, left = 46, 900, 560, 20
    top = {name: 16 + index * height for index, name in enumerate(order)}
    pairs = {(room(name), room(other)) for name, names in files.items() for other in names if other in files}
    size = f"0 0 {width} {16 + height * len(order)}"
    tip = '<path d="M0 0L8 4L0 8z" fill="#5b7a99"/>'
    marker = 'id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" font-size="13">',
        f"<defs><marker {marker}>{tip}</marker></defs>",
    ]
    for name, y in top.items():
        text = f'<tspan font-weight="bold">{name}</tspan>: {html.escape(ROOMS[name])}'
        lines.append(f'<rect x="{left}" y="{y}" width="{box}" height="32" rx="4" fill="#eef3f8" stroke="#5b7a99"/>')
        lines.append(f'<text x="{left + 12}" y="{y + 21}" fill="#1b2a38">{text}</text>')
    style = 'fill="none" stroke="#5b7a99" stroke-opacity="0.6" marker-end="url(#tip)"'
    for index, (above, below) in enumerate(sorted((a, b) for a, b in pairs if a != b)):
        x, y1, y2 = left + box, top[above] + 12, top[below] + 20
        bend = x + 24 + (y2 - y1) * 0.55 + index % 3 * 5
        lines.append(f'<path d="M{x} {y1}C{bend:.0f} {y1} {bend:.0f} {y2} {x + 2} {y2}" {style}/>')
    path.write_text("\n".join([*lines, "</svg>", ""]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    files = includes()
    if given.svg:
        draw(files, given.svg)
    problems = upward(files) + circles(files) + extern_c(files)
    summary = f"{len(files)} files in {len(ROOMS)} rooms: every include goes downwards, and there is no circle"
    print("\n".join(problems) or summary)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
