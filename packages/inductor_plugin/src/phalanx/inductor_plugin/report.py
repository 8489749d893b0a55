"""What became of each collective of the graphs compiled in this process, and what it costs in copies."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.inductor_plugin.eligibility import REASONS, Route


@dataclass(frozen=True)
class Line:
    """One collective.

    Attributes:
        what: The op, its dtype and shape.
        group: The name of its group.
        route: What became of it.
        reason: Why it is not better: a code of `REASONS`, or "".
        nbytes: Size of its inputs; None where only the data says it.
        copied_before: Bytes that torch copies for it beside moving them: its functional op clones the input.
        copied_after: Bytes that are still copied so.
    """

    what: str
    group: str
    route: Route
    reason: str = ""
    nbytes: int | None = None
    copied_before: int = 0
    copied_after: int = 0

    def __str__(self) -> str:
        why = f" ({self.reason}: {REASONS[self.reason]})" if self.reason else ""
        return f"{self.what} on '{self.group}': {self.route.value}{why}"


@dataclass(frozen=True)
class Report:
    """One graph.

    Attributes:
        graph: Which one: Dynamo's number of the compilation, and forward, backward or inference where it is known.
        lines: Its collectives, in order.
        arena_bytes: Symmetric memory that it uses, by group.
    """

    graph: str
    lines: tuple[Line, ...]
    arena_bytes: dict[str, int]

    @property
    def copied_before(self) -> int:
        """Bytes that torch copies beside moving them."""
        return sum(line.copied_before for line in self.lines)

    @property
    def copied_after(self) -> int:
        """Bytes that are still copied so."""
        return sum(line.copied_after for line in self.lines)

    def __str__(self) -> str:
        arenas = ", ".join(f"{nbytes:,} bytes on '{group}'" for group, nbytes in self.arena_bytes.items() if nbytes)
        head = (
            f"graph {self.graph}: {len(self.lines)} collectives, {self.copied_before:,} bytes copied before and "
            f"{self.copied_after:,} after; arena: {arenas or 'none'}"
        )
        return "\n".join([head, *(f"  {line}" for line in self.lines)])


class StrictError(RuntimeError):
    """With the option `strict`: a collective is not lowered as well as it could be. The text names each, and why."""


_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_reports: list[Report] = []


def add(report: Report) -> None:
    """Keep a report."""
    with _lock:
        _reports.append(report)


def reports() -> list[Report]:
    """The reports of the graphs that this process compiled so far, the oldest first.

    A graph that came from a cache of Inductor was compiled by another process, or before, and has none. Not collective.
    """
    with _lock:
        return list(_reports)


def clear_reports() -> None:
    """Forget the reports. Not collective."""
    with _lock:
        _reports.clear()


def check_strict(graph: str, lines: Sequence[Line], zero_copy_bytes: int) -> None:
    """Refuse a graph in which a collective stays with torch.distributed, or is copied although it is large.

    Raises:
        StrictError: There is one.
    """
    bad = [line for line in lines if line.route is Route.KEPT or _copied(line, zero_copy_bytes)]
    if bad:
        named = "\n".join(f"  {line}" for line in bad)
        raise StrictError(f"graph {graph}: {len(bad)} of {len(lines)} collectives still need copies:\n{named}")


def _copied(line: Line, zero_copy_bytes: int) -> bool:
    large = line.nbytes is None or line.nbytes >= max(1, zero_copy_bytes)
    return large and line.route in (Route.SLOTS, Route.STARTED)
