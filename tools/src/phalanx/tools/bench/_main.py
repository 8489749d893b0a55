"""The command line of `phalanx bench`."""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from phalanx.tools.bench import _peers, report
from phalanx.tools.bench._native import COLLECTIVES, DTYPES, MAX_RANKS
from phalanx.tools.bench._run import Benchmark, Job
from phalanx.tools.bench._team import TeamError

SIZES = "256,1k,8k,64k,1m,4m,16m,64m"
BUFFERS = ("user", "symmetric")
LARGEST = 1 << 30


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write files.

    Args:
        argv: Arguments after "bench"; None takes those of the process.

    Returns:
        Exit status: 1 if Phalanx failed, gave a wrong result, or something asked for could not be made.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    if given.make_peers:
        asked = _peers.AUTO if given.peers is None else given.peers
        wanted = [name for name in asked if _peers.PEERS[name].packages]
        if not wanted:
            print("none of these peers needs an environment: nothing was installed")
        failed = _peers.make(given.peers_dir, wanted)
        for name, why in failed.items():
            print(f"{_peers.PEERS[name].title} could not be installed: {why}", file=sys.stderr)
        return 1 if failed else 0
    job = _job(parser, given)
    try:
        run = Benchmark(job)
        result = run.run()
    except (FileNotFoundError, ImportError, TeamError) as error:
        print(f"phalanx bench: {error}", file=sys.stderr)
        return 1
    print(report.table(result))
    status = 1 if run.failures else 0
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if given.plot is not None and not report.plot(result, given.plot):
        status = 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench",
        description="Measure the collectives of Phalanx beside those of other libraries, in turns in one run.",
        epilog="A peer that is not here has a line that says why. Peers: " + ", ".join(_peers.PEERS),
    )
    add = parser.add_argument
    add("--level", choices=("c", "python"), default="c", help="what is called: C functions, or the Python API")
    add(
        "--collectives",
        type=_names(tuple(COLLECTIVES)),
        metavar="NAME,...",
        help="default: all; " + ", ".join(COLLECTIVES),
    )
    add("--sizes", type=read_sizes, default=read_sizes(SIZES), metavar="BYTES,...", help=f"default {SIZES}")
    add("--ranks", type=int, default=2, metavar="N", help="processes of each library (default 2)")
    add("--dtypes", type=_names(tuple(DTYPES)), default=("float32",), metavar="NAME,...", help="float32, bfloat16")
    add("--buffers", type=_names(BUFFERS), default=BUFFERS, metavar="KIND,...", help="user, symmetric (default both)")
    add("--rounds", type=int, default=30, metavar="N", help="default 30, the least to be quoted")
    add("--round-ms", type=float, default=4.0, metavar="MS", help="of one library in one round (default 4)")
    add("--peers", type=_peer_names, metavar="NAME,...", help="auto (default), none, or names")
    add("--peers-dir", type=Path, default=_peers.default_dir(), metavar="DIR", help="where their environments are")
    add(
        "--against",
        type=Path,
        metavar="PYTHON",
        help="measure another installation of Phalanx as well, by the Python of its environment",
    )
    add("--make-peers", action="store_true", help="make the environments of the peers with pip, and do nothing else")
    add("--realtime", action="store_true", help="ranks run under SCHED_FIFO: steadier on a busy machine, needs root")
    add("--timeout", type=float, default=120.0, metavar="S", help="for one step of one library (default 120)")
    add("--json", type=Path, metavar="FILE", help="write the result")
    add("--plot", type=Path, metavar="FILE.svg", help="draw it; needs phalanx-tools[plot]")
    add("--corrupt", default="", help=argparse.SUPPRESS)  # a participant whose results are spoilt: for tests
    return parser


def _job(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Job:
    """Check what argparse cannot."""
    cores = len(os.sched_getaffinity(0))
    if not 2 <= given.ranks <= MAX_RANKS:
        parser.error(f"--ranks must be 2 to {MAX_RANKS}")
    if given.rounds < 1 or given.round_ms <= 0 or given.timeout <= 0:
        parser.error("--rounds, --round-ms and --timeout must be positive")
    if given.realtime and given.ranks > cores:
        parser.error(
            f"--realtime needs a core for each rank ({cores} for {given.ranks}): "
            "one that spins would not let the others run"
        )
    if given.realtime and not _may_be_realtime():
        parser.error("--realtime: this user may not use SCHED_FIFO; as root, or with CAP_SYS_NICE")
    peers = given.peers if given.peers is not None else _peers.AUTO
    collectives = given.collectives or tuple(COLLECTIVES)
    if given.level == "python":
        if given.collectives not in (None, ("all_reduce",)):
            parser.error("--level python measures all_reduce only")
        collectives = ("all_reduce",)
        if given.peers is None:
            peers = ("gloo",)
        elif strange := [name for name in peers if not name.startswith("gloo")]:
            parser.error(f"--level python has no peer {', '.join(strange)}: gloo, gloo-unpinned")
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
    for path in (given.json, given.plot):
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"{path}: there is no such directory")
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


class _names:  # noqa: N801 - used like a function
    """A type for argparse: names with commas between them."""

    def __init__(self, known: tuple[str, ...]) -> None:
        self.known = known

    def __call__(self, text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        if strange := [name for name in names if name not in self.known]:
            raise argparse.ArgumentTypeError(f"{', '.join(strange)!r} is none of {', '.join(self.known)}")
        return names


def _peer_names(text: str) -> tuple[str, ...] | None:
    if text == "auto":
        return None
    return () if text == "none" else _names(tuple(_peers.PEERS))(text)


def read_sizes(text: str) -> tuple[int, ...]:
    """ "1k,64k,1m" in bytes."""
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    sizes = []
    for each in text.lower().split(","):
        try:
            sizes.append(int(each[:-1]) * units[each[-1]] if each[-1:] in units else int(each))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{each!r} is no size: 4096, 4k, 1m") from None
        if not 1 <= sizes[-1] <= LARGEST:
            raise argparse.ArgumentTypeError(f"{each!r} is not between 1 byte and 1g")
    return tuple(dict.fromkeys(sizes))


if __name__ == "__main__":
    sys.exit(main())
