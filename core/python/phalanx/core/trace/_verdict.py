"""What is stuck, and why, in sentences."""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.core.trace._analysis import Analysis, Collective
from phalanx.core.trace._read import Group
from phalanx.core.trace._words import duration, have, ranks

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
