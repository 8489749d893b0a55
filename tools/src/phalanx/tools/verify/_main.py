"""The command line of `phalanx verify`: every sharding rule by brute force against one process.

`phalanx verify dtensor` runs torch's OpInfo database on DTensors of real ranks instead.
"""

import argparse
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TypeVar

from phalanx.core.commands import CommandError, Parser, number_from
from phalanx.tools._arguments import names_of, new_file, positive_number
from phalanx.tools._progress import Progress
from phalanx.tools.verify.dtensor_report import COMPILED, DTensorReport, reasons, table

T = TypeVar("T")


def main(argv: list[str]) -> int:
    """Run a sweep and print what it found.

    Args:
        argv: Arguments after "verify".

    Returns:
        0 if nothing was wrong, else 1.
    """
    made = parser()
    given = made.parse_args(argv)
    return dtensor(given, made) if given.mode == "dtensor" else rules(given)


def parser() -> argparse.ArgumentParser:
    """The parser of `phalanx verify`."""
    made = Parser(
        prog="phalanx verify",
        usage="phalanx verify [OPTION ...]\n       phalanx verify dtensor [OPTION ...]",
        description="Check every sharding rule of phalanx.dtensor by brute force against one process, on simulated "
        "ranks. The exit status is 1 if a result is wrong.",
    )
    made.add_argument(
        "--op",
        action="append",
        default=[],
        metavar="NAME",
        help="check only this op (aten.add.Tensor) or entry of torch's OpInfo database (add); may be repeated",
    )
    made.add_argument(
        "--samples", type=number_from(1), default=4, metavar="N", help="samples of each entry and dtype (default 4)"
    )
    made.add_argument(
        "--json", type=new_file, metavar="FILE", help="keep the results in this file, and continue where it ends"
    )
    made.add_argument("--quiet", action="store_true", help="print only the totals by op")
    _add_dtensor(made.add_subparsers(dest="mode", metavar="dtensor", parser_class=Parser))
    return made


def _add_dtensor(modes: "argparse._SubParsersAction[Parser]") -> None:
    made = modes.add_parser(
        "dtensor",
        prog="phalanx verify dtensor",
        help="run torch's OpInfo database on DTensors of real ranks instead (`phalanx verify dtensor --help`)",
        description="Run torch's OpInfo database on DTensors of real ranks, and compare with one process. The exit "
        "status is 1 if a result is wrong.",
    )
    add = made.add_argument
    add("--mesh", type=_mesh, metavar="SHAPE", help="shape of the mesh, such as 3 or 2x2 (default 2)")
    add("--ranks", type=number_from(1), metavar="N", help="number of ranks, for a mesh of one dim")
    add(
        "--names",
        default="",
        metavar="NAME,...",
        help="entries (default: all); blocks stands for blocks of models",
    )
    add("--sample", type=number_from(0), default=0, metavar="N", help="only N entries, spread evenly (default: all)")
    add("--samples", type=number_from(1), default=9, metavar="N", help="samples of each entry (default 9)")
    add("--placings", type=number_from(1), default=10, metavar="N", help="placements of each sample (default 10)")
    add(
        "--seconds",
        type=positive_number,
        default=12.0,
        metavar="S",
        help="begin no further sample of an entry after this time (default 12)",
    )
    add("--outcomes", action="store_true", help="let the ranks compare the result of each op with each other")
    add(
        "--compile",
        type=names_of(COMPILED, "backend"),
        default=(),
        metavar="NAME,...",
        help=f"also run compiled, with these backends: {', '.join(COMPILED)}",
    )
    add("--json", type=new_file, metavar="FILE", help="keep the results in this file")
    add("--resume", action="store_true", help="continue where the file of --json ends instead of replacing it")
    add("--retry", action="store_true", help="with --resume: run again what raised or was wrong")
    add("--quiet", action="store_true", help="print only the table")


def rules(given: argparse.Namespace) -> int:
    """The sweep of the rules, by op."""
    from phalanx.tools.verify.sweep import Report, sweep

    report = _kept(given.json, lambda: Report(given.json))
    ops = [name for name in given.op if name.count(".") == 2 and name.startswith("aten.")]
    names = [name for name in given.op if name not in ops]
    with Progress("phalanx verify", 1) as progress:
        sweep(report, names, ops, given.samples, _nothing if given.quiet else progress.say, progress.reach)
    totals = report.by_op()
    if given.op and not totals:
        raise CommandError(f"nothing was checked: no rule or entry is called {' or '.join(map(repr, given.op))}", 2)
    print(f"{'op':48} {'right':>8} {'of them cut':>12} {'wrong':>6}")
    for op, outcome in sorted(totals.items()):
        print(f"{op:48} {outcome.right:8} {outcome.cut:12} {outcome.wrong:6}")
        for failure in outcome.failures[:2]:
            print(f"    {failure}")
    right, wrong = (sum(getattr(outcome, field) for outcome in totals.values()) for field in ("right", "wrong"))
    left, refused = sum(report.left.values()), sum(map(len, report.refused.values()))
    print(
        f"{len(totals)} ops, {right} strategies right, {wrong} wrong; {left} calls not checked for lack of time, "
        f"{refused} samples refused by torch"
    )
    return 1 if wrong else 0


def dtensor(given: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    """The sweep of DTensor on real ranks, by mesh and kind."""
    from phalanx.tools.verify.dtensor_sweep import Options, sweep_dtensor

    mesh = given.mesh or (given.ranks or 2,)
    if given.ranks not in (None, prod(mesh)):
        made.error(f"dtensor: --mesh {'x'.join(map(str, mesh))} has {prod(mesh)} ranks, not {given.ranks}")
    report = _kept(given.json, lambda: DTensorReport(given.json, given.resume))
    if given.retry:
        report.forget_failures()
    names = [name for name in given.names.split(",") if name]
    chosen = Options(mesh, given.samples, given.placings, given.seconds, given.outcomes, given.compile)
    with Progress("phalanx verify dtensor", 1) as progress:
        sweep_dtensor(report, names, given.sample, chosen, _nothing if given.quiet else progress.say, progress.reach)
    if names and not any(report.meshes.values()):
        raise CommandError(f"nothing was run: no entry is called {' or '.join(map(repr, names))}", 2)
    for records in report.meshes.values():
        for reason, entries in reasons(records).items():
            print(f"not exercised, {reason}: {', '.join(entries)}")
    print("\n".join(table(report)))
    wrong = sum(record.worst == "wrong" for records in report.meshes.values() for record in records.values())
    return 1 if wrong else 0


def _kept(path: Path | None, read: Callable[[], T]) -> T:
    """What a file of an earlier run holds."""
    try:
        return read()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CommandError(f"{path}: not a file that `phalanx verify --json` wrote", 2) from None


def _nothing(line: str) -> None:
    pass


def _mesh(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected a shape such as 3 or 2x2, got {text!r}")
    return tuple(map(int, sizes))
