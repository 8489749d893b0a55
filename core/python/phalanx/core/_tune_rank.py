"""One rank of `phalanx tune`: measures candidates in turns. Every rank runs the same steps; rank 0 decides.

A candidate takes the place of a built-in value only if it wins by more than `MARGIN`: what is measured on a busy host
is noisy, and a table that changes nothing does no harm.
"""

import ctypes
import json
import math
import mmap
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import repeat
from typing import Any

from phalanx.core._lib import ffi, lib
from phalanx.core._options import options
from phalanx.core.dtypes import Algo, DType, ReduceOp
from phalanx.core.errors import check
from phalanx.core.group import Group
from phalanx.core.store import FileStore
from phalanx.core.tuning import Tuning
from phalanx.core.world import World

MARGIN = 1.03
_KIB, _MIB = 1 << 10, 1 << 20
_ITEM = 4  # bytes of a float32
_BATCH_NS = 2_000_000  # of one candidate in one round
_ROUNDS = (7, 200)  # at least, at most
_FEW_RANKS = 4  # up to which push_bytes changes nothing: kFewRanks in core/src/collectives/symmetric.cpp
_NEVER = 1 << 40  # a size that no result has
_SHARES = {"one_shot_bytes": 0.2, "chunk_bytes": 0.3, "streaming_bytes": 0.3, "push_bytes": 0.2}
_PR_SET_PDEATHSIG = 1

Times = dict[int, dict[int, list[float]]]  # nanoseconds of a call in each round, by size and by candidate


def main() -> None:
    """Do what the JSON object of the first argument asks for. Rank 0 prints a JSON object."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != given["parent"]:  # it died before the request above
        os._exit(1)
    rank, ranks, cores = given["rank"], given["ranks"], given["cores"]
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with World(rank, ranks, FileStore(given["store"]), timeout_ms=60_000) as world:
        group = world.create_group("tune", range(ranks))
        present = group.get_tuning()
        group.set_tuning(Tuning())
        built_in = group.get_tuning()
        answer: dict[str, Any] = {"present": asdict(present), "built_in": asdict(built_in)}
        if given["seconds"] > 0:
            tuner = _Tuner(group, given["seconds"], given["largest"])
            answer["findings"] = tuner.run()
            answer["chosen"] = asdict(tuner.tuning)
            if given["save"] and rank == 0:
                group.save_tuning(given["path"])
        group.barrier()
    if rank == 0:
        print(json.dumps(answer))


class _Tuner:
    """Measures on a group that has the built-in values."""

    def __init__(self, group: Group, seconds: float, largest: int) -> None:
        self.group = group
        self.seconds = seconds
        self.largest = largest
        self.built_in = self.tuning = group.get_tuning()
        self._memory = [_pages(largest), _pages(largest)]
        self._source, self._out = (ffi.from_buffer("char[]", each) for each in self._memory)
        self._symm = group.rendezvous(group.world.alloc(largest))
        group.set_tuning(replace(self.built_in, chunk_bytes=1 << 30))
        self._slot = group.eager_bytes  # of the staging area: larger chunks change nothing
        group.set_tuning(self.built_in)

    def run(self) -> list[dict[str, Any]]:
        """Tune one value after another; the later ones are measured with what the earlier ones became."""
        findings = [self._one_shot(), self._chunk(), self._streaming()]
        if len(self.group.ranks) > _FEW_RANKS:
            findings.append(self._push())
        return findings

    # ---- the four values ------------------------------------------------------------------------

    def _one_shot(self) -> dict[str, Any]:
        most = min(64 * _KIB, self._slot, self.largest)
        sizes = _powers(64, most, self.built_in.one_shot_bytes)
        chosen = {algo: options(algo, 0, 0) for algo in (Algo.ONE_SHOT, Algo.TWO_SHOT)}
        times = self._measure(
            "one_shot_bytes",
            sizes,
            tuple(chosen),
            lambda algo: None,
            lambda size, algo: self._all_reduce(size, chosen[Algo(algo)]),
        )
        ratios = {size: settled_ratio(times[size][Algo.ONE_SHOT], times[size][Algo.TWO_SHOT]) for size in sizes}
        return self._settle_crossover("one_shot_bytes", ratios, crossover_below(ratios, self.built_in.one_shot_bytes))

    def _chunk(self) -> dict[str, Any]:
        values = {64 * _KIB, 128 * _KIB, 256 * _KIB, 512 * _KIB, self.built_in.chunk_bytes}
        return self._settle_best(
            "chunk_bytes",
            sorted(value for value in values if value <= max(self._slot, self.built_in.chunk_bytes)),
            self._large(_MIB, 4 * _MIB, 16 * _MIB),
            lambda size, value: self._all_reduce(size, ffi.NULL),
        )

    def _streaming(self) -> dict[str, Any]:
        name, built_in = "streaming_bytes", self.built_in.streaming_bytes
        sizes = _powers(min(_MIB, self.largest), self.largest, built_in)
        times = self._measure(
            name,
            sizes,
            (1, _NEVER),
            lambda value: self.group.set_tuning(replace(self.tuning, streaming_bytes=value)),
            lambda size, value: self._all_reduce(size, ffi.NULL),
        )
        ratios = {size: settled_ratio(times[size][1], times[size][_NEVER]) for size in sizes}
        return self._settle_crossover(name, ratios, crossover_above(ratios, built_in))

    def _push(self) -> dict[str, Any]:
        values = {8 * _KIB, 16 * _KIB, 32 * _KIB, 64 * _KIB, 128 * _KIB, self.built_in.push_bytes}
        return self._settle_best(
            "push_bytes",
            sorted(values),
            self._large(256 * _KIB, _MIB, 8 * _MIB),
            lambda size, value: self._all_reduce_in_place(size),
        )

    def _large(self, *sizes: int) -> list[int]:
        return [size for size in sizes if size <= self.largest] or [self.largest]

    # ---- what is measured -----------------------------------------------------------------------

    def _all_reduce(self, size: int, made: Any) -> Callable[[], int]:
        pointer, count = self.group.pointer, size // _ITEM
        return partial(
            lib.phx_all_reduce,
            *(pointer, self._source, self._out, count, DType.FLOAT32, ReduceOp.SUM, made, ffi.NULL),
        )

    def _all_reduce_in_place(self, size: int) -> Callable[[], int]:
        own = ffi.cast("void *", self._symm.buffer_ptrs[self.group.group_rank])
        return partial(
            lib.phx_symm_all_reduce,
            *(self._symm.pointer, 0, own, size // _ITEM, DType.FLOAT32, ReduceOp.SUM, ffi.NULL, ffi.NULL),
        )

    def _measure(
        self,
        name: str,
        sizes: Sequence[int],
        candidates: Sequence[int],
        choose: Callable[[int], None],
        call: Callable[[int, int], Callable[[], int]],
    ) -> Times:
        """Time the candidates in turns until the time of this value is up."""
        deadline = time.monotonic() + self.seconds * _SHARES[name]
        calls = {(size, each): call(size, each) for size in sizes for each in candidates}
        counts = {}
        for size in sizes:
            for each in candidates:
                choose(each)
                took = self._batch(calls[size, each], 2)
                took = self._batch(calls[size, each], 2)
            counts[size] = self._agree(max(1, min(1000, int(_BATCH_NS / max(took, 1)))))
        times: Times = {size: {each: [] for each in candidates} for size in sizes}
        for done in range(1, _ROUNDS[1] + 1):
            for size in sizes:
                for i in range(len(candidates)):  # each is first in its turn
                    each = candidates[(i + done) % len(candidates)]
                    choose(each)
                    times[size][each].append(self._batch(calls[size, each], counts[size]))
            if not self._agree(done < _ROUNDS[0] or time.monotonic() < deadline):
                break
        return times

    def _batch(self, call: Callable[[], int], count: int) -> float:
        """Nanoseconds of one call, when it is made `count` times."""
        self.group.barrier()
        started = time.perf_counter_ns()
        for _ in repeat(None, count):
            if status := call():
                check(status)
        return (time.perf_counter_ns() - started) / count

    def _agree(self, value: int) -> int:
        """Rank 0's value, everywhere."""
        buffer = memoryview(bytearray(8)).cast("q")
        buffer[0] = value
        self.group.broadcast(buffer)
        return int(buffer[0])

    # ---- what becomes of it ---------------------------------------------------------------------

    def _settle_crossover(self, name: str, ratios: dict[int, float], crossed: tuple[int, list[int]]) -> dict[str, Any]:
        """Take over a crossover: where it is, and at which sizes that changes something."""
        value, changed = crossed
        won = [max(ratios[size], 1 / ratios[size]) for size in changed]
        return self._settle(name, value, _mean(won) - 1 if won else 0.0, "", {str(k): v for k, v in ratios.items()})

    def _settle_best(
        self, name: str, values: Sequence[int], sizes: Sequence[int], call: Callable[[int, int], Callable[[], int]]
    ) -> dict[str, Any]:
        built_in = getattr(self.built_in, name)
        times = self._measure(
            name, sizes, values, lambda value: self.group.set_tuning(replace(self.tuning, **{name: value})), call
        )
        ratios = {
            value: [settled_ratio(times[size][value], times[size][built_in]) for size in sizes] for value in values
        }
        value = best_value(ratios, built_in)
        scores = {each: _mean(ratios[each]) for each in values}
        note = ""
        if value == built_in and len(values) > 1:
            other = min((each for each in values if each != built_in), key=scores.__getitem__)
            note = f"{other}: {1 / scores[other] - 1:+.1%}"
        return self._settle(name, value, 1 / scores[value] - 1, note, {str(k): v for k, v in scores.items()})

    def _settle(self, name: str, value: int, gain: float, note: str, ratios: dict[str, float]) -> dict[str, Any]:
        value = self._agree(value)
        self.tuning = replace(self.tuning, **{name: value})
        self.group.set_tuning(self.tuning)
        return {
            "name": name,
            "built_in": getattr(self.built_in, name),
            "chosen": value,
            "gain": gain,
            "note": note,
            "ratios": ratios,
        }


# ---- decisions ----------------------------------------------------------------------------------


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
    fit = [value for value in ratios if max(ratios[value]) < MARGIN and _mean(ratios[value]) * MARGIN < 1]
    return min(fit, key=lambda value: _mean(ratios[value]), default=built_in)


def settled_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """How the time of one candidate is to that of another, by pairs of one round: what slows a round down is in both.

    Returns:
        The median of the ratios; 1 when less than three quarters of the rounds agree on which is faster.
    """
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return 1.0 if lower <= 1 <= upper else median


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _powers(first: int, last: int, also: int) -> list[int]:
    """Powers of two times `first` up to `last`, and `also` if it is between them; whole elements."""
    sizes = {first << i for i in range((last // first).bit_length())}
    return sorted(sizes | ({also // _ITEM * _ITEM} if first <= also <= last else set()))


def _pages(size: int) -> mmap.mmap:
    """Zeroed memory whose pages are there."""
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size, mmap.PAGESIZE):
        made[at] = 0
    return made
