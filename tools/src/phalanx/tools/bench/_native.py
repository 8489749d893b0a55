"""libphalanx_bench.so, by ctypes: see tools/csrc/phalanx_bench.h. Used inside the ranks, so it imports no Phalanx."""

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLLECTIVES = {
    "all_reduce": 1,
    "all_gather": 2,
    "reduce_scatter": 3,
    "all_to_all": 4,
    "broadcast": 5,
    "barrier": 6,
}
DTYPES = {"bfloat16": 2, "float32": 3}  # the numbers of phalanx.h
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
MAX_ARGUMENTS = 10
LISTS = ("all_gather", "reduce_scatter", "all_to_all")  # what has a form with lists of blocks
GAP_BYTES = 4096 + 64  # between two blocks of a list
MAX_RANKS = 64
CORRUPT = 1
OK, BAD_PLAN, CALL_FAILED, WRONG_RESULT = 0, -1, -2, -3
MOVES = ("stage", "pull_staged", "reduce_staged", "pull", "reduce", "exchange", "copy")
PROBE_MAX = 64 << 20


class WrongResultError(RuntimeError):
    """A collective gave something else than it must."""


class UnsupportedError(RuntimeError):
    """The library cannot do this collective on this dtype or in this way."""


class Call(ctypes.Structure):
    """A function and its arguments. Arguments are integers, addresses among them."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_uint64 * MAX_ARGUMENTS))

    @classmethod
    def of(cls, function: int, *arguments: int) -> "Call":
        """A call of the function at an address."""
        words = [argument & 0xFFFFFFFFFFFFFFFF for argument in arguments]
        return cls(function, (ctypes.c_uint64 * MAX_ARGUMENTS)(*words))


class Plan(ctypes.Structure):
    """phxb_plan."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("collective", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("ranks", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("warm_up", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("gap", ctypes.c_uint32),
        ("count", ctypes.c_uint64),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("barrier", Call),
        ("timed", Call),
    )


class Failure(ctypes.Structure):
    """phxb_failure."""

    _fields_ = (
        ("result", ctypes.c_int32),
        ("call", ctypes.c_uint32),
        ("index", ctypes.c_uint64),
        ("expected", ctypes.c_double),
        ("seen", ctypes.c_double),
    )


class Probe(ctypes.Structure):
    """phxb_probe."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("ranks", ctypes.c_int32),
        ("cores", ctypes.c_int32),
        ("shared", ctypes.c_void_p),
    )


def library_path() -> Path:
    """Find libphalanx_bench.so, which is installed next to this file.

    Raises:
        FileNotFoundError: It is not there.
    """
    folders = sys.modules[__package__].__path__  # in an editable install more than one
    for folder in folders:
        if (path := Path(folder, "libphalanx_bench.so")).is_file():
            return path
    raise FileNotFoundError(f"libphalanx_bench.so is missing in {', '.join(folders)}: reinstall phalanx-tools")


class Library:
    """The functions of libphalanx_bench.so.

    Args:
        path: Of the file.
    """

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        pointer, size, u64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
        plan, failure, probe = ctypes.POINTER(Plan), ctypes.POINTER(Failure), ctypes.POINTER(Probe)
        for name, result, arguments in (
            ("phxb_round", ctypes.c_int32, [plan, u64, ctypes.POINTER(u64), failure]),
            ("phxb_fill", ctypes.c_int32, [plan, u64]),
            ("phxb_check", ctypes.c_int32, [plan, u64, failure]),
            ("phxb_alloc", pointer, [size]),
            ("phxb_free", None, [pointer, size]),
            ("phxb_clock_ns", ctypes.c_double, []),
            ("phxb_probe_bytes", size, [ctypes.c_int32]),
            ("phxb_probe_round_trip", ctypes.c_double, [probe, ctypes.c_uint32]),
            ("phxb_probe_barrier", ctypes.c_double, [probe, ctypes.c_uint32]),
            ("phxb_probe_barrier_once", ctypes.c_double, [probe, ctypes.c_uint32]),
            ("phxb_probe_move", ctypes.c_int32, [probe, size, ctypes.POINTER(ctypes.c_double)]),
        ):
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, arguments

    def alloc(self, size: int) -> int:
        """Address of memory whose pages are all there.

        Raises:
            MemoryError: There is not enough.
        """
        address = self.lib.phxb_alloc(max(size, 64))
        if not address:
            raise MemoryError(f"no memory for {size} bytes")
        return int(address)

    def free(self, address: int, size: int) -> None:
        """Free what alloc gave."""
        self.lib.phxb_free(address, max(size, 64))

    def round(self, plan: Plan, iteration: int, warm_up: int, calls: int, flags: int) -> list[int]:
        """One round of a plan.

        Returns:
            Nanoseconds of each call that counts.

        Raises:
            WrongResultError: The last result is wrong.
            RuntimeError: A call failed.
        """
        plan.warm_up, plan.calls, plan.flags = warm_up, calls, flags
        times = (ctypes.c_uint64 * calls)()
        failure = Failure()
        self._judge(self.lib.phxb_round(plan, iteration, times, failure), failure)
        return list(times)

    def python_round(
        self,
        plan: Plan,
        iteration: int,
        warm_up: int,
        calls: int,
        flags: int,
        barrier: Callable[[], Any],
        call: Callable[[], Any],
    ) -> list[int]:
        """The same for a way that only Python can call: the clock is Python's.

        Args:
            barrier: Called before and after each timed call.
            call: Returns the tensor with the result.
        """
        times = []
        result = None
        for index in range(warm_up + calls):
            self.lib.phxb_fill(plan, iteration + index)
            barrier()
            started = time.perf_counter_ns()
            result = call()
            times.append(time.perf_counter_ns() - started)
            barrier()
        failure = Failure()
        plan.output = result.data_ptr() if result is not None else plan.output
        if flags & CORRUPT:
            ctypes.c_uint8.from_address(plan.output).value ^= 0x40
        self._judge(self.lib.phxb_check(plan, iteration + warm_up + calls - 1, failure), failure)
        return times[warm_up:]

    @staticmethod
    def _judge(status: int, failure: Failure) -> None:
        if status == WRONG_RESULT:
            raise WrongResultError(
                f"wrong result: element {failure.index} is {failure.seen:g} and should be {failure.expected:g}"
            )
        if status == CALL_FAILED:
            raise RuntimeError(f"call {failure.call} returned {failure.result}")
        if status != OK:
            raise RuntimeError("the plan of the benchmark is wrong (a defect of phalanx bench)")


def blocks(collective: str, ranks: int) -> tuple[int, int]:
    """How many blocks of `count` elements the input and the output of a rank have."""
    if collective == "barrier":
        return 0, 0
    return (
        ranks if collective in ("reduce_scatter", "all_to_all") else 1,
        ranks if collective in ("all_gather", "all_to_all") else 1,
    )
