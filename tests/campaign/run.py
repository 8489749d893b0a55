"""The fault campaign: ranks are made to fail at every step of everything, and nothing hangs, lies, or is left behind.

    python tests/campaign/run.py --library PATH/libphalanx.so.0 [--ranks 2,4,8] [--quick] [--only PATTERN] [--json OUT]
                                 [--gloo] [--jobs N] [--list]

The library must be built with -DPHX_FAILPOINTS=ON. Each case runs in processes of its own, which are forked from this
one after it has imported torch: they are as large as those of a training, and start in no time. What is done to them is
in cases.py, what they do in rank.py, what is right in judge.py. --gloo runs deaths and stops on torch.distributed's
gloo too, as rows beside ours. The exit status is 1 if a case hung, was wrong, leaked or crashed; each such case is
printed with what happened, and `--only NAME` runs it alone. docs/explanation/faults.md says how to read the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path


def main() -> int:
    options = parse()
    os.environ["PHALANX_LIBRARY"] = str(Path(options.library).resolve())
    os.environ["PHALANX_TUNING"] = os.devnull + "/none"
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"  # a process with threads cannot fork ranks
    # Only now: these are read when libraries are loaded.
    import cases
    import conductor
    import gloo
    import table
    import torch
    import with_torch

    from phalanx.core import lib

    if not lib.phx_has(b"failpoints"):
        sys.exit(f"{options.library} has no failpoints: build it with -DPHX_FAILPOINTS=ON")
    sizes = [int(each) for each in options.ranks.split(",")]
    chosen = cases.quick(sizes) if options.quick else cases.full(sizes)
    if options.only:
        chosen = cases.matching(cases.full(sizes), options.only)
    skipped = [each for each in chosen if each.kind == "stranger" and os.geteuid() != 0]
    chosen = [each for each in chosen if each not in skipped]
    if options.list:
        print(*(each.name for each in chosen), sep="\n")
        return 0
    if any(each.with_torch for each in chosen):
        with_torch.build()
    gc.freeze()  # so that ranks need not look through torch's objects for what is garbage
    began = time.monotonic()
    # First those that measure, one after another; then those that mostly wait.
    verdicts = conductor.run_all([each for each in chosen if not each.waits], 1, options.verbose)
    verdicts += conductor.run_all([each for each in chosen if each.waits], options.jobs, options.verbose)
    peers = gloo.run_all(sizes, options.quick) if options.gloo else []
    seconds = time.monotonic() - began
    print(table.render(verdicts, peers))
    if skipped:
        print(f"skipped: {len(skipped)} cases with another user, because this is not root")
    print(table.totals(verdicts, seconds))
    if options.json:
        summary = table.as_json(verdicts, peers, sizes, seconds, torch.__version__)
        Path(options.json).write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if any(each.problems for each in verdicts) or not verdicts else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", required=True, help="libphalanx.so.0, built with -DPHX_FAILPOINTS=ON")
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a sample of every kind with 2 and 4 ranks")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose name contains it")
    parser.add_argument("--json", metavar="OUT", help="write the summary to this file")
    parser.add_argument("--gloo", action="store_true", help="the same deaths and stops on gloo")
    parser.add_argument("--jobs", type=int, default=4, help="waiting cases at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and run none")
    parser.add_argument("--verbose", action="store_true", help="print each case when it is over")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
