"""What a library must offer to be measured. Runs inside the ranks."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import _native


@dataclass(frozen=True)
class Seat:
    """Where a rank sits.

    Attributes:
        participant: Name of the library that is measured.
        rank: Of this process.
        ranks: How many there are.
        directory: Where ranks may leave files to find each other.
        level: "c" or "python".
        library: Path of libphalanx_bench.so.
        share: Inherited file descriptor of memory for all ranks, or -1.
        cores: How many the ranks are pinned to.
        files: Further paths that this participant needs.
    """

    participant: str
    rank: int
    ranks: int
    directory: str
    level: str
    library: str
    share: int = -1
    cores: int = 1
    files: str = ""


@dataclass(frozen=True)
class Request:
    """One collective in one way.

    Attributes:
        collective: "all_reduce", ...
        dtype: "float32" or "bfloat16".
        count: Elements of one block.
        variant: Which of the library's ways.
    """

    collective: str
    dtype: str
    count: int
    variant: str


class Measured:
    """A collective that is ready to be called: its plan, and its memory until `close`."""

    def __init__(self, native: _native.Library, plan: _native.Plan, close: Callable[[], None]) -> None:
        self.native = native
        self.plan = plan
        self.close = close
        self.keep: list[Any] = []  # what the plan points to

    def round(self, iteration: int, warm_up: int, calls: int, flags: int) -> list[int]:
        """Nanoseconds of each call."""
        return self.native.round(self.plan, iteration, warm_up, calls, flags)


class MeasuredInPython(Measured):
    """The same for ways that only Python can call."""

    barrier: Callable[[], Any]
    call: Callable[[], Any]

    def round(self, iteration: int, warm_up: int, calls: int, flags: int) -> list[int]:
        return self.native.python_round(self.plan, iteration, warm_up, calls, flags, self.barrier, self.call)


class Engine:
    """One library in one rank. The steps come in this order, the same on all ranks."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.native = _native.Library(seat.library)

    def invite(self) -> str:
        """On rank 0, before start: a text that all ranks get."""
        return ""

    def start(self, invitation: str) -> dict[str, str]:
        """Meet the other ranks.

        Returns:
            Versions of what is measured.
        """
        raise NotImplementedError

    def prepare(self, request: Request) -> Measured:
        """Make memory and arguments for a collective.

        Raises:
            UnsupportedError: The library cannot do it; the text says why.
        """
        raise NotImplementedError

    def probe(self, what: str, sizes: list[int]) -> dict[str, Any]:
        """What this library can tell in addition to times: see the engines that have one."""
        raise NotImplementedError

    def end(self) -> None:
        """Leave."""

    # ---- for the engines ---------------------------------------------------------------------------------------------

    def plan(self, request: Request) -> _native.Plan:
        """A plan without memory and calls."""
        plan = _native.Plan()
        plan.struct_size = ctypes.sizeof(plan)
        plan.collective = _native.COLLECTIVES[request.collective]
        plan.dtype = _native.DTYPES[request.dtype]
        plan.rank, plan.ranks, plan.root = self.seat.rank, self.seat.ranks, 0
        plan.count = request.count
        plan.gap = self.gap(request)
        return plan

    def sizes(self, request: Request) -> tuple[int, int]:
        """Bytes of input and output of this rank."""
        block = (request.count + self.gap(request)) * _native.DTYPE_BYTES[request.dtype]
        given, taken = _native.blocks(request.collective, self.seat.ranks)
        return given * block, taken * block

    def gap(self, request: Request) -> int:
        """Elements between two blocks."""
        return _native.GAP_BYTES // _native.DTYPE_BYTES[request.dtype] if request.variant == "list" else 0

    def places(self, request: Request) -> list[int]:
        """For each rank, where the block for or from it begins, in bytes."""
        return [
            rank * (request.count + self.gap(request)) * _native.DTYPE_BYTES[request.dtype]
            for rank in range(self.seat.ranks)
        ]

    def with_memory(self, request: Request, in_place: bool = False, kind: type[Measured] = Measured) -> Measured:
        """A plan with ordinary memory. A broadcast is in place always."""
        plan = self.plan(request)
        given, taken = self.sizes(request)
        plan.input = self.native.alloc(given)
        if in_place or request.collective == "broadcast":
            plan.output = plan.input
        else:
            plan.output = self.native.alloc(taken)
        first, second = int(plan.input), int(plan.output)

        def close() -> None:
            self.native.free(first, given)
            if second != first:
                self.native.free(second, taken)

        return kind(self.native, plan, close)
