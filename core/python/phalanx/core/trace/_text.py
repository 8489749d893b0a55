"""The report of `phalanx trace`."""

from collections.abc import Iterator
from datetime import UTC, datetime

from phalanx.core.trace._analysis import Analysis, Collective
from phalanx.core.trace._read import Dump
from phalanx.core.trace._verdict import verdicts
from phalanx.core.trace._words import duration, ranks


def report(dumps: list[Dump], analyses: list[Analysis], last: int) -> str:
    """Everything, as text.

    Args:
        dumps: What was read.
        analyses: Of the groups to show.
        last: How many collectives of each channel to list.
    """
    lines = [_origin(dump) for dump in dumps]
    for analysis in analyses:
        lines += ["", *_group(analysis, last)]
    lines += ["", *_verdict(analyses)]
    return "\n".join(lines)


def _origin(dump: Dump) -> str:
    when = datetime.fromtimestamp(dump.dumped_unix_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return (
        f"{dump.origin}: rank {dump.rank} of {dump.world_size} (pid {dump.pid}) on {dump.host}, {when} UTC, "
        f"phalanx {dump.phalanx}"
    )


def _group(analysis: Analysis, last: int) -> Iterator[str]:
    group = analysis.group
    yield f"group '{group.name}' ({group.id}) of {len(group.members)} on {group.host}: {group.state}"
    if group.error is not None:
        error = group.error
        where = f" in {error.operation}{f' #{error.sequence}' if error.sequence else ''}" if error.operation else ""
        who = f", seen by rank {error.rank}" if error.rank >= 0 else ""
        fault = f", about rank {error.peer}" if error.peer >= 0 else ""
        yield f"  first error: {error.status}{where}{who}{fault}"
        if error.text:
            yield f"    {error.text}"
    if not any(analysis.channels.values()):
        yield "  no collective is on record"
    for number, collectives in analysis.latest(last).items():
        if collectives:
            known = len(analysis.channels[number])
            shown = f"the last {len(collectives)} of {known}" if len(collectives) < known else f"{known}"
            yield ""
            yield f"  channel {number}: {shown} on record"
            yield from _table("><><<", ("#", "call", "took", "last to start", ""), map(_row, collectives))
    yield ""
    yield from _table(
        ">><>>>>",
        ("rank", "pid", "process", "collectives", "waited", "times last", "others waited"),
        (
            (
                str(each.rank),
                str(member.pid),
                member.process,
                str(each.joined),
                duration(each.waited_ns),
                str(each.times_last),
                duration(each.awaited_ns),
            )
            for each, member in zip(analysis.summaries, group.members, strict=True)
        ),
    )


def _row(each: Collective) -> tuple[str, ...]:
    late = "" if each.last is None else f"rank {each.last}, +{duration(each.late_ns)}"
    took = duration(each.took_ns) + (" so far" if each.under_way else "")
    return str(each.sequence), next(iter(each.descriptions)), took, late, "; ".join(_state(each))


def _state(each: Collective) -> Iterator[str]:
    if each.differs:
        yield "calls differ: " + ", ".join(f"{ranks(who)} {call}" for call, who in each.descriptions.items())
    if each.absent:
        yield f"not started: {ranks(each.absent)}"
    if each.under_way:
        yield f"not completed: {ranks(each.under_way)}"
    for status, callers in each.errors.items():
        yield f"{status}: {ranks(callers)}"


def _table(sides: str, head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as what is in them. `sides` has "<" or ">" for each."""
    every = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    for row in every:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)]
        yield ("    " + "  ".join(cells)).rstrip()


def _verdict(analyses: list[Analysis]) -> list[str]:
    found = verdicts(analyses)
    if found:
        return [f"verdict: {text}" for text in found]
    return ["verdict: nothing is stuck; what was started is completed on all ranks"]
