"""The report of `phalanx trace`: tables of collectives, and in sentences what is stuck, and why."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from phalanx.tools.trace._analysis import Analysis, Collective
from phalanx.tools.trace._read import Dump, Group

# ---- times and ranks in words, for everything that is read by people ----------------------------

_UNITS = (("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000))
_LONG = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def duration(nanoseconds: int) -> str:
    """Three digits of a time: "850 ns", "12.3 us", "4.2 s"; from two minutes on "3 min 20 s"."""
    if nanoseconds < 1_000:
        return f"{nanoseconds} ns"
    for unit, size in _UNITS:
        if nanoseconds < 999.5 * size and nanoseconds < 120_000_000_000:
            return f"{nanoseconds / size:.3g} {unit}"
    seconds = (nanoseconds + 500_000_000) // 1_000_000_000
    parts: list[str] = []
    for unit, size in _LONG:
        if seconds >= size and len(parts) < 2:
            parts.append(f"{seconds // size} {unit}")
            seconds %= size
        elif parts:
            break
    return " ".join(parts)


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in ascending order: "rank 2", "ranks 0, 1, 3", "ranks 0-7, 9"."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(parts)


def have(numbers: Iterable[int]) -> str:
    """ "has" for one rank, "have" for more."""
    return "has" if len(list(numbers)) == 1 else "have"


# ---- what is stuck ---------------------------------------------------------------------------------

_Process = tuple[str, int, int]  # host, rank, pid


@dataclass(frozen=True)
class _Stay:
    """A rank is in a collective, for which ranks are absent."""

    who: _Process
    group: Group
    collective: Collective

    @property
    def place(self) -> str:
        return f"{self.collective.name} of group '{self.group.name}'"


def verdicts(analyses: list[Analysis]) -> list[str]:
    """Sentences about all groups; empty where every collective that was started was completed.

    Only the first trouble of each channel is named: the others follow from it.
    """
    stays: dict[_Process, list[_Stay]] = {}
    for analysis in analyses:
        for collectives in analysis.channels.values():
            for collective in collectives:
                for rank in collective.under_way:
                    who = _process(analysis.group, rank)
                    stays.setdefault(who, []).append(_Stay(who, analysis.group, collective))
    found = []
    for analysis in analyses:
        troubles = [text for each in analysis.channels.values() for text in _first_trouble(analysis.group, each, stays)]
        if not troubles and analysis.group.state == "failed":
            troubles = ["has failed, though every collective on record was completed"]
        found += [f"group '{analysis.group.name}': {text}" for text in troubles]
    return found + list(_circle(stays))


def _first_trouble(group: Group, collectives: list[Collective], stays: dict[_Process, list[_Stay]]) -> Iterator[str]:
    for each in collectives:
        if each.differs:
            yield _mismatch(group, each)
        elif each.absent:
            yield _absence(group, each, stays)
        elif each.under_way:
            yield _unfinished(group, each)
        elif each.errors:
            yield f"{_name(group, each)} ended with {_errors(each)}"
        else:
            continue
        return


def _mismatch(group: Group, each: Collective) -> str:
    most = max(len(callers) for callers in each.descriptions.values())
    sides = []
    for called, callers in sorted(each.descriptions.items(), key=lambda item: (-len(item[1]), item[1])):
        odd = len(callers) == 1 and most > 1
        sides.append(f"{group.by_rank[callers[0]] if odd else ranks(callers)} called {called}")
    channel = f" on channel {each.channel}" if each.channel else ""
    return f"the ranks called different things as #{each.sequence}{channel}: {', while '.join(sides)}"


def _absence(group: Group, each: Collective, stays: dict[_Process, list[_Stay]]) -> str:
    text = f"{_members(group, each.absent)} {have(each.absent)} not started {_name(group, each)}"
    waiting = [rank for rank in each.under_way if rank in each.calls]
    if waiting:
        longest = max(each.waits_ns[rank] for rank in waiting)
        text += f", for which {ranks(waiting)} {have(waiting)} waited {duration(longest)}"
    if each.errors:
        text += f"{' and' if waiting else ','} which ended with {_errors(each)}"
        if not waiting:
            text += f" after {duration(each.took_ns)}"
    elsewhere: dict[str, list[int]] = {}
    for rank in each.absent:
        for stay in stays.get(_process(group, rank), [])[:1]:
            elsewhere.setdefault(stay.place, []).append(rank)
    for place, there in elsewhere.items():
        text += f"; {ranks(there)} {'is' if len(there) == 1 else 'are'} in {place}"
    return text


def _unfinished(group: Group, each: Collective) -> str:
    text = f"{_members(group, each.under_way)} {have(each.under_way)} started and not completed {_name(group, each)}"
    done = [rank for rank in each.calls if rank not in each.under_way]
    if done:
        text += f", unlike {ranks(done)}"
    if each.last is not None:
        since = each.seen_ns - each.start_ns - each.late_ns
        text += f"; the last to start was rank {each.last}, {duration(since)} ago"
    return text + "; a rank moves on only inside calls of Phalanx"


def _circle(stays: dict[_Process, list[_Stay]]) -> Iterator[str]:
    """Ranks of which each waits for the next, if there are any."""
    left: set[_Process] = set()  # from here no circle is reached
    for start in stays:
        path: list[_Stay] = []
        who = start
        while who not in left:
            known = [stay.who for stay in path]
            if who in known:
                path = path[known.index(who) :]
                parts = [f"rank {stay.who[1]} in {stay.place}" for stay in path]
                yield f"ranks wait in a circle, each for the next: {', '.join(parts)}, and again rank {path[0].who[1]}"
                return
            step = next(
                (
                    (stay, _process(stay.group, rank))
                    for stay in stays.get(who, [])
                    for rank in stay.collective.absent
                    if _process(stay.group, rank) in stays and _process(stay.group, rank) not in left
                ),
                None,
            )
            if step is None:
                left.add(who)
                who = path.pop().who if path else who
                continue
            path.append(step[0])
            who = step[1]


# ---- names ----------------------------------------------------------------------------------------------------------


def _process(group: Group, rank: int) -> _Process:
    return group.host, rank, group.by_rank[rank].pid


def _members(group: Group, numbers: tuple[int, ...]) -> str:
    """Each with its process as long as they are few."""
    return ", ".join(str(group.by_rank[rank]) for rank in numbers) if len(numbers) <= 4 else ranks(numbers)


def _name(group: Group, each: Collective) -> str:
    return f"{each.name} on channel {each.channel}" if each.channel else each.name


def _errors(each: Collective) -> str:
    return " and ".join(f"{status} on {ranks(callers)}" for status, callers in each.errors.items())


# ---- the report ------------------------------------------------------------------------------------


def report(dumps: list[Dump], analyses: list[Analysis], last: int) -> str:
    """Everything, as text.

    Args:
        dumps: What was read.
        analyses: The analyses of the groups to show.
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
