"""The command line of `phalanx bench`."""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from phalanx.core.commands import CommandError, Parser, number_from
from phalanx.tools._arguments import names_of, new_file, positive_number, size_between
from phalanx.tools.bench import _peers, report
from phalanx.tools.bench._native import COLLECTIVES, DTYPES, MAX_RANKS
from phalanx.tools.bench._run import Benchmark, Job
from phalanx.tools.bench._team import TeamError

SIZES = "256,1k,8k,64k,1m,4m,16m,64m"
BUFFERS = ("user", "symmetric", "list")
LARGEST = 1 << 30
STDOUT = Path("-")


def main(argv: list[str]) -> int:
    """Measure, print the table, write files.

    Args:
        argv: Arguments after "bench".

    Returns:
        Exit status: 1 if Phalanx failed, gave a wrong result, or something asked for could not be made.

    Raises:
        CommandError: Nothing can be measured.
        KeyboardInterrupt: The run was interrupted. What was measured until then is printed and written.
    """
    made = parser()
    given = made.parse_args(argv)
    if given.make_peers:
        return _make_peers(given)
    benchmark = Benchmark(_job(made, given))
    try:
        result = benchmark.run()
    except (FileNotFoundError, ImportError, TeamError) as error:
        raise CommandError(str(error)) from None
    status = 1 if benchmark.failures else 0
    if result["rows"] or benchmark.interrupted is None:
        if given.json is not None and given.json != STDOUT:
            given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result, indent=1) if given.json == STDOUT else report.table(result))
        if given.plot is not None and not report.plot(result, given.plot):
            status = 1
    if benchmark.interrupted is not None:
        done = f"{result['rows_measured']} of {result['rows_planned']} rows were measured"
        kept = f"; {given.json} has them" if result["rows"] and given.json not in (None, STDOUT) else ""
        print(f"phalanx bench: {done}{kept}", file=sys.stderr)
        raise benchmark.interrupted
    return status


def _make_peers(given: argparse.Namespace) -> int:
    asked = _peers.AUTO if given.peers is None else given.peers
    wanted = [name for name in asked if _peers.PEERS[name].packages]
    if not wanted:
        print("none of these libraries needs an environment: nothing was installed")
    failed = _peers.make(given.peers_dir, wanted)
    for name, why in failed.items():
        print(f"phalanx bench: {_peers.PEERS[name].title} could not be installed: {why}", file=sys.stderr)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """The parser of `phalanx bench`."""
    made = Parser(
        prog="phalanx bench",
        description="Measure the collectives of Phalanx and those of other libraries, in turns in one run, and print "
        "tables. Ctrl-C ends the run; what was measured until then is kept. The exit status is 1 if Phalanx failed or "
        "gave a wrong result.",
        epilog="Libraries that are not installed are listed below the tables, with the command that installs them.",
    )
    add = made.add_argument
    add("--level", choices=("c", "python"), default="c", help="call C functions (default) or the Python API")
    add(
        "--collectives",
        type=names_of(tuple(COLLECTIVES), "collective"),
        metavar="NAME,...",
        help=f"what is measured (default: all of {', '.join(COLLECTIVES)})",
    )
    add(
        "--sizes",
        type=read_sizes,
        default=read_sizes(SIZES),
        metavar="BYTES,...",
        help=f"sizes in bytes, with k, m or g (default {SIZES})",
    )
    add("--ranks", type=int, default=2, metavar="N", help=f"processes of each library, 2 to {MAX_RANKS} (default 2)")
    add(
        "--dtypes",
        type=names_of(tuple(DTYPES), "dtype"),
        default=("float32",),
        metavar="NAME,...",
        help=f"dtypes: {', '.join(DTYPES)} (default float32)",
    )
    add(
        "--buffers",
        type=names_of(BUFFERS, "kind of buffer"),
        default=BUFFERS[:2],
        metavar="KIND,...",
        help="memory: user (ordinary), symmetric, list (ordinary, in blocks that lie apart); default user,symmetric",
    )
    add(
        "--rounds",
        type=number_from(1),
        default=30,
        metavar="N",
        help="number of rounds (default 30; use at least 30 for published results)",
    )
    add(
        "--round-ms",
        type=positive_number,
        default=4.0,
        metavar="MS",
        help="target duration of the turn of one library in a round, in milliseconds (default 4)",
    )
    add(
        "--peers",
        type=_peer_names,
        metavar="NAME,...",
        help="libraries to compare with: auto (default: all that are installed), none, or names from "
        + ", ".join(_peers.PEERS),
    )
    add(
        "--peers-dir",
        type=Path,
        default=_peers.default_dir(),
        metavar="DIR",
        help="the folder of their environments (default: PHALANX_BENCH_PEERS, else the user's cache directory)",
    )
    add(
        "--against",
        type=Path,
        metavar="PYTHON",
        help="also measure another installation of Phalanx, named by the Python of its environment",
    )
    add(
        "--make-peers",
        action="store_true",
        help="install the libraries of --peers with pip, each into an environment of its own (2.3 GiB for all), and "
        "measure nothing",
    )
    add("--realtime", action="store_true", help="run the ranks under SCHED_FIFO: steadier, but needs root")
    add(
        "--timeout",
        type=positive_number,
        default=120.0,
        metavar="S",
        help="seconds that one step of one library may take (default 120)",
    )
    add("--json", type=_output, metavar="FILE", help="write the result to a file; - prints it instead of the tables")
    add("--plot", type=new_file, metavar="FILE.svg", help="draw the result; needs matplotlib (phalanx-tools[plot])")
    add("--corrupt", default="", help=argparse.SUPPRESS)  # a library whose results are spoilt: for tests
    return made


def _job(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Job:
    """Check what argparse cannot."""
    cores = len(os.sched_getaffinity(0))
    if not 2 <= given.ranks <= MAX_RANKS:
        parser.error(f"--ranks must be 2 to {MAX_RANKS}, got {given.ranks}")
    if given.realtime and given.ranks > cores:
        parser.error(
            f"--realtime needs a core for each rank ({cores} cores for {given.ranks} ranks): "
            "a rank that spins would not let the others run"
        )
    if given.realtime and not _may_be_realtime():
        parser.error("--realtime: this user may not use SCHED_FIFO; run as root, or with CAP_SYS_NICE")
    peers = given.peers if given.peers is not None else _peers.AUTO
    collectives = given.collectives or tuple(COLLECTIVES)
    if given.level == "python":
        if given.collectives not in (None, ("all_reduce",)):
            parser.error("--level python measures all_reduce only")
        collectives = ("all_reduce",)
        if given.peers is None:
            peers = ("gloo",)
        elif unknown := [name for name in peers if not name.startswith("gloo")]:
            parser.error(f"--level python has no peer {', '.join(unknown)} (choose from gloo, gloo-unpinned)")
    if given.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    against = None
    if given.against is not None:
        if given.level == "python":
            parser.error("--against compares C functions: --level c")
        try:
            against = _peers.installation(given.against)
        except (OSError, _peers.AbsentError) as error:
            parser.error(f"--against: {error}")
    return Job(
        level=given.level,
        collectives=collectives,
        sizes=given.sizes,
        ranks=given.ranks,
        dtypes=given.dtypes,
        buffers=given.buffers,
        rounds=given.rounds,
        round_ms=given.round_ms,
        peers=peers,
        peers_dir=given.peers_dir.resolve(),
        against=against,
        realtime=given.realtime,
        timeout=given.timeout,
        corrupt=given.corrupt,
    )


def _may_be_realtime() -> bool:
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, *before)
    return True


def _output(text: str) -> Path:
    return STDOUT if text == "-" else new_file(text)


def _peer_names(text: str) -> tuple[str, ...] | None:
    if text == "auto":
        return None
    return () if text == "none" else names_of(tuple(_peers.PEERS), "peer")(text)


def read_sizes(text: str) -> tuple[int, ...]:
    """ "1k,64k,1m" in bytes."""
    return tuple(dict.fromkeys(map(size_between(1, LARGEST), text.split(","))))
