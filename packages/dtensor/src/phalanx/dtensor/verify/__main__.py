"""python -m phalanx.dtensor.verify: check every sharding rule by brute force against one process."""

import argparse
import sys
from pathlib import Path

from phalanx.dtensor.verify.sweep import Report, sweep


def main() -> int:
    """Run the sweep and print what it found by op.

    Returns:
        0 if nothing was wrong, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m phalanx.dtensor.verify", description=__doc__)
    parser.add_argument("--op", action="append", default=[], help="an op (aten.add.Tensor) or an OpInfo entry (add)")
    parser.add_argument("--json", type=Path, help="keep the results here, and go on where they end")
    parser.add_argument("--samples", type=int, default=4, help="samples of each entry and dtype (4)")
    parser.add_argument("--quiet", action="store_true", help="print only the totals by op")
    options = parser.parse_args()
    report = Report(options.json)
    ops = [one for one in options.op if one.count(".") == 2 and one.startswith("aten.")]
    names = [one for one in options.op if one not in ops]
    sweep(report, names, ops, options.samples, (lambda line: None) if options.quiet else print)
    totals = report.by_op()
    print(f"{'op':48} {'right':>8} {'of them cut':>12} {'wrong':>6}")
    for op, one in sorted(totals.items()):
        print(f"{op:48} {one.right:8} {one.cut:12} {one.wrong:6}")
        for failure in one.failures[:2]:
            print(f"    {failure}")
    right, wrong = (sum(getattr(one, what) for one in totals.values()) for what in ("right", "wrong"))
    left, refused = sum(report.left.values()), sum(map(len, report.refused.values()))
    print(
        f"{len(totals)} ops, {right} strategies right, {wrong} wrong; {left} calls left for want of time, "
        f"{refused} samples refused by torch"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
