"""`phalanx trace`: what the flight recorders of a world say about its collectives, and who waits for whom.

`_read` reads and checks the dumps, `_analysis` merges them and pairs what the ranks of a group did. `_text`, `_chrome`
and `_picture` show it: as a report, as trace events, as a timeline.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from phalanx.tools.trace import _chrome, _picture
from phalanx.tools.trace._analysis import analyse, merge
from phalanx.tools.trace._read import DumpError, printable, read_file
from phalanx.tools.trace._text import report

LAST = 20


def main(argv: list[str]) -> int:
    """Read dumps, print the report, write files.

    Args:
        argv: Arguments after "trace".

    Returns:
        Exit status: 1 if a file cannot be read or written, 2 if one is no sound dump or an argument is wrong.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    if given.last < 1:
        parser.error("--last must be positive")
    if given.picture is not None:
        if given.picture.suffix not in (".svg", ".png"):
            parser.error(f"--picture {given.picture}: the name must end in .svg or .png")
        if given.picture.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
            parser.error("--picture FILE.png needs matplotlib: pip install matplotlib; FILE.svg needs nothing")
    try:
        dumps = [read_file(path) for path in given.files]
        groups = merge(dumps)
        if given.group is not None:
            known = sorted({group.name for group in groups})
            groups = [group for group in groups if group.name == printable(given.group)]
            if not groups:
                raise DumpError(
                    f"no group is called '{printable(given.group)}'; there are: {', '.join(known) or 'none'}"
                )
        analyses = [analyse(group) for group in groups]
        text = report(dumps, analyses, given.last)
        # What the terminal cannot show is shown as an escape.
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding))
        if given.chrome is not None:
            given.chrome.write_text(_chrome.text(analyses), encoding="utf-8")
        if given.picture is not None:
            _picture.write(_picture.draw(analyses, given.last), given.picture)
    except DumpError as error:
        print(f"phalanx trace: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"phalanx trace: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx trace",
        description="Show what flight recorders saw: who waits for whom, who comes late, and whose calls differ.",
    )
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE.json", help="dumps; of one run, if several")
    add("--chrome", type=Path, metavar="FILE.json", help="write trace events, for ui.perfetto.dev or chrome://tracing")
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw a timeline: .svg, or .png (which needs phalanx-tools[plot])",
    )
    add("--last", type=int, default=LAST, metavar="N", help=f"collectives of each channel to list and draw ({LAST})")
    add("--group", metavar="NAME", help="only groups of this name")
    return parser
