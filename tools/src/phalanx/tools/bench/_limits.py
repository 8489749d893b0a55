"""The limit of each row: bytes moved / measured bandwidth + barriers x measured latency.

docs/howto/benchmark.md explains the table below; the two must say the same.
"""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from phalanx.tools.bench._native import MOVES, PROBE_MAX

SIZES = tuple(1 << bits for bits in range(6, 27, 2))  # 64 bytes to 64 MiB
CHUNK = 256 << 10  # PHXB_PROBE_CHUNK: what one staging area holds


@dataclass(frozen=True)
class Need:
    """What a collective cannot do without, for one rank.

    Attributes:
        barriers: How many.
        moves: Bytes of each kind of move.
        cached: Likewise, of what was just computed and is still in a cache, a chunk at a time.
    """

    barriers: int
    moves: Mapping[str, float]
    cached: Mapping[str, float] = field(default_factory=dict)


# Times of a cache line to the other core and back: up to which ratio two of them count as equal, and from which one
# counts as far. (Two threads of one core are nearer than two cores that share a cache, but neither is far.)
ALIKE, FAR = 1.5, 2.5


@dataclass
class Sample:
    """What the machine allowed at one moment of the run."""

    clock_ns: list[float] = field(default_factory=list)
    round_trip_ns: list[float] = field(default_factory=list)
    barrier_ns: list[float] = field(default_factory=list)
    barrier_once_ns: list[float] = field(default_factory=list)
    moves: dict[int, list[list[float]]] = field(default_factory=dict)  # size: of each rank [ns of each kind]

    def add(self, answers: list[dict[str, Any]]) -> None:
        """Take in what the ranks measured: latencies, or moves."""
        for answer in answers:
            for name in ("clock_ns", "round_trip_ns", "barrier_ns", "barrier_once_ns"):
                getattr(self, name).extend(answer.get(name, []))
            for size, times in answer.get("moves", {}).items():
                self.moves.setdefault(int(size), []).append(times)


@dataclass
class Probes:
    """What the machine allows: samples taken during the run.

    Attributes:
        samples: In the order of time.
        tables: Medians of some of them, which limits were made from.
    """

    samples: list[Sample] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    _chosen: list[list[Sample]] = field(default_factory=list)

    def table_for(self, round_trip_ns: float | None) -> int:
        """The table to compare a row with: of the samples taken while the cores were as far apart as they were for it.

        Args:
            round_trip_ns: Time of a cache line to the other core and back while the row was measured, if known.

        Returns:
            Its place in `tables`.
        """
        alike = [sample for sample in self.samples if round_trip_ns and _alike(sample.round_trip_ns, round_trip_ns)]
        chosen = alike or self.samples
        if chosen not in self._chosen:
            self._chosen.append(chosen)
            self.tables.append(table_of(chosen))
        return self._chosen.index(chosen)


def _alike(samples_ns: list[float], round_trip_ns: float) -> bool:
    return bool(samples_ns) and 1 / ALIKE <= median(samples_ns) / round_trip_ns <= ALIKE


def table_of(samples: list[Sample]) -> dict[str, Any]:
    """Medians, as the result file has them: nanoseconds, for each kind and size of moves."""

    def all_of(name: str) -> list[float]:
        return [value for sample in samples for value in getattr(sample, name)]

    trips = all_of("round_trip_ns")
    sizes = sorted({size for sample in samples for size in sample.moves})
    return {
        "samples": len(samples),
        "clock_ns": round(median(all_of("clock_ns")), 1),
        "round_trip_ns": round(median(trips), 1) if trips else None,
        # A virtual machine's cores move between the caches of its host: then the two are far apart.
        "round_trip_span_ns": [round(end(trips), 1) for end in (min, max)] if trips else None,
        "barrier_ns": round(median(all_of("barrier_ns")), 1),
        "barrier_once_ns": round(median(all_of("barrier_once_ns")), 1),
        "movers": max((len(times) for sample in samples for times in sample.moves.values()), default=0),
        "moves_ns": {
            kind: {
                str(size): round(median(times[column] for sample in samples for times in sample.moves.get(size, [])), 1)
                for size in sizes
            }
            for column, kind in enumerate(MOVES)
        },
    }


def needs(collective: str, buffers: str, size: int, ranks: int, turns: int) -> list[list[Need]]:
    """The ways to do a collective; the limit is that of the cheapest.

    Args:
        collective: "all_reduce", ...
        buffers: "user", "symmetric" or "list".
        size: Bytes, as in the table.
        ranks: How many.
        turns: Ranks of a core.

    Returns:
        For each way what a rank needs, by kind of core where these differ: then the busiest one counts.
    """
    others = (ranks - 1) / ranks * size  # without this rank's own block
    own = size / ranks
    # The root fills one chunk while the others empty another: only the first chunk is not overlapped.
    readers = Need(1, {"stage": min(size, CHUNK), "pull_staged": size})
    # But not with what the readers on its own core do.
    beside_root = Need(1, {"stage": size / turns, "pull_staged": size * (turns - 1) / turns})
    user = {
        "all_reduce": [
            [Need(1, {"stage": size, "reduce_staged": (ranks - 1) * size})],
            # The sums of the own part are wanted twice: by this rank, and in shared memory.
            [Need(2, {"stage": others, "reduce_staged": others, "pull_staged": others}, {"stage": own})],
        ],
        "all_gather": [[Need(1, {"stage": own, "pull_staged": others, "copy": own})]],
        "reduce_scatter": [[Need(1, {"stage": others, "reduce_staged": others})]],
        "all_to_all": [[Need(1, {"stage": others, "pull_staged": others, "copy": own})]],
        "broadcast": [[readers, beside_root] if turns > 1 else [readers]],
        "barrier": [[Need(1, {})]],
    }
    symmetric = {
        "all_reduce": [
            # In place: each rank adds up its own block of all ranks, and writes the sums to all of them.
            [Need(2, {"exchange": others})],
            [Need(2, {"reduce": (ranks - 1) * size, "copy": size})],
        ],
        "all_gather": [[Need(2, {"pull": others, "copy": own})]],
        "reduce_scatter": [[Need(2, {"reduce": others})]],
        "all_to_all": [[Need(2, {"pull": others, "copy": own})]],
        # The root writes a share of each block itself.
        "broadcast": [[Need(2, {"pull": others})]],
        "barrier": [[Need(1, {})]],
    }
    # What lies in symmetric memory may be copied nevertheless.
    return user[collective] + symmetric[collective] if buffers == "symmetric" else user[collective]


def limit(table: Mapping[str, Any], collective: str, buffers: str, size: int, ranks: int, cores: int) -> dict[str, Any]:
    """The limit of one row.

    Args:
        table: `table_of`.
        collective: "all_reduce", ...
        buffers: "user" or "symmetric".
        size: Bytes, as in the table.
        ranks: How many.
        cores: That the ranks are pinned to.

    Returns:
        us, barriers, and bytes of each kind of move; `cached` as in `Need`, if there are any.
    """
    turns = math.ceil(ranks / cores)  # ranks that share a core move their bytes one after the other

    def nanoseconds(need: Need) -> float:
        moved = sum(move_ns(table["moves_ns"][kind], amount) for kind, amount in need.moves.items())
        moved += cached_ns(table["moves_ns"], need.cached)
        # The first one waits for the last rank to begin, as a call that is timed does.
        waited = float(table["barrier_once_ns"]) + (need.barriers - 1) * float(table["barrier_ns"])
        return waited + turns * moved

    ways = [max(way, key=nanoseconds) for way in needs(collective, buffers, size, ranks, turns)]
    cheapest = min(ways, key=nanoseconds)
    found = {
        "us": round(nanoseconds(cheapest) / 1000, 3),
        "barriers": cheapest.barriers,
        "bytes": {kind: round(amount) for kind, amount in cheapest.moves.items()},
    }
    cached = {kind: round(amount) for kind, amount in cheapest.cached.items()}
    return {**found, "cached": cached} if cached else found


def cached_ns(moves_ns: Mapping[str, Mapping[str, float]], cached: Mapping[str, float]) -> float:
    """Time of moves a chunk at a time."""
    return sum(
        amount / min(amount, CHUNK) * move_ns(moves_ns[kind], min(amount, CHUNK))
        for kind, amount in cached.items()
        if amount > 0
    )


def move_ns(times: Mapping[str, float], size: float) -> float:
    """Time to move `size` bytes: interpolated between the sizes that were measured, on logarithmic scales."""
    if size <= 0:
        return 0.0
    sizes = sorted(int(key) for key in times)
    if size <= sizes[0]:
        return float(times[str(sizes[0])])
    if size >= sizes[-1]:
        return float(times[str(sizes[-1])]) * size / sizes[-1]
    above = bisect.bisect_left(sizes, size)
    low, high = sizes[above - 1], sizes[above]
    first, last = max(1.0, times[str(low)]), max(1.0, times[str(high)])
    part = math.log(size / low) / math.log(high / low)
    return math.exp(math.log(first) + part * math.log(last / first))


def probe_sizes(largest: int) -> list[int]:
    """What to measure for rows of up to `largest` bytes."""
    return [size for size in SIZES if size <= min(PROBE_MAX, max(256, 4 * largest))]
