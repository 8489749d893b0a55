"""Runs torch's own tests of process groups (see adapter.py), and compares what fails with expected.toml.

    python tests/upstream/run.py [--backend gloo] [--ranks N] [--every N] [TEST…]

Exit status 1 if a test fails that expected.toml does not name, or passes although it is named there.
"""

import argparse
import collections
import contextlib
import os
import select
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from adapter import run_one, tests

AT_ONCE = 2
SECONDS = 150  # for one test; torch's own limit is 300, or 500


def main() -> int:
    """Run the tests and print a line for each that did not pass, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="names; without them all")
    parser.add_argument("--backend", default="phalanx", choices=["phalanx", "gloo"], help="gloo: torch's own")
    parser.add_argument("--ranks", type=int, default=3, help="how many ranks each test has")
    parser.add_argument("--every", type=int, default=1, help="only every N-th test")
    parser.add_argument("--logs", type=Path, help="a folder for the output of what failed")
    arguments = parser.parse_args()
    case = tests(arguments.ranks, arguments.backend)
    names = arguments.tests or sorted(name for name in dir(case) if name.startswith("test_"))[:: arguments.every]
    known: dict[str, str] = {}
    if arguments.backend == "phalanx":
        known = tomllib.loads((Path(__file__).parent / "expected.toml").read_text())["fails"]
    counts: collections.Counter[str] = collections.Counter()
    for name, outcome, output in outcomes(case, names):
        counts[outcome] += 1
        if outcome == "failed":
            outcome = f"failed, as expected: {known[name]}" if name in known else "failed"
            counts["not expected"] += name not in known
            if arguments.logs:
                (arguments.logs / name).write_text(output)
            elif name not in known:
                outcome += "\n" + output[-4000:]
        elif outcome == "passed" and name in known:
            counts["not expected"] += 1
            outcome = "passed, though expected.toml names it: delete the entry"
        if outcome not in ("passed", "skipped"):
            print(f"{name}: {outcome}", flush=True)
    print(f"{len(names)} tests: " + ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped")))
    return int(counts["not expected"] > 0)


def outcomes(case: type, names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Each test's name, what became of it ("passed", "failed" or "skipped") and its output, as they end."""
    waiting, running = collections.deque(names), {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.popleft()
            output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            sys.stdout.flush()
            pid = os.fork()  # from a process that has imported torch and its tests
            if pid == 0:
                os.setpgid(0, 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os._exit(run_one(case, name))
            running[os.pidfd_open(pid)] = (name, pid, time.monotonic() + SECONDS, output)
        soonest = min(end for _, _, end, _ in running.values())
        ended, _, _ = select.select(list(running), [], [], max(0.0, soonest - time.monotonic()))
        late = [fd for fd, (_, _, end, _) in running.items() if fd not in ended and end <= time.monotonic()]
        for fd in [*ended, *late]:
            name, pid, _, output = running.pop(fd)
            if fd in late:
                os.killpg(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(fd)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # ranks that were left
            output.seek(0)
            text = output.read() + (f"\nnot done after {SECONDS} s" if fd in late else "")
            output.close()
            yield name, {0: "passed", 77: "skipped"}.get(status, "failed"), text


if __name__ == "__main__":
    sys.exit(main())
