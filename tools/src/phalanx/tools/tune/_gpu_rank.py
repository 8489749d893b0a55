"""One rank of `phalanx tune --device cuda`: on the GPU of its number, in turns if there are more ranks than GPUs."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

from phalanx.core import DType, FileStore, GpuTuning, Group, ReduceOp, World, ffi, lib
from phalanx.core.tuning import NEVER
from phalanx.tools.tune._gpu_stream import GpuStream
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
_LINE_RANKS = (
    16  # kLineRanks in core/src/gpu/launch.h: larger groups do not use the protocol that sends data with flags
)
_PACK = 16  # bytes that switches and threads move at once


def main() -> None:
    """Do what the JSON object of the first argument asks for. Rank 0 prints a JSON object."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    begin(given)
    rank, ranks = given["rank"], given["ranks"]
    device = ("cuda", rank % given["gpus"])
    with World(rank, ranks, FileStore(given["store"]), timeout_ms=60_000) as world:
        group = world.create_group("tune", range(ranks))
        stream = GpuStream(device[1])
        # A first collective, with which the group looks into the table.
        group.barrier(device=device, stream=stream.pointer)
        stream.wait()
        present = group.get_gpu_tuning()
        group.set_gpu_tuning(GpuTuning())
        answer: dict[str, Any] = {"present": asdict(present), "built_in": asdict(group.get_gpu_tuning())}
        if given["seconds"] > 0:
            tuner = _Tuner(group, given["seconds"], given["largest"], device, stream)
            answer["findings"] = tuner.run()
            answer["chosen"] = asdict(tuner.tuning)
            if given["save"] and rank == 0:
                group.save_gpu_tuning(given["path"])
        group.barrier()
        stream.close()
    if rank == 0:
        print(json.dumps(answer))


class _Tuner(Measuring[GpuTuning]):
    """Graphs of many calls are what is timed, so that the host's part does not count; without graphs, calls."""

    shares: ClassVar[dict[str, float]] = {
        "line_bytes": 0.2,
        "two_shot_bytes": 0.25,
        "multicast_bytes": 0.15,
        "copy_bytes": 0.15,
        "thread_bytes": 0.25,
    }

    def __init__(self, group: Group, seconds: float, largest: int, device: tuple[str, int], stream: GpuStream) -> None:
        super().__init__(group, seconds, group.get_gpu_tuning())
        self.largest = largest
        self._stream = stream
        self._size = len(group.ranks)
        # Ordinary memory for the collectives of a group, and symmetric memory with room for a gathered result.
        self._memory = [group.world.alloc(largest, device=device) for _ in range(2)]
        self._source, self._out = (ffi.cast("char *", each.address) for each in self._memory)
        self._symm = group.rendezvous(group.world.alloc(2 * largest, device=device))
        # Calls on ordinary memory say on which GPU it is; symmetric memory is known to the core.
        common = {"struct_size": ffi.sizeof("phx_gpu_options"), "stream": ffi.cast("void *", stream.pointer)}
        where = {"device": {"type": lib.PHX_DEVICE_CUDA, "index": device[1]}}
        self._gpu_options = [ffi.new("phx_gpu_options *", common | more) for more in (where, {})]
        self._ordinary, self._symmetric = (call_options(gpu=gpu) for gpu in self._gpu_options)

    def set(self, values: GpuTuning) -> None:
        self.group.set_gpu_tuning(values)

    def prepare(self, call: Call, count: int) -> Callable[[], None]:
        put = super().prepare(call, count)
        put()  # once without a graph: a workspace that has to grow cannot do so while it is captured
        self._stream.wait()
        launch = self._stream.graph(put) or put

        def run() -> None:
            launch()
            self._stream.wait()

        return run

    def run(self) -> list[dict[str, Any]]:
        findings = [self._lines()] if self._size <= _LINE_RANKS else []
        findings.append(self._two_shot())
        if ffi.cast("phx_team *", self._symm.team).multicast != ffi.NULL:
            findings.append(self._gather("multicast_bytes", self._own() + self.largest))
        return [*findings, self._gather("copy_bytes", self._out), self._threads()]

    # ---- the values -----------------------------------------------------------------------------

    def _lines(self) -> dict[str, Any]:
        name, built_in = "line_bytes", self.built_in.line_bytes
        sizes = powers(64, min(built_in, self.largest), built_in)
        times = self.measure(name, sizes, (1, NEVER), self.choose(name), self._all_reduce)
        ratios = {size: settled_ratio(times[size][NEVER], times[size][1]) for size in sizes}
        return self.settle_crossover(name, ratios, crossover_below(ratios, built_in))

    def _two_shot(self) -> dict[str, Any]:
        first = min(max(16 * _KIB, 2 * self.tuning.line_bytes), self.largest)
        sizes = powers(first, self.largest, self.built_in.two_shot_bytes)
        return self._from("two_shot_bytes", sizes, self._all_reduce)

    def _gather(self, name: str, out: Any) -> dict[str, Any]:
        sizes = powers(min(16 * _KIB, self.largest), self.largest, getattr(self.built_in, name))
        return self._from(name, sizes, lambda size, _: self._all_gather(size, out))

    def _from(self, name: str, sizes: list[int], call: Callable[[int, int], Call]) -> dict[str, Any]:
        """A value from which on something is done."""
        times = self.measure(name, sizes, (1, NEVER), self.choose(name), call)
        ratios = {size: settled_ratio(times[size][1], times[size][NEVER]) for size in sizes}
        return self.settle_crossover(name, ratios, crossover_above(ratios, getattr(self.built_in, name)))

    def _threads(self) -> dict[str, Any]:
        sizes = [size for size in (256 * _KIB, _MIB, 8 * _MIB) if size <= self.largest] or [self.largest]
        values = sorted({16, 32, 64, 128, 256, self.built_in.thread_bytes})
        return self.settle_best("thread_bytes", values, sizes, self._all_reduce)

    # ---- what is measured -----------------------------------------------------------------------

    def _own(self) -> Any:
        return ffi.cast("char *", self._symm.buffer_ptrs[self.group.group_rank])

    def _all_reduce(self, size: int, _: int) -> Call:
        pointer, count = self.group.pointer, size // ITEM
        return partial(
            lib.phx_all_reduce,
            *(pointer, self._source, self._out, count, DType.FLOAT32, ReduceOp.SUM, self._ordinary, ffi.NULL),
        )

    def _all_gather(self, size: int, out: Any) -> Call:
        """With a result of about this size, of what lies at the beginning of each rank's symmetric memory."""
        count = max(size // self._size // _PACK, 1) * _PACK // ITEM
        return partial(
            lib.phx_symm_all_gather,
            *(self._symm.pointer, 0, out, count, DType.FLOAT32, self._symmetric, ffi.NULL),
        )
