"""One rank of `phalanx tune` on the CPU."""

import json
import mmap
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

from phalanx.core import Algo, DType, FileStore, Group, ReduceOp, Tuning, World, ffi, lib
from phalanx.tools.tune._measure import (
    ITEM,
    Call,
    Measuring,
    begin,
    call_options,
    crossover_above,
    crossover_below,
    powers,
    settled_ratio,
)

_KIB, _MIB = 1 << 10, 1 << 20
_FEW_RANKS = 4  # up to which push_bytes changes nothing: kFewRanks in core/src/ops/symmetric.cpp
_NEVER = 1 << 40  # a size that no result has


def main() -> None:
    """Do what the JSON object of the first argument asks for. Rank 0 prints a JSON object."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    begin(given)
    rank, ranks = given["rank"], given["ranks"]
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


class _Tuner(Measuring[Tuning]):
    shares: ClassVar[dict[str, float]] = {
        "one_shot_bytes": 0.2,
        "chunk_bytes": 0.3,
        "streaming_bytes": 0.3,
        "push_bytes": 0.2,
    }

    def __init__(self, group: Group, seconds: float, largest: int) -> None:
        super().__init__(group, seconds, group.get_tuning())
        self.largest = largest
        self._memory = [_pages(largest), _pages(largest)]
        self._source, self._out = (ffi.from_buffer("char[]", each) for each in self._memory)
        self._symm = group.rendezvous(group.world.alloc(largest))
        group.set_tuning(replace(self.built_in, chunk_bytes=1 << 30))
        self._slot = group.eager_bytes  # of the staging area: larger chunks change nothing
        group.set_tuning(self.built_in)

    def set(self, values: Tuning) -> None:
        self.group.set_tuning(values)

    def run(self) -> list[dict[str, Any]]:
        findings = [self._one_shot(), self._chunk(), self._streaming()]
        if len(self.group.ranks) > _FEW_RANKS:
            findings.append(self._push())
        return findings

    # ---- the four values ------------------------------------------------------------------------

    def _one_shot(self) -> dict[str, Any]:
        most = min(64 * _KIB, self._slot, self.largest)
        sizes = powers(64, most, self.built_in.one_shot_bytes)
        chosen = {algo: call_options(algo=algo) for algo in (Algo.ONE_SHOT, Algo.TWO_SHOT)}
        times = self.measure(
            "one_shot_bytes",
            sizes,
            tuple(chosen),
            lambda algo: None,
            lambda size, algo: self._all_reduce(size, chosen[Algo(algo)]),
        )
        ratios = {size: settled_ratio(times[size][Algo.ONE_SHOT], times[size][Algo.TWO_SHOT]) for size in sizes}
        return self.settle_crossover("one_shot_bytes", ratios, crossover_below(ratios, self.built_in.one_shot_bytes))

    def _chunk(self) -> dict[str, Any]:
        values = {64 * _KIB, 128 * _KIB, 256 * _KIB, 512 * _KIB, self.built_in.chunk_bytes}
        return self.settle_best(
            "chunk_bytes",
            sorted(value for value in values if value <= max(self._slot, self.built_in.chunk_bytes)),
            self._large(_MIB, 4 * _MIB, 16 * _MIB),
            lambda size, value: self._all_reduce(size, ffi.NULL),
        )

    def _streaming(self) -> dict[str, Any]:
        name, built_in = "streaming_bytes", self.built_in.streaming_bytes
        sizes = powers(min(_MIB, self.largest), self.largest, built_in)
        choose = self.choose(name)
        times = self.measure(name, sizes, (1, _NEVER), choose, lambda size, _: self._all_reduce(size, ffi.NULL))
        ratios = {size: settled_ratio(times[size][1], times[size][_NEVER]) for size in sizes}
        return self.settle_crossover(name, ratios, crossover_above(ratios, built_in))

    def _push(self) -> dict[str, Any]:
        values = {8 * _KIB, 16 * _KIB, 32 * _KIB, 64 * _KIB, 128 * _KIB, self.built_in.push_bytes}
        return self.settle_best(
            "push_bytes",
            sorted(values),
            self._large(256 * _KIB, _MIB, 8 * _MIB),
            lambda size, value: self._all_reduce_in_place(size),
        )

    def _large(self, *sizes: int) -> list[int]:
        return [size for size in sizes if size <= self.largest] or [self.largest]

    # ---- what is measured -----------------------------------------------------------------------

    def _all_reduce(self, size: int, made: Any) -> Call:
        pointer, count = self.group.pointer, size // ITEM
        return partial(
            lib.phx_all_reduce,
            *(pointer, self._source, self._out, count, DType.FLOAT32, ReduceOp.SUM, made, ffi.NULL),
        )

    def _all_reduce_in_place(self, size: int) -> Call:
        own = ffi.cast("void *", self._symm.buffer_ptrs[self.group.group_rank])
        return partial(
            lib.phx_symm_all_reduce,
            *(self._symm.pointer, 0, own, size // ITEM, DType.FLOAT32, ReduceOp.SUM, ffi.NULL, ffi.NULL),
        )


def _pages(size: int) -> mmap.mmap:
    """Zeroed memory whose pages are there."""
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size, mmap.PAGESIZE):
        made[at] = 0
    return made
