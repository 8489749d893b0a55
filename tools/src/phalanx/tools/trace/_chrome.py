"""Trace events: the JSON that Perfetto and chrome://tracing open.

The format is that of the document "Trace Event Format" of the Chromium project: complete events (X), instant events
(i) and metadata (M). Times are microseconds.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from phalanx.tools.trace._analysis import Analysis, Collective, lanes
from phalanx.tools.trace._read import Group
from phalanx.tools.trace._text import ranks

Event = dict[str, Any]
_Process = tuple[str, int, int]  # host, rank, pid


def text(analyses: list[Analysis]) -> str:
    """The file: one event on each line."""
    return '{"displayTimeUnit": "ns", "traceEvents": [\n' + ",\n".join(map(json.dumps, events(analyses))) + "\n]}\n"


def events(analyses: list[Analysis]) -> list[Event]:
    """All events, in an order that shows nesting: what contains others comes before them.

    A rank is a process; each channel of each group is a thread of it. Where a rank has several collectives of one
    channel in flight, those that overlap have threads of their own, because events of a thread must nest.
    """
    zero = min((_zero(analysis) for analysis in analyses), default=0)
    numbers = _numbers(analyses)
    hosts = {analysis.group.host for analysis in analyses}
    found: list[Event] = []
    for (host, rank, pid), number in numbers.items():
        where = f" on {host}" if len(hosts) > 1 else ""
        found.append(_metadata("process_name", number, 0, {"name": f"rank {rank} (pid {pid}){where}"}))
        found.append(_metadata("process_sort_index", number, 0, {"sort_index": number}))
    threads = dict.fromkeys(numbers.values(), 0)
    for analysis in analyses:
        group = analysis.group
        for member in group.members:
            process = numbers[group.host, member.rank, member.pid]
            for name, collectives in _threads(analysis, member.rank):
                threads[process] += 1
                thread = threads[process]
                found.append(_metadata("thread_name", process, thread, {"name": name}))
                found.append(_metadata("thread_sort_index", process, thread, {"sort_index": thread}))
                for collective in collectives:
                    for event in _collective(group, collective, member.rank, zero):
                        found.append(event | {"pid": process, "tid": thread})
    return found


def _zero(analysis: Analysis) -> int:
    """The first moment of a group, comparable between hosts."""
    starts = [each.start_ns for collectives in analysis.channels.values() for each in collectives]
    return min(starts, default=analysis.group.seen_ns) + analysis.group.shift_ns


def _numbers(analyses: list[Analysis]) -> dict[_Process, int]:
    """What each process is called in the file: its rank, unless two have the same."""
    found = {
        (analysis.group.host, member.rank, member.pid) for analysis in analyses for member in analysis.group.members
    }
    ordered = sorted(found)
    distinct = len({rank for _, rank, _ in ordered}) == len(ordered)
    return {process: process[1] if distinct else index for index, process in enumerate(ordered)}


def _threads(analysis: Analysis, rank: int) -> Iterator[tuple[str, list[Collective]]]:
    for number, collectives in analysis.channels.items():
        for index, lane in enumerate(lanes(collectives, rank)):
            overlap = f" ({index + 1})" if index else ""
            yield f"{analysis.group.name}, channel {number}{overlap}", lane


def _collective(group: Group, each: Collective, rank: int, zero: int) -> Iterator[Event]:
    entry, end = each.calls[rank], each.end_ns(rank)
    shift = group.shift_ns - zero
    arguments = {
        "call": entry.described,
        "bytes": entry.size_bytes,
        "algorithm": entry.algorithm,
        "status": entry.status,
        "group": group.name,
        "channel": each.channel,
    }
    name = f"{entry.call} #{each.sequence}"
    yield _slice(name, "collective", entry.start_ns + shift, end + shift, arguments)
    came = entry.start_ns + each.waits_ns.get(rank, 0)
    if came > entry.start_ns:
        yield _slice(f"waiting for {ranks(each.awaited)}", "waiting", entry.start_ns + shift, came + shift, {})
    if end > came and not each.absent:
        yield _slice("working", "working", came + shift, end + shift, {})
    if entry.status not in ("ok", "pending"):
        yield {
            "name": entry.status,
            "cat": "error",
            "ph": "i",
            "s": "p",
            "ts": _us(end + shift),
            "args": {"call": entry.described, "first error": group.error.text if group.error else ""},
        }


def _slice(name: str, category: str, start: int, end: int, arguments: dict[str, Any]) -> Event:
    return {"name": name, "cat": category, "ph": "X", "ts": _us(start), "dur": _us(end - start), "args": arguments}


def _metadata(name: str, process: int, thread: int, arguments: Event) -> Event:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _us(nanoseconds: int) -> float:
    # Perfetto cuts what it reads to whole nanoseconds, and drops events that then no longer nest.
    value = nanoseconds / 1000
    return value if int(value * 1000) >= nanoseconds else math.nextafter(value, math.inf)
