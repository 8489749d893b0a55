"""Merges the dumps of several ranks, and pairs what they recorded of one collective: who waited, for whom, how long."""

from dataclasses import dataclass, replace

from phalanx.tools.trace._read import Channel, Dump, DumpError, Entry, Group, Member

# ---- the dumps of several ranks, which overlap: each holds what its groups shared when it was made


def merge(dumps: list[Dump]) -> list[Group]:
    """The groups of all dumps, each once.

    Args:
        dumps: The dumps of one run, in any order.

    Returns:
        In the order of the first dump that has them. Later looks at a group add to earlier ones.

    Raises:
        DumpError: Two of them cannot be of one run.
    """
    found: dict[tuple[str, str], Group] = {}
    origins: dict[tuple[str, str], str] = {}
    shifts: dict[str, int] = {}  # one for each host, or its ranks would seem to drift as its clock is adjusted
    for dump in sorted(dumps, key=lambda dump: (dump.dumped_unix_ns, dump.host, dump.rank)):
        for group in dump.groups:
            key = (group.host, group.id)
            group = replace(group, shift_ns=shifts.setdefault(group.host, group.shift_ns))
            if key not in found:
                found[key], origins[key] = group, dump.origin
            elif _ranks(found[key]) == _ranks(group) and found[key].name == group.name:
                found[key] = _later(found[key], group)
            else:
                raise DumpError(
                    f"{origins[key]} and {dump.origin} disagree about the ranks of group '{group.name}' ({group.id}); "
                    "give dumps of one run"
                )
    return list(found.values())


def _ranks(group: Group) -> list[int]:
    return [member.rank for member in group.members]


def _later(old: Group, new: Group) -> Group:
    """A group after a second look."""
    if old.seen_ns > new.seen_ns:
        old, new = new, old
    return replace(
        new,
        state="failed" if "failed" in (old.state, new.state) else "active",
        error=old.error or new.error,
        members=tuple(_later_member(*pair) for pair in zip(old.members, new.members, strict=True)),
    )


def _later_member(old: Member, new: Member) -> Member:
    channels = dict(old.channels)
    for number, channel in new.channels.items():
        channels[number] = _later_channel(channels[number], channel) if number in channels else channel
    return replace(new, channels=channels)


def _later_channel(old: Channel, new: Channel) -> Channel:
    # What was pending in the old look and is not in the new one has been forgotten since: how it ended is not known.
    over = {sequence: entry for sequence, entry in old.entries.items() if entry.end_ns is not None}
    # What one look saw ended has ended: a rank that was stopped in the middle of its look may call an older one newer.
    entries = dict(sorted((new.entries | over).items()))
    return Channel(max(old.started, new.started), max(old.completed, new.completed), entries)


# ---- the pairs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One collective on all ranks that are known to have called it.

    A rank waits from its own start until the last rank has started. What it does meanwhile is not known: a collective
    that was started and not yet waited for counts like one that blocks.

    Attributes:
        channel: The number of a channel of the group.
        sequence: In the channel.
        calls: What is recorded, by rank, in the order of the group.
        absent: Ranks that have not started it.
        under_way: Ranks that have started and not completed it.
        last: The rank that started last; None where that is not known, or all started at the same moment.
        waits_ns: By rank, how long it waited for others; empty where a start that matters is not known.
        seen_ns: When it was last looked at.
    """

    channel: int
    sequence: int
    calls: dict[int, Entry]
    absent: tuple[int, ...]
    under_way: tuple[int, ...]
    last: int | None
    waits_ns: dict[int, int]
    seen_ns: int

    @property
    def name(self) -> str:
        """Such as "all_reduce #17"; after the first rank where ranks differ."""
        return f"{next(iter(self.calls.values())).call} #{self.sequence}"

    @property
    def start_ns(self) -> int:
        return min(entry.start_ns for entry in self.calls.values())

    @property
    def late_ns(self) -> int:
        """How long after the first rank the last one started."""
        return max(entry.start_ns for entry in self.calls.values()) - self.start_ns

    @property
    def took_ns(self) -> int:
        """From the first start to the last end, or to the last look where it is under way."""
        return max(self.end_ns(rank) for rank in self.calls) - self.start_ns

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ranks that others wait or waited for."""
        return self.absent or (() if self.last is None else (self.last,))

    @property
    def descriptions(self) -> dict[str, tuple[int, ...]]:
        """Ranks by what they called. More than one key is a mismatch, unless it went well for all."""
        found: dict[str, tuple[int, ...]] = {}
        for rank, entry in self.calls.items():
            found[entry.described] = (*found.get(entry.described, ()), rank)
        return found

    @property
    def differs(self) -> bool:
        """Whether ranks called different things."""
        return len(self.descriptions) > 1 and any(entry.status != "ok" for entry in self.calls.values())

    @property
    def errors(self) -> dict[str, tuple[int, ...]]:
        """Ranks by the error that it ended with for them."""
        found: dict[str, tuple[int, ...]] = {}
        for rank, entry in self.calls.items():
            if entry.status not in ("ok", "pending"):
                found[entry.status] = (*found.get(entry.status, ()), rank)
        return found

    def end_ns(self, rank: int) -> int:
        """When it was over for a rank that has a record, or was last seen to be under way."""
        end = self.calls[rank].end_ns
        return self.seen_ns if end is None else end


@dataclass(frozen=True)
class Summary:
    """What the recorded collectives of a group say about one rank.

    Attributes:
        rank: The rank in question.
        joined: Collectives that it started.
        waited_ns: How long it waited for others.
        times_last: How often it was the last to start, or has not started what others wait in.
        awaited_ns: How long others, all together, waited for it.
    """

    rank: int
    joined: int
    waited_ns: int
    times_last: int
    awaited_ns: int


@dataclass(frozen=True)
class Analysis:
    """A group, its collectives by channel in the order of their numbers, and a summary of each rank."""

    group: Group
    channels: dict[int, list[Collective]]
    summaries: tuple[Summary, ...]

    def latest(self, count: int) -> dict[int, list[Collective]]:
        """The last `count` collectives of each channel."""
        return {number: collectives[-count:] for number, collectives in self.channels.items()}


def analyse(group: Group) -> Analysis:
    """Pair the records of a group."""
    channels = {number: _pair(group, number) for number in group.channels}
    every = [collective for collectives in channels.values() for collective in collectives]
    return Analysis(group, channels, tuple(_summary(member.rank, every) for member in group.members))


def lanes(collectives: list[Collective], rank: int) -> list[list[Collective]]:
    """Distribute what one rank recorded on one channel over lanes in which nothing overlaps in time.

    Args:
        collectives: The collectives of the channel; the ones that the rank has no record of are left out.
        rank: The rank in question.

    Returns:
        The lanes, each in the order of time; more than one where the rank had several collectives in flight.
    """
    found: list[list[Collective]] = []
    joined = [each for each in collectives if rank in each.calls]
    for each in sorted(joined, key=lambda each: (each.calls[rank].start_ns, each.end_ns(rank))):
        for lane in found:
            if lane[-1].end_ns(rank) <= each.calls[rank].start_ns:
                lane.append(each)
                break
        else:
            found.append([each])
    return found


def _pair(group: Group, number: int) -> list[Collective]:
    channels = {member.rank: member.channels.get(number) for member in group.members}
    sequences = {sequence for channel in channels.values() if channel is not None for sequence in channel.entries}
    found = []
    for sequence in sorted(sequences):
        calls: dict[int, Entry] = {}
        absent, under_way, unknown = [], [], []
        for rank, channel in channels.items():
            if channel is None or channel.started < sequence:
                absent.append(rank)
                continue
            entry = channel.entries.get(sequence)
            if entry is None:
                unknown.append(rank)
            else:
                calls[rank] = entry
            if channel.completed < sequence if entry is None else entry.end_ns is None:
                under_way.append(rank)
        last = None if absent or unknown else _last(calls)
        waits = {} if unknown and not absent else _waits(calls, absent, group.seen_ns)
        found.append(Collective(number, sequence, calls, tuple(absent), tuple(under_way), last, waits, group.seen_ns))
    return found


def _last(calls: dict[int, Entry]) -> int | None:
    starts = {rank: entry.start_ns for rank, entry in calls.items()}
    latest = max(starts, key=lambda rank: starts[rank])
    return latest if starts[latest] > min(starts.values()) else None


def _waits(calls: dict[int, Entry], absent: list[int], seen_ns: int) -> dict[int, int]:
    # As long as a rank is absent, the others wait until they give up.
    until = seen_ns if absent else max(entry.start_ns for entry in calls.values())
    waits = {}
    for rank, entry in calls.items():
        end = seen_ns if entry.end_ns is None else entry.end_ns
        waits[rank] = max(0, min(until, end) - entry.start_ns)
    return waits


def _summary(rank: int, collectives: list[Collective]) -> Summary:
    blamed = [each for each in collectives if rank in each.awaited]
    return Summary(
        rank=rank,
        joined=sum(rank in each.calls for each in collectives),
        waited_ns=sum(each.waits_ns.get(rank, 0) for each in collectives),
        times_last=len(blamed),
        awaited_ns=sum(sum(each.waits_ns.values()) for each in blamed),
    )
