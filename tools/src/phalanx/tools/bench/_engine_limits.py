"""Measures what the machine allows between its cores: see tools/csrc/probe.cpp."""

import ctypes
import mmap
import os
from typing import Any

from . import _native
from ._engine import Engine

_LATENCY_REPEATS = 2000
_TRIPS = 300
_SAMPLES = 5


def engine(seat: Any) -> Engine:
    """Make it."""
    return LimitsEngine(seat)


class LimitsEngine(Engine):
    """No library: it has no collective."""

    def start(self, invitation: str) -> dict[str, str]:
        seat = self.seat
        size = self.native.lib.phxb_probe_bytes(seat.ranks)
        os.ftruncate(seat.share, size)
        self.memory = mmap.mmap(seat.share, size)
        self.view = ctypes.c_char.from_buffer(self.memory)
        self.everyone = _native.Probe(ctypes.sizeof(_native.Probe), seat.rank, seat.ranks)
        self.everyone.cores = seat.cores if seat.ranks > seat.cores else 0
        self.everyone.shared = ctypes.addressof(self.view)
        return {}

    def probe(self, what: str, sizes: list[int]) -> dict[str, Any]:
        """Measure.

        Args:
            what: "round_trip", "latency" or "moves".
            sizes: Bytes to move.

        Returns:
            round_trip: round_trip_ns, of the first two ranks if these have a core each. latency: clock_ns, barrier_ns
            and barrier_once_ns. All are lists of samples. moves: for each size one list of times in the order of
            _native.MOVES.
        """
        lib = self.native.lib
        if what == "round_trip":
            apart = self.seat.rank < 2 <= min(self.seat.ranks, self.seat.cores)
            trip = lib.phxb_probe_round_trip
            return {"round_trip_ns": [trip(self.everyone, _TRIPS) for _ in range(_SAMPLES)] if apart else []}
        if what == "latency":
            once = [lib.phxb_probe_barrier_once(self.everyone, _LATENCY_REPEATS) for _ in range(_SAMPLES)]
            many = [lib.phxb_probe_barrier(self.everyone, _LATENCY_REPEATS) for _ in range(_SAMPLES)]
            return {"clock_ns": [lib.phxb_clock_ns()], "barrier_ns": many, "barrier_once_ns": once}
        moves = {}
        for size in sizes:
            times = (ctypes.c_double * len(_native.MOVES))()
            if lib.phxb_probe_move(self.everyone, size, times) != _native.OK:
                raise MemoryError(f"no memory to move {size} bytes")
            moves[str(size)] = list(times)
        return {"moves": moves}

    def end(self) -> None:
        del self.view
        self.memory.close()
