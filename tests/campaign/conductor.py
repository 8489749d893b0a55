"""Runs cases: starts their processes, stops and continues what the case says, and has the outcome judged."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import leaks
import process
import rank
import strangers
from cases import Case
from judge import Outcome, Verdict, judge
from process import Process

DEADLINE_SECONDS = 25
# Where the counters in shared memory begin, modulo 2^32: by turns, so that a third of the cases passes each end.
FIRST_COUNTS = (0, 2**31 - 4, 2**32 - 4)
OUTPUT_BYTES = 6000  # of each rank of a case that failed


def run_all(chosen: Sequence[Case], jobs: int, verbose: bool) -> list[Verdict]:
    """Shares the cases out to workers: forks of this process, which fork ranks."""
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="phx-campaign-") as folder:

        def work(worker: int, pipe: int) -> int:
            for index in range(worker, len(chosen), jobs):
                directory = Path(folder) / str(index)
                directory.mkdir()
                verdict, outputs = run_case(chosen[index], directory)
                line = {**vars(verdict), "event": "verdict", "outputs": outputs if verdict.problems else []}
                os.write(pipe, (json.dumps(line) + "\n").encode())
            return 0

        workers = [
            process.start(each, Path(folder) / f"worker.{each}", lambda pipe, each=each: work(each, pipe))
            for each in range(min(jobs, len(chosen)))
        ]

        def watch() -> None:
            for each in workers:
                for line in each.events:
                    outputs = line.pop("outputs")
                    line.pop("event")
                    verdicts.append(Verdict(**line))
                    tell(verdicts[-1], outputs, verbose)
                each.events.clear()

        process.run(workers, DEADLINE_SECONDS * 2 * (len(chosen) + 1), watch)
        watch()
        for each in workers:
            if each.exit != 0:
                raise RuntimeError(f"a worker ended with exit status {each.exit}: {each.output.read_text()}")
    return verdicts


def tell(verdict: Verdict, outputs: list[str], verbose: bool) -> None:
    if verdict.problems:
        print(f"FAILED {verdict.name}")
        for kind, text in verdict.problems:
            print(f"  {kind}: {text.rstrip()}")
        for output in outputs:
            print("  | " + output.rstrip().replace("\n", "\n  | "))
        sys.stdout.flush()
    elif verbose:
        longest = max(verdict.error_ms, default=0)
        print(f"ok {verdict.name} {longest:.1f} ms", flush=True)


def first_count(case: Case) -> int:
    """The same whenever the case is run."""
    return FIRST_COUNTS[zlib.crc32(case.name.encode()) % len(FIRST_COUNTS)]


def run_case(case: Case, directory: Path) -> tuple[Verdict, list[str]]:
    os.environ["PHALANX_FIRST_COUNT"] = str(first_count(case))  # for the ranks, which are forked from this process
    files = leaks.shared_files()
    ranks = [
        process.start(each, directory / f"output.{each}", lambda pipe, each=each: rank.run(case, each, directory, pipe))
        for each in range(case.ranks)
    ]
    knocking: list[Process] = []

    def watch() -> None:
        conduct(case, ranks, directory)
        if case.phase == "knock" and not knocking and all(each.said("sockets") for each in ranks):
            names = [name for each in ranks for name in each.said("sockets")["names"]]
            knocking.append(
                process.start(-1, directory / "stranger", lambda pipe: strangers.knock(case.kind, names, pipe, 1))
            )
            until = time.monotonic() + DEADLINE_SECONDS / 2  # without a stranger the case says nothing: a hang
            while knocking[0].said("knocking") is None and time.monotonic() < until:
                time.sleep(0.001)
                knocking[0].read()
            if knocking[0].said("knocking") is None:
                return
            (directory / "knocking").touch()

    try:
        process.run(ranks, DEADLINE_SECONDS, watch)
    finally:
        for each in knocking:
            each.signal(signal.SIGKILL)
            each.reap()
    names = [name for each in ranks if (said := each.said("sockets")) for name in said["names"]]
    left = leaks.settled(lambda: leaks.left_by_case(names, files))
    fault = directory / "fault"
    fault_ns = int(fault.read_text().split()[0]) if fault.exists() else 0
    verdict = judge(Outcome(case, ranks, fault_ns, sorted(left)))
    outputs = [each.output.read_text(errors="replace") for each in ranks if each.output.exists()]
    return verdict, [text[-OUTPUT_BYTES:] for text in outputs if text.strip()]


def conduct(case: Case, ranks: list[Process], directory: Path) -> None:
    """Ends or continues a rank that was stopped, and lets those go that wait for what it says then."""
    victim = ranks[case.victim]
    survivors = [ranks[each] for each in case.survivors]
    if case.kind == "stop" and case.ending == "killed" and all(each.said("error") for each in survivors):
        victim.signal(signal.SIGKILL)
    recovered = "sum" if case.phase == "create" or case.with_torch else "shrunk"
    over = [each.exit is not None or bool(each.said(recovered) or each.said("wrong")) for each in survivors]
    if case.shut_out and all(over):
        victim.signal(signal.SIGCONT)
    done = victim.exit is not None or any(victim.said(each) for each in ("shut out", "shrunk", "done"))
    if (case.shut_out or case.may_be_left_out) and done:
        (directory / "released").touch()
