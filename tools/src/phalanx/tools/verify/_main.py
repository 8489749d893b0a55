"""The command line of `phalanx verify`: every sharding rule by brute force against one process.

`phalanx verify dtensor` runs torch's OpInfo database on DTensors of real ranks instead.
"""

import argparse
from math import prod
from pathlib import Path

from phalanx.tools.verify.sweep import Report, sweep


def main(argv: list[str]) -> int:
    """Run a sweep and print what it found.

    Args:
        argv: Arguments after "verify".

    Returns:
        0 if nothing was wrong, else 1.
    """
    return dtensor(argv[1:]) if argv[:1] == ["dtensor"] else rules(argv)


def rules(arguments: list[str]) -> int:
    """The sweep of the rules, by op."""
    parser = argparse.ArgumentParser(
        prog="phalanx verify",
        description="Check every sharding rule of phalanx.dtensor by brute force against one process.",
        epilog="`phalanx verify dtensor` runs torch's OpInfo database on DTensors of real ranks instead.",
    )
    parser.add_argument("--op", action="append", default=[], help="an op (aten.add.Tensor) or an OpInfo entry (add)")
    parser.add_argument("--json", type=Path, help="keep the results here, and go on where they end")
    parser.add_argument("--samples", type=int, default=4, help="samples of each entry and dtype (4)")
    parser.add_argument("--quiet", action="store_true", help="print only the totals by op")
    options = parser.parse_args(arguments)
    report = Report(options.json)
    ops = [name for name in options.op if name.count(".") == 2 and name.startswith("aten.")]
    names = [name for name in options.op if name not in ops]
    sweep(report, names, ops, options.samples, (lambda line: None) if options.quiet else print)
    totals = report.by_op()
    print(f"{'op':48} {'right':>8} {'of them cut':>12} {'wrong':>6}")
    for op, outcome in sorted(totals.items()):
        print(f"{op:48} {outcome.right:8} {outcome.cut:12} {outcome.wrong:6}")
        for failure in outcome.failures[:2]:
            print(f"    {failure}")
    right, wrong = (sum(getattr(outcome, field) for outcome in totals.values()) for field in ("right", "wrong"))
    left, refused = sum(report.left.values()), sum(map(len, report.refused.values()))
    print(
        f"{len(totals)} ops, {right} strategies right, {wrong} wrong; {left} calls left for want of time, "
        f"{refused} samples refused by torch"
    )
    return 1 if wrong else 0


def dtensor(arguments: list[str]) -> int:
    """The sweep of DTensor on real ranks, by mesh and kind."""
    from phalanx.tools.verify.dtensor_report import COMPILED, DTensorReport, reasons, table
    from phalanx.tools.verify.dtensor_sweep import Options, sweep_dtensor

    parser = argparse.ArgumentParser(prog="phalanx verify dtensor", description=dtensor.__doc__)
    parser.add_argument("--mesh", default="2", help="the mesh: 2, 3, 4, 2x2 (2)")
    parser.add_argument("--ranks", type=int, help="the number of ranks, if the mesh is not given")
    parser.add_argument("--names", default="", help="OpInfo entries, with commas between (all); blocks: of models")
    parser.add_argument("--sample", type=int, default=0, help="only so many entries, spread evenly (all)")
    parser.add_argument("--samples", type=int, default=9, help="samples of each entry (9)")
    parser.add_argument("--placings", type=int, default=10, help="placings of each sample (10)")
    parser.add_argument("--seconds", type=float, default=12.0, help="begin no sample of an entry after so long (12)")
    parser.add_argument("--outcomes", action="store_true", help="let ranks compare after each op what it came to")
    parser.add_argument(
        "--compile", default="", help=f"also compiled, with these, with commas between: {', '.join(COMPILED)}"
    )
    parser.add_argument("--json", type=Path, help="keep the results here")
    parser.add_argument("--resume", action="store_true", help="go on where the file ends; else it is written anew")
    parser.add_argument("--retry", action="store_true", help="with --resume: run again what raised or was wrong")
    parser.add_argument("--quiet", action="store_true", help="print only the table")
    options = parser.parse_args(arguments)
    mesh = tuple(map(int, options.mesh.split("x")))
    if options.ranks is not None:
        size = prod(mesh)
        if size != options.ranks:
            if len(mesh) > 1 or "--mesh" in arguments:
                parser.error(f"a mesh of shape {options.mesh} has {size} ranks, not {options.ranks}")
            mesh = (options.ranks,)
    report = DTensorReport(options.json, options.resume)
    if options.retry:
        report.forget_failures()
    names = [name for name in options.names.split(",") if name]
    show = (lambda line: None) if options.quiet else (lambda line: print(line, flush=True))
    compiled = tuple(backend for backend in options.compile.split(",") if backend)
    if set(compiled) - set(COMPILED):
        parser.error(f"--compile takes {', '.join(COMPILED)}, and not {', '.join(set(compiled) - set(COMPILED))}")
    chosen = Options(mesh, options.samples, options.placings, options.seconds, options.outcomes, compiled)
    sweep_dtensor(report, names, options.sample, chosen, show)
    for records in report.meshes.values():
        for reason, entries in reasons(records).items():
            print(f"not exercised, {reason}: {', '.join(entries)}")
    print("\n".join(table(report)))
    wrong = sum(record.worst == "wrong" for records in report.meshes.values() for record in records.values())
    return 1 if wrong else 0
