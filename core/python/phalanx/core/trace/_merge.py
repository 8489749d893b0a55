"""Makes one view of the dumps of several ranks, which overlap: each holds what its groups shared when it was made."""

from dataclasses import replace

from phalanx.core.trace._read import Channel, Dump, DumpError, Group, Member


def merge(dumps: list[Dump]) -> list[Group]:
    """The groups of all dumps, each once.

    Args:
        dumps: Of one run, in any order.

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
