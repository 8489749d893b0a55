"""Reads dumps of the flight recorder. A dump is not trusted: the result is sound data, or a DumpError."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from phalanx.core.commands import CommandError

FORMAT, VERSION = "phalanx-flight-recorder", 1
LARGEST_BYTES = 1 << 30  # of a file: 1024 ranks with 256 collectives each on 4 channels have a quarter of it

_I32, _I64, _U64 = (1 << 31) - 1, (1 << 63) - 1, (1 << 64) - 1


class DumpError(CommandError):
    """A file is not a dump, or not a sound one."""

    def __init__(self, text: str) -> None:
        super().__init__(text, 2)


@dataclass(frozen=True)
class Entry:
    """What one rank recorded of one collective. Times are of the host's monotonic clock.

    Attributes:
        sequence: Number in its group and channel, from 1.
        call: Name, such as "all_reduce".
        dtype: Its name; None where there is none.
        count: Elements; of "coalesced", calls.
        op: Reduction, None where nothing is reduced.
        root: Root rank as it was called, None where there is none.
        size_bytes: count elements in bytes.
        algorithm: Number of the algorithm.
        start_ns: When the rank called.
        end_ns: When it was over; None while it is pending.
        status: "ok", "pending" or the name of an error.
    """

    sequence: int
    call: str
    dtype: str | None
    count: int
    op: str | None
    root: int | None
    size_bytes: int
    algorithm: int
    start_ns: int
    end_ns: int | None
    status: str

    @property
    def described(self) -> str:
        """The call as the core describes it: "all_reduce(float32, 512, sum)"."""
        if self.call == "barrier":
            return "barrier()"
        if self.call == "coalesced":
            return f"coalesced({self.count} calls)"
        root = None if self.root is None else f"root {self.root}"
        return f"{self.call}({', '.join(part for part in (self.dtype, str(self.count), self.op, root) if part)})"


@dataclass(frozen=True)
class Channel:
    """What one rank did on one channel. `started` and `completed` are sequence numbers, 0 for none."""

    started: int
    completed: int
    entries: dict[int, Entry]  # by sequence


@dataclass(frozen=True)
class Member:
    """A rank of a group. `process` is its state: "running", "sleeping", "stopped", "exiting", "zombie" or "gone"."""

    rank: int
    pid: int
    process: str
    channels: dict[int, Channel]

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}, {self.process})"


@dataclass(frozen=True)
class Failure:
    """The first error of a group. -1: no such rank."""

    status: str
    rank: int
    peer: int
    operation: str
    sequence: int
    text: str


@dataclass(frozen=True)
class Group:
    """A group as one dump, or several together, saw it.

    Attributes:
        name: As it was created.
        id: Tells it from others of that name.
        host: Where its ranks are.
        state: "active" or "failed".
        error: Its first error.
        members: In the order of the group.
        seen_ns: When it was last looked at; no time in it is later.
        shift_ns: What makes times of this host comparable with those of other hosts.
    """

    name: str
    id: str
    host: str
    state: str
    error: Failure | None
    members: tuple[Member, ...]
    seen_ns: int
    shift_ns: int

    @cached_property
    def by_rank(self) -> dict[int, Member]:
        """Members by rank."""
        return {member.rank: member for member in self.members}

    @property
    def channels(self) -> list[int]:
        """Numbers of those that were used."""
        return sorted({number for member in self.members for number in member.channels})


@dataclass(frozen=True)
class Dump:
    """One file: what the process of one rank saw."""

    origin: str
    phalanx: str
    host: str
    rank: int
    world_size: int
    pid: int
    dumped_unix_ns: int
    groups: tuple[Group, ...]


def read_file(path: Path) -> Dump:
    """Read a dump.

    Raises:
        OSError: The file cannot be read.
        DumpError: It is not a sound dump; the text begins with the path.
    """
    with path.open("rb") as file:
        raw = file.read(LARGEST_BYTES + 1)
    try:
        if len(raw) > LARGEST_BYTES:
            raise DumpError(f"larger than {LARGEST_BYTES >> 20} MiB, which no dump is")
        return parse(raw, str(path))
    except DumpError as error:
        raise DumpError(f"{printable(str(path))}: {error}") from None


def parse(raw: bytes, origin: str) -> Dump:
    """Make a dump of the bytes of a file.

    Args:
        raw: UTF-8; a text that was cut inside a character is accepted.
        origin: Where they came from, for messages.

    Raises:
        DumpError: They are not a sound dump.
    """
    try:
        value: object = json.loads(raw.decode("utf-8", "replace"))
    except RecursionError:
        raise DumpError("not a flight-recorder dump (nested too deeply)") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise DumpError(f"not valid JSON ({where}: {error.msg}); the file may be truncated") from None
    except ValueError:
        raise DumpError("not a flight-recorder dump (a number has thousands of digits)") from None
    return _dump(_Fields(value, ""), printable(origin))


def printable(text: str) -> str:
    """Text in which control characters, which a terminal or a picture would obey, are escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class _Fields:
    """An object of the file, and where it is. Fields that nobody asks for are not looked at."""

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, dict):
            raise DumpError(f"{place or 'the file'} is {_shown(value)}; expected an object")
        self.place = place
        self._value: dict[str, object] = value

    def wrong(self, name: str, text: str) -> DumpError:
        return DumpError(f"{self._path(name)} {text}")

    def text(self, name: str, *known: str) -> str:
        """A string; one of those known, if any are given."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self.wrong(name, f"is {_shown(value)}; expected a string")
        if known and value not in known:
            raise self.wrong(name, f"is {_shown(value)}; expected {' or '.join(map(repr, known))}")
        return printable(value)

    def number(self, name: str, low: int, high: int) -> int:
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"is {_shown(value)}; expected a whole number from {low} to {high}")
        return value

    def is_null(self, name: str) -> bool:
        return self._get(name) is None

    def fields(self, name: str) -> "_Fields":
        return _Fields(self._get(name), self._path(name))

    def each(self, name: str) -> Iterator["_Fields"]:
        """The objects of a list."""
        value = self._get(name)
        if not isinstance(value, list):
            raise self.wrong(name, f"is {_shown(value)}; expected a list")
        for index, item in enumerate(value):
            yield _Fields(item, f"{self._path(name)}[{index}]")

    def _get(self, name: str) -> object:
        try:
            return self._value[name]
        except KeyError:
            text = f"{self.place} has no field {name!r}" if self.place else f"no field {name!r}"
            raise DumpError(f"not a flight-recorder dump ({text})") from None

    def _path(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name


def _shown(value: object) -> str:
    """A value of the file in a message of one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = printable(repr(value) if isinstance(value, str) else str(value))
    return text if len(text) <= 40 else text[:37] + "..."


# ---- the parts of a dump --------------------------------------------------------------------------------------------


def _dump(top: _Fields, origin: str) -> Dump:
    top.text("format", FORMAT)
    version = top.number("version", 1, _I64)
    if version > VERSION:
        raise DumpError(
            f"a dump of version {version}; this phalanx reads version {VERSION}: use the phalanx that wrote it"
        )
    world_size = top.number("world_size", 1, _I32)
    host = top.text("host")
    dumped_ns, dumped_unix_ns = top.number("dumped_ns", 0, _I64), top.number("dumped_unix_ns", 0, _I64)
    groups: dict[str, Group] = {}
    for each in top.each("groups"):
        group = _group(each, host, world_size, dumped_ns, dumped_unix_ns)
        if groups.setdefault(group.id, group) is not group:
            raise each.wrong("id", f"{_shown(group.id)} occurs twice")
    return Dump(
        origin=origin,
        phalanx=top.text("phalanx"),
        host=host,
        rank=top.number("rank", 0, world_size - 1),
        world_size=world_size,
        pid=top.number("pid", 0, _I32),
        dumped_unix_ns=dumped_unix_ns,
        groups=tuple(groups.values()),
    )


def _group(given: _Fields, host: str, world_size: int, dumped_ns: int, dumped_unix_ns: int) -> Group:
    members: dict[int, Member] = {}
    for each in given.each("members"):
        member = _member(each, world_size)
        if members.setdefault(member.rank, member) is not member:
            raise each.wrong("rank", f"{member.rank} occurs twice")
    if not members:
        raise given.wrong("members", "is empty; expected at least one rank")
    error = None
    if not given.is_null("error"):
        cause = given.fields("error")
        error = Failure(
            status=cause.text("status"),
            rank=cause.number("rank", -1, _I32),
            peer=cause.number("peer", -1, _I32),
            operation=cause.text("operation"),
            sequence=cause.number("sequence", 0, _U64),
            text=cause.text("text"),
        )
    # Other ranks wrote while this one read: some of it may be younger than the dump.
    times = [dumped_ns]
    for member in members.values():
        for channel in member.channels.values():
            times += [entry.end_ns or entry.start_ns for entry in channel.entries.values()]
    return Group(
        name=given.text("name"),
        id=given.text("id"),
        host=host,
        state=given.text("state", "active", "failed"),
        error=error,
        members=tuple(members.values()),
        seen_ns=max(times),
        shift_ns=dumped_unix_ns - dumped_ns,
    )


def _member(given: _Fields, world_size: int) -> Member:
    channels: dict[int, Channel] = {}
    for each in given.each("channels"):
        number = each.number("channel", 0, _I32)
        if number in channels:
            raise each.wrong("channel", f"{number} occurs twice")
        channels[number] = _channel(each)
    return Member(
        rank=given.number("rank", 0, world_size - 1),
        pid=given.number("pid", 0, _I32),
        process=given.text("process"),
        channels=channels,
    )


def _channel(given: _Fields) -> Channel:
    entries: dict[int, Entry] = {}
    last = 0
    for each in given.each("entries"):
        entry = _entry(each)
        if entry.sequence <= last:
            raise each.wrong("sequence", f"is {entry.sequence} after {last}; expected the oldest first")
        last = entry.sequence
        entries[last] = entry
    completed = given.number("completed", 0, _U64)
    # The three are read one after another while the rank works on.
    return Channel(max(given.number("started", 0, _U64), completed, last), completed, entries)


def _entry(given: _Fields) -> Entry:
    start_ns = given.number("start_ns", 0, _I64)
    status = given.text("status")
    pending = given.is_null("end_ns")
    if pending != (status == "pending"):
        raise given.wrong("end_ns", f"is {'null' if pending else 'a time'} while status is {_shown(status)}")
    return Entry(
        sequence=given.number("sequence", 1, _U64),
        call=given.text("call"),
        dtype=None if given.is_null("dtype") else given.text("dtype"),
        count=given.number("count", 0, _U64),
        op=None if given.is_null("op") else given.text("op"),
        root=None if given.is_null("root") else given.number("root", 0, _I32),
        size_bytes=given.number("bytes", 0, _U64),
        algorithm=given.number("algorithm", 0, _I32),
        start_ns=start_ns,
        end_ns=None if pending else given.number("end_ns", start_ns, _I64),
        status=status,
    )
