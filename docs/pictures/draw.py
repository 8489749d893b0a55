#!/usr/bin/env python3
"""Draws the pictures of the documentation.

docs/pictures/draw.py          writes them into docs/pictures, and the logo into docs/_static
docs/pictures/draw.py --check  writes nothing, and names those that are not as they would be drawn; exit status 1 if any
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

import concepts  # noqa: E402
import goals  # noqa: E402
import logo  # noqa: E402
import plots  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    drawn = {
        HERE / f"{name}.svg": picture.finished()
        for module in (concepts, plots, goals)
        for name, picture in module.pictures()
    }
    drawn[HERE.parent / "_static" / "logo.svg"] = logo.logo()
    stale = []
    for path, text in drawn.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not check:
                path.write_text(text, encoding="utf-8")
    unknown = sorted(path.name for path in HERE.glob("*.svg") if path not in drawn)
    if check and stale:
        print(f"out of date: {' '.join(stale)}: run python docs/pictures/draw.py")
    elif not check:
        print(f"{len(drawn)} pictures, {len(stale)} of them new")
    if unknown:
        print(f"drawn by nothing: {' '.join(unknown)}")
    return 1 if unknown or (check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
