"""The limit beside each row: bytes moved / measured bandwidth + barriers x measured latency.

docs/howto/benchmark.md explains the table below; the two must say the same.
"""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from phalanx.core.bench._native import MOVES, PROBE_MAX

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


@dataclass
class Probes:
    """What the machine allows, from samples taken during the run."""

    clock_ns: list[float] = field(default_factory=list)
    round_trip_ns: list[float] = field(default_factory=list)
    barrier_ns: list[float] = field(default_factory=list)
    barrier_once_ns: list[float] = field(default_factory=list)
    moves: dict[int, list[list[float]]] = field(default_factory=dict)  # size: samples of [ns of each kind]

    def add(self, answers: list[dict[str, Any]]) -> None:
        """Take in what the ranks measured."""
        for answer in answers:
            self.clock_ns.append(answer["clock_ns"])
            self.round_trip_ns += answer["round_trip_ns"]
            self.barrier_ns += answer["barrier_ns"]
            self.barrier_once_ns += answer["barrier_once_ns"]
            for size, times in answer["moves"].items():
                self.moves.setdefault(int(size), []).append(times)

    def table(self) -> dict[str, Any]:
        """Medians, as the result file has them: nanoseconds, and GB/s for each kind and size."""
        return {
            "clock_ns": round(median(self.clock_ns), 1),
            "round_trip_ns": round(median(self.round_trip_ns), 1) if self.round_trip_ns else None,
            # A virtual machine's cores move between the caches of its host: then the two are far apart.
            "round_trip_span_ns": [round(end(self.round_trip_ns), 1) for end in (min, max)]
            if self.round_trip_ns
            else None,
            "barrier_ns": round(median(self.barrier_ns), 1),
            "barrier_once_ns": round(median(self.barrier_once_ns), 1),
            "moves_ns": {
                kind: {str(size): round(self._ns(size, column), 1) for size in sorted(self.moves)}
                for column, kind in enumerate(MOVES)
            },
        }

    def _ns(self, size: int, column: int) -> float:
        return median(sample[column] for sample in self.moves[size])


def needs(collective: str, buffers: str, size: int, ranks: int) -> list[Need]:
    """The ways to do a collective; the limit is that of the cheapest.

    Args:
        collective: "all_reduce", ...
        buffers: "user" or "symmetric".
        size: Bytes, as in the table.
        ranks: How many.
    """
    others = (ranks - 1) / ranks * size  # without this rank's own block
    own = size / ranks
    user = {
        "all_reduce": [
            Need(1, {"stage": size, "reduce_staged": (ranks - 1) * size}),
            # The sums of the own part are wanted twice: by this rank, and in shared memory.
            Need(2, {"stage": others, "reduce_staged": others, "pull_staged": others}, {"stage": own}),
        ],
        "all_gather": [Need(1, {"stage": own, "pull_staged": others, "copy": own})],
        "reduce_scatter": [Need(1, {"stage": others, "reduce_staged": others})],
        "all_to_all": [Need(1, {"stage": others, "pull_staged": others, "copy": own})],
        # The root fills one chunk while the others empty another: only the first chunk is not overlapped.
        "broadcast": [Need(1, {"stage": min(size, CHUNK), "pull_staged": size})],
        "barrier": [Need(1, {})],
    }
    symmetric = {
        "all_reduce": [
            # In place: each rank adds up its own block of all ranks, and writes the sums to all of them.
            Need(2, {"exchange": others}),
            Need(2, {"reduce": (ranks - 1) * size, "copy": size}),
        ],
        "all_gather": [Need(2, {"pull": others, "copy": own})],
        "reduce_scatter": [Need(2, {"reduce": others})],
        "all_to_all": [Need(2, {"pull": others, "copy": own})],
        "broadcast": [Need(2, {"pull": size})],
        "barrier": [Need(1, {})],
    }
    # What lies in symmetric memory may be copied nevertheless.
    return user[collective] + symmetric[collective] if buffers == "symmetric" else user[collective]


def limit(table: Mapping[str, Any], collective: str, buffers: str, size: int, ranks: int, cores: int) -> dict[str, Any]:
    """The limit of one row.

    Args:
        table: `Probes.table`.
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

    cheapest = min(needs(collective, buffers, size, ranks), key=nanoseconds)
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
