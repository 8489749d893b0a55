"""The differential sweep: torch.distributed on gloo and on phalanx, both against what one process computes.

    python tests/differential/sweep.py [--ranks 2,3,4] [--only PATTERN] [--sample N]
        [--json FILE] [--verbose]

Every function of torch.distributed that takes tensors or objects, and every method of ProcessGroup with its options,
is called with the same values on both back ends: sync and async, all dtypes and reductions, and tensors of many layouts
(sweep_calls.py). What is in memory afterwards, within the tensors and around them, is compared with what one process
computes. reasons.py says where the two differ, and why. The exit status is 1 if something differs without a reason, or,
of the whole sweep, if a reason explains nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "support"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import sweep_rank as ranks_side  # noqa: E402
import torch.distributed as dist  # noqa: E402
from others import Other, other_cases  # noqa: E402
from reasons import REASONS, Reason  # noqa: E402
from sweep_calls import Case, tensor_cases  # noqa: E402

from phalanx.core import InvalidArgumentError  # noqa: E402
from ranks import RanksFailed, run_ranks  # noqa: E402

# What else an error of ours is.
BASES = {
    error.__name__: {base.__name__ for base in error.__mro__}
    for error in (NotImplementedError, InvalidArgumentError, dist.DistBackendError)
}
PART = 400  # cases for one set of processes


@dataclass
class Report:
    """What came of a sweep.

    Attributes:
        counts: Cases by what came of them: "equal", "beyond gloo", "different" (both with a reason), "wrong".
        reasons: How many cases each row of REASONS explains.
        used: The patterns of the rows that were needed: the row, the field and the pattern.
        wrong: A text for each case that differs without a reason.
        log: A file for what each case came to, as lines of JSON.
    """

    log: str | None = None

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[Reason] = field(default_factory=Counter)
    used: set[tuple[Reason, str, str]] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def add(self, case: Case | Other, size: int, rows: Sequence[Sequence[tuple[str, str]]]) -> None:
        """`rows`: for each rank what gloo did, and what phalanx did."""
        gloo, ours = (_worst([row[side][0] for row in rows]) for side in (0, 1))
        self.counts["cases"] += 1
        if self.log:
            with open(self.log, "a") as file:
                file.write(
                    json.dumps({"ranks": size, "case": repr(case), "gloo": gloo, "ours": ours, "rows": rows}) + "\n"
                )
        same = gloo == ours or gloo in BASES.get(ours, ())
        if same and gloo not in ("wrong", "undefined", "Timeout", "died"):
            self.counts["equal"] += 1
            return
        for reason in REASONS:
            if patterns := reason.fitting(case, gloo, ours):
                self.used |= {(reason, *each) for each in patterns}
                refused = gloo not in ("right", "wrong", "undefined")
                self.counts["beyond gloo" if refused and ours == "right" else "different"] += 1
                self.reasons[reason] += 1
                return
        self.counts["wrong"] += 1
        texts = {
            f"{side} ({row[number][0]}): {row[number][1]}"
            for row in rows
            for number, side in enumerate(("gloo", "ours"))
        }
        self.wrong.append(
            "\n    ".join([f"{size} ranks, {case.name} [{case.kind}]: gloo {gloo}, ours {ours}", *sorted(texts)])
        )

    def stale(self) -> list[str]:
        """What in REASONS explains no case, after the whole sweep."""
        patterns = [(reason, name, text) for reason in REASONS for name, text in reason.patterns()]
        return [
            f"no case needs {name}={text!r} in the reason {reason.why!r} of {reason.kind}; remove it"
            for reason, name, text in patterns
            if (reason, name, text) not in self.used
        ]


def _worst(outcomes: Sequence[str]) -> str:
    """The outcome of the case: the first, in order of gravity, that any rank had."""
    order = ("died", "Timeout", "wrong", "undefined")
    for each in order:
        if each in outcomes:
            return each
    errors = [each for each in outcomes if each != "right"]
    # What the rank with the cause raised, before what the others were told.
    return next((each for each in errors if each != "DistBackendError"), errors[0] if errors else "right")


def cases_of(size: int, pattern: str = "*", sample: int = 1) -> list[Case | Other]:
    """The cases for a number of ranks. `sample`: take only every n-th, and the first case of every function."""
    made = [case for case in (*tensor_cases(size), *other_cases()) if fnmatchcase(f"{case.kind} {case.name}", pattern)]
    taken, functions = [], set()
    for number, case in enumerate(made):
        if number % sample == 0 or (case.kind, case.entry) not in functions:
            taken.append(case)
        functions.add((case.kind, case.entry))
    return taken


def sweep(
    sizes: Sequence[int], pattern: str = "*", sample: int = 1, env: dict[str, str] | None = None, log: str | None = None
) -> Report:
    """Run it."""
    report = Report(log)
    for size in sizes:
        cases = cases_of(size, pattern, sample)
        begin = 0
        while begin < len(cases):
            part = cases[begin : begin + PART]
            with tempfile.TemporaryDirectory(prefix="phx-differential-") as folder:
                died = ""
                try:
                    run_ranks(ranks_side.sweep, size, part, folder, timeout=600, env=env)
                except RanksFailed as error:
                    called = [Path(folder, f"called.{rank}").read_text() for rank in range(size)]
                    died = "\n".join([*called, *(text[-1500:] for text in error.failures.values())])
                found = [Path(folder, f"found.{rank}") for rank in range(size)]
                by_rank = [
                    [json.loads(line) for line in file.read_text().splitlines()] for file in found if file.exists()
                ]
            done = min(map(len, by_rank), default=0)
            for number in range(done):
                report.add(part[number], size, [rows[number] for rows in by_rank])
            if died:  # at a case, or at its end
                report.add(part[min(done, len(part) - 1)], size, [[("died", died)] * 2])
            begin += min(done + bool(died), len(part))
            print(f"{size} ranks: {begin} of {len(cases)} cases", file=sys.stderr, flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--only", default="*", help="cases whose kind and name fit this pattern of a shell")
    parser.add_argument("--sample", type=int, default=1, help="one of so many cases, and every function")
    parser.add_argument("--json", help="write what each case came to, as lines of JSON")
    parser.add_argument("--verbose", action="store_true", help="print the cases that differ without a reason")
    given = parser.parse_args()
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):  # what ranks print
        report = sweep([int(each) for each in given.ranks.split(",")], given.only, given.sample, log=given.json)
    for reason, count in report.reasons.most_common():
        print(f"{count:5} {reason.why}")
    whole = given.only == "*" and given.sample == 1
    stale = report.stale() if whole else []
    for text in stale:
        print(text)
    for text in report.wrong if given.verbose else report.wrong[:20]:
        print(text)
    counts = report.counts
    print(
        f"{counts['cases']} cases: {counts['equal']} equal, {counts['beyond gloo']} accepted beyond gloo, "
        f"{counts['different']} different with a reason, {counts['wrong']} wrong"
    )
    return 1 if report.wrong or stale else 0


if __name__ == "__main__":
    sys.exit(main())
