"""`phalanx trace`: what the flight recorders of a world say about its collectives, and which ranks wait for which.

`_read` reads and checks the dumps, `_analysis` merges them and pairs what the ranks of a group did. `_text`, `_json`,
`_chrome` and `_picture` show it: as a report, for programs, as trace events, as a timeline.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from phalanx.core.commands import CommandError, Parser, number_from, paint
from phalanx.tools._arguments import new_file
from phalanx.tools.trace import _chrome, _json, _picture
from phalanx.tools.trace._analysis import analyse, merge
from phalanx.tools.trace._read import DumpError, printable, read_file
from phalanx.tools.trace._text import report, verdicts

LAST = 20


def main(argv: list[str]) -> int:
    """Read dumps, print the report, write files.

    Args:
        argv: Arguments after "trace".

    Returns:
        Exit status: with --exit-code 1 if a group failed or a collective is stuck, else 0.

    Raises:
        CommandError: A file is not a sound dump.
        OSError: A file cannot be read or written.
    """
    made = parser()
    given = made.parse_args(argv)
    if given.picture is not None:
        if given.picture.suffix not in (".svg", ".png"):
            made.error(f"--picture {given.picture}: the name must end in .svg or .png")
        if given.picture.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
            made.error("--picture FILE.png needs matplotlib: pip install matplotlib; FILE.svg needs nothing")
    dumps = [read_file(path) for path in files_of(given.files)]
    groups = merge(dumps)
    if given.group is not None:
        known = sorted({group.name for group in groups})
        groups = [group for group in groups if group.name == printable(given.group)]
        if not groups:
            raise DumpError(f"no group is called '{printable(given.group)}'; there are: {', '.join(known) or 'none'}")
    analyses = [analyse(group) for group in groups]
    troubles = verdicts(analyses)
    if given.json:
        print(_json.text(dumps, analyses, troubles))
    else:
        # What the terminal cannot show is shown as an escape.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        for line in (
            report(dumps, analyses, given.last).encode(encoding, "backslashreplace").decode(encoding).split("\n")
        ):
            print(paint(line, "red" if troubles else "green") if line.startswith("verdict: ") else line)
    if given.chrome is not None:
        given.chrome.write_text(_chrome.text(analyses), encoding="utf-8")
    if given.picture is not None:
        _picture.write(_picture.draw(analyses, given.last), given.picture)
    return 1 if given.exit_code and troubles else 0


def files_of(paths: list[Path]) -> list[Path]:
    """The paths, with the dumps that are in a folder instead of the folder.

    Raises:
        CommandError: A folder has none.
    """
    found = []
    for path in paths:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise CommandError(f"{path}: the folder has no file *.json", 2)
        found += inside
    return found


def parser() -> argparse.ArgumentParser:
    """The parser of `phalanx trace`."""
    made = Parser(
        prog="phalanx trace",
        description="Find hangs and stragglers in dumps of the flight recorder: which ranks wait for which, which come "
        "late, and whose calls differ. The exit status is 2 if a file cannot be read or is not a dump.",
    )
    add = made.add_argument
    add("files", type=Path, nargs="+", metavar="FILE", help="dumps of one run, or folders of dumps")
    add("--exit-code", action="store_true", help="exit with status 1 if a group failed or a collective is stuck")
    add("--json", action="store_true", help="print one JSON object instead of the report")
    add(
        "--chrome",
        type=new_file,
        metavar="FILE.json",
        help="write trace events for ui.perfetto.dev or chrome://tracing",
    )
    add(
        "--picture",
        type=new_file,
        metavar="FILE",
        help="draw a timeline: .svg, or .png (which needs phalanx-tools[plot])",
    )
    add(
        "--last",
        type=number_from(1),
        default=LAST,
        metavar="N",
        help=f"number of collectives of each channel to list and draw (default {LAST})",
    )
    add("--group", metavar="NAME", help="show only groups of this name")
    return made
