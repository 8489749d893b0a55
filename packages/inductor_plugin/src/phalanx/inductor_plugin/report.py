"""Reports: the route of each collective of the graphs compiled in this process, and the bytes copied for it."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.inductor_plugin._eligibility import REASONS, Route


@dataclass(frozen=True)
class CollectiveReport:
    """One collective.

    Attributes:
        call: The op, its dtype and shape.
        group: The name of its group.
        route: The route by which it is executed.
        reason: The reason for which it has no better route: a code of `REASONS`, or "".
        nbytes: The size of its inputs; None if it depends on the data.
        copied_before: Bytes that torch's functional op would copy in addition to the transfer: it clones the input.
        copied_after: Bytes that are copied so in the lowered graph.
    """

    call: str
    group: str
    route: Route
    reason: str = ""
    nbytes: int | None = None
    copied_before: int = 0
    copied_after: int = 0

    def __str__(self) -> str:
        why = f" ({self.reason}: {REASONS[self.reason]})" if self.reason else ""
        return f"{self.call} on '{self.group}': {self.route.value}{why}"


@dataclass(frozen=True)
class Report:
    """One graph.

    Attributes:
        graph: Dynamo's number of the compilation, and forward, backward or inference if it is known.
        collectives: The collectives of the graph, in order.
        arena_bytes: Symmetric memory that the graph uses, by group.
    """

    graph: str
    collectives: tuple[CollectiveReport, ...]
    arena_bytes: dict[str, int]

    @property
    def copied_before(self) -> int:
        """Bytes that torch would copy in addition to the transfers."""
        return sum(collective.copied_before for collective in self.collectives)

    @property
    def copied_after(self) -> int:
        """Bytes that the lowered graph copies so."""
        return sum(collective.copied_after for collective in self.collectives)

    def __str__(self) -> str:
        arenas = ", ".join(f"{nbytes:,} bytes on '{group}'" for group, nbytes in self.arena_bytes.items() if nbytes)
        head = (
            f"graph {self.graph}: {len(self.collectives)} collectives, {self.copied_before:,} bytes copied before and "
            f"{self.copied_after:,} after; arena: {arenas or 'none'}"
        )
        return "\n".join([head, *(f"  {collective}" for collective in self.collectives)])


class StrictError(RuntimeError):
    """Raised with the option `strict` for collectives that still need copies. The text names each, with a reason."""


_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_reports: list[Report] = []


def add(report: Report) -> None:
    """Append a report to those of this process.

    Args:
        report: The report of one graph.
    """
    with _lock:
        _reports.append(report)


def reports() -> list[Report]:
    """The reports of the graphs that this process has compiled, the oldest first.

    A graph that was taken from Inductor's cache has no report. Not collective.

    Example:
        >>> torch.compile(lambda x: pc.all_reduce(x, "sum", group), backend="phalanx")(torch.ones(2))
        tensor([2., 2.])
        >>> print(reports()[-1].collectives[0])
        all_reduce(sum) float32[2] on '0': slots (small: below zero_copy_bytes, ...)
    """
    with _lock:
        return list(_reports)


def clear_reports() -> None:
    """Forget the reports. Not collective.

    Example:
        >>> clear_reports()
        >>> reports()
        []
    """
    with _lock:
        _reports.clear()


def check_strict(graph: str, collectives: Sequence[CollectiveReport], zero_copy_bytes: int) -> None:
    """Refuse a graph in which a collective stays with torch.distributed, or is copied although it is large.

    Args:
        graph: The name of the graph.
        collectives: Its collectives.
        zero_copy_bytes: Collectives of at least this size, in bytes, count as large.

    Raises:
        StrictError: The graph has such a collective.
    """
    copied = [each for each in collectives if each.route is Route.FALLBACK or _is_copied(each, zero_copy_bytes)]
    if copied:
        named = "\n".join(f"  {each}" for each in copied)
        raise StrictError(
            f"strict: graph {graph}: {len(copied)} of {len(collectives)} collectives still need copies; change them or "
            f"compile without the option phalanx.strict:\n{named}"
        )


def _is_copied(collective: CollectiveReport, zero_copy_bytes: int) -> bool:
    large = collective.nbytes is None or collective.nbytes >= max(1, zero_copy_bytes)
    return large and collective.route in (Route.SLOTS, Route.ASYNC)
