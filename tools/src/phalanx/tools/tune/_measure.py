"""Measuring candidates in turns, for `phalanx tune`, and what it makes of the times.

Every rank runs the same steps; rank 0 decides. A value takes the place of the built-in one only if it wins by more than
`MARGIN`: what is measured on a busy host is noisy, and a table that changes nothing does no harm.
"""

import math
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, ClassVar, Generic, TypeVar

from phalanx.core import GpuTuning, Group, Tuning, check, ffi
from phalanx.core.commands import end_with_parent

MARGIN = 1.03
ITEM = 4  # bytes of a float32, of which all that is measured consists


def crossover_below(ratios: dict[int, float], built_in: int) -> tuple[int, list[int]]:
    """The largest size for which an alternative is used.

    Args:
        ratios: By size, its time divided by that of the other one.
        built_in: Where the crossover is without measurement.

    Returns:
        The crossover, and the sizes on which it changes the choice.
    """
    value, changed = built_in, []
    for size in sorted(size for size in ratios if size > built_in):
        if ratios[size] * MARGIN >= 1:
            break
        value = size
        changed.append(size)
    if changed:
        return value, changed
    for size in sorted((size for size in ratios if size <= built_in), reverse=True):
        if ratios[size] <= MARGIN:
            break
        value = max((smaller for smaller in ratios if smaller < size), default=1)
        changed.append(size)
    return value, changed


def crossover_above(ratios: dict[int, float], built_in: int) -> tuple[int, list[int]]:
    """The smallest size for which an alternative is used. As `crossover_below`."""
    value, changed = built_in, []
    for size in sorted((size for size in ratios if size < built_in), reverse=True):
        if ratios[size] * MARGIN >= 1:
            break
        value = size
        changed.append(size)
    if changed:
        return value, changed
    for size in sorted(size for size in ratios if size >= built_in):
        if ratios[size] <= MARGIN:
            break
        value = min((larger for larger in ratios if larger > size), default=2 * size)
        changed.append(size)
    return value, changed


def best_value(ratios: dict[int, list[float]], built_in: int) -> int:
    """The value that is fastest on average and nowhere clearly slower; the built-in one unless it wins clearly.

    Args:
        ratios: By value, for each size its time divided by that of the built-in value.
        built_in: A key of `ratios`.
    """
    fit = [value for value in ratios if max(ratios[value]) < MARGIN and mean(ratios[value]) * MARGIN < 1]
    return min(fit, key=lambda value: mean(ratios[value]), default=built_in)


def settled_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """How the time of one candidate is to that of another, by pairs of one round: what slows a round down is in both.

    Returns:
        The median of the ratios; 1 when less than three quarters of the rounds agree on which is faster.
    """
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return 1.0 if lower <= 1 <= upper else median


def mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def powers(first: int, last: int, also: int) -> list[int]:
    """Powers of two times `first` up to `last`, and `also` if it is between them; whole elements."""
    sizes = {first << i for i in range((last // first).bit_length())}
    return sorted(sizes | ({also // ITEM * ITEM} if first <= also <= last else set()))


_BATCH_NS = 2_000_000  # of one candidate in one round
_ROUNDS = (7, 200)  # at least, at most
_MOST_CALLS = 1000  # in a batch

Times = dict[int, dict[int, list[float]]]  # nanoseconds of a call in each round, by size and by candidate
Call = Callable[[], int]  # one collective; returns a phx_status
Values = TypeVar("Values", Tuning, GpuTuning)


def call_options(**fields: Any) -> Any:
    """A phx_options pointer with these fields; the others are the default."""
    return ffi.new("phx_options *", {"struct_size": ffi.sizeof("phx_options"), "scale": 1.0, **fields})


def begin(given: dict[str, Any]) -> None:
    """Tie this process to the one that started it, and to the core that is its own."""
    end_with_parent(given["parent"])
    os.sched_setaffinity(0, {given["cores"][given["rank"] % len(given["cores"])]})


class Measuring(ABC, Generic[Values]):
    """Measures on a group that has the built-in values."""

    shares: ClassVar[dict[str, float]]  # of the time, by name of a value

    def __init__(self, group: Group, seconds: float, built_in: Values) -> None:
        self.group = group
        self.seconds = seconds
        self.built_in: Values = built_in
        self.tuning: Values = built_in

    @abstractmethod
    def run(self) -> list[dict[str, Any]]:
        """Tune one value after another; the later ones are measured with what the earlier ones became."""

    @abstractmethod
    def set(self, values: Values) -> None:
        """Let the group have these values. Collective."""

    def prepare(self, call: Call, count: int) -> Callable[[], None]:
        """What makes so many calls, one after the other, and returns when they are through."""

        def run() -> None:
            for _ in repeat(None, count):
                if status := call():
                    check(status)

        return run

    def measure(
        self,
        name: str,
        sizes: Sequence[int],
        candidates: Sequence[int],
        choose: Callable[[int], None],
        call: Callable[[int, int], Call],
    ) -> Times:
        """Time the candidates in turns until the time of this value is up."""
        deadline = time.monotonic() + self.seconds * self.shares[name]
        calls = {(size, each): call(size, each) for size in sizes for each in candidates}
        runs, counts = {}, {}
        for size in sizes:
            for each in candidates:
                choose(each)
                took = self._batch(self.prepare(calls[size, each], 2), 2)
                took = self._batch(self.prepare(calls[size, each], 2), 2)
            counts[size] = self.agree(max(1, min(_MOST_CALLS, int(_BATCH_NS / max(took, 1)))))
            for each in candidates:
                choose(each)
                runs[size, each] = self.prepare(calls[size, each], counts[size])
        times: Times = {size: {each: [] for each in candidates} for size in sizes}
        for done in range(1, _ROUNDS[1] + 1):
            for size in sizes:
                for i in range(len(candidates)):  # each is first in its turn
                    each = candidates[(i + done) % len(candidates)]
                    choose(each)
                    times[size][each].append(self._batch(runs[size, each], counts[size]))
            if not self.agree(done < _ROUNDS[0] or time.monotonic() < deadline):
                break
        return times

    def _batch(self, run: Callable[[], None], count: int) -> float:
        """Nanoseconds of one call, when it is made `count` times."""
        self.group.barrier()
        started = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - started) / count

    def agree(self, value: int) -> int:
        """Rank 0's value, everywhere."""
        buffer = memoryview(bytearray(8)).cast("q")
        buffer[0] = value
        self.group.broadcast(buffer)
        return int(buffer[0])

    def choose(self, name: str) -> Callable[[int], None]:
        """What sets one value, and leaves the others as they have become."""
        return lambda value: self.set(replace(self.tuning, **{name: value}))

    # ---- what becomes of it ---------------------------------------------------------------------

    def settle_crossover(self, name: str, ratios: dict[int, float], crossed: tuple[int, list[int]]) -> dict[str, Any]:
        """Take over a crossover: where it is, and at which sizes that changes something."""
        value, changed = crossed
        won = [max(ratios[size], 1 / ratios[size]) for size in changed]
        return self._settle(name, value, mean(won) - 1 if won else 0.0, "", {str(k): v for k, v in ratios.items()})

    def settle_best(
        self, name: str, values: Sequence[int], sizes: Sequence[int], call: Callable[[int, int], Call]
    ) -> dict[str, Any]:
        """Take over the best of several values."""
        built_in = getattr(self.built_in, name)
        times = self.measure(name, sizes, values, self.choose(name), call)
        ratios = {
            value: [settled_ratio(times[size][value], times[size][built_in]) for size in sizes] for value in values
        }
        value = best_value(ratios, built_in)
        scores = {each: mean(ratios[each]) for each in values}
        note = ""
        if value == built_in and len(values) > 1:
            other = min((each for each in values if each != built_in), key=scores.__getitem__)
            note = f"{other}: {1 / scores[other] - 1:+.1%}"
        return self._settle(name, value, 1 / scores[value] - 1, note, {str(k): v for k, v in scores.items()})

    def _settle(self, name: str, value: int, gain: float, note: str, ratios: dict[str, float]) -> dict[str, Any]:
        value = self.agree(value)
        self.tuning = replace(self.tuning, **{name: value})
        self.set(self.tuning)
        return {
            "name": name,
            "built_in": getattr(self.built_in, name),
            "chosen": value,
            "gain": gain,
            "note": note,
            "ratios": ratios,
        }
