"""Measures what the machine allows between its cores: see core/bench/probe.cpp."""

import ctypes
import mmap
import os
from typing import Any

from . import _native
from ._engine import Engine

_LATENCY_REPEATS = 2000
_SAMPLES = 5


def engine(seat: Any) -> Engine:
    """Make it."""
    return LimitsEngine(seat)


class LimitsEngine(Engine):
    """No library: it has no collective."""

    def start(self, invitation: str) -> dict[str, str]:
        seat = self.seat
        # As many ranks move bytes as have a core of their own; all of them meet in the barrier.
        self.movers = min(seat.ranks, seat.cores)
        # Each of the two kinds of probe has flags of its own, because barriers count.
        self.offset = self.native.lib.phxb_probe_bytes(0)
        size = self.offset + self.native.lib.phxb_probe_bytes(self.movers)
        os.ftruncate(seat.share, size)
        self.memory = mmap.mmap(seat.share, size)
        self.view = ctypes.c_char.from_buffer(self.memory)
        return {}

    def _probe(self, ranks: int, offset: int) -> Any:
        probe = _native.Probe(ctypes.sizeof(_native.Probe), self.seat.rank, ranks)
        probe.yields = 1 if ranks > self.seat.cores else 0
        probe.shared = ctypes.addressof(self.view) + offset
        return probe

    def probe(self, sizes: list[int]) -> dict[str, Any]:
        """Measure.

        Args:
            sizes: Bytes to move.

        Returns:
            clock_ns; barrier_ns and barrier_once_ns: samples; and, of ranks that have a core of their own,
            round_trip_ns and moves: for each size one list of times in the order of _native.MOVES.
        """
        lib, rank = self.native.lib, self.seat.rank
        answer: dict[str, Any] = {"clock_ns": lib.phxb_clock_ns(), "round_trip_ns": [], "moves": {}}
        everyone = self._probe(self.seat.ranks, 0)
        for name in ("barrier", "barrier_once"):
            measure = getattr(lib, f"phxb_probe_{name}")
            answer[f"{name}_ns"] = [measure(everyone, _LATENCY_REPEATS) for _ in range(_SAMPLES)]
        return answer if rank >= self.movers else self._moves(sizes, answer)

    def _moves(self, sizes: list[int], answer: dict[str, Any]) -> dict[str, Any]:
        lib = self.native.lib
        movers = self._probe(self.movers, self.offset)
        if self.seat.rank < 2 <= self.movers:
            answer["round_trip_ns"] = [lib.phxb_probe_round_trip(movers, _LATENCY_REPEATS) for _ in range(_SAMPLES)]
        for size in sizes:
            times = (ctypes.c_double * len(_native.MOVES))()
            if lib.phxb_probe_move(movers, size, times) != _native.OK:
                raise MemoryError(f"no memory to move {size} bytes")
            answer["moves"][str(size)] = list(times)
        return answer

    def end(self) -> None:
        del self.view
        self.memory.close()
