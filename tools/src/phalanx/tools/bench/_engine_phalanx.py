"""Phalanx through its C functions, on ordinary and on symmetric memory."""

import json
from typing import Any

from phalanx.core import FileStore, World, ffi, lib

from . import _native
from ._engine import Engine, Measured, Request

_WARM_UP, _CALLS = 1000, 10_000


def engine(seat: Any) -> Engine:
    """Make it."""
    return PhalanxEngine(seat)


def address(function: str) -> int:
    """The address of a C function."""
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, function)))


def number(pointer: Any) -> int:
    """The address in a cffi pointer."""
    return int(ffi.cast("uintptr_t", pointer))


class PhalanxEngine(Engine):
    """Variants: "user" and "symmetric", the kind of memory; "list", ordinary memory in blocks that lie apart."""

    def start(self, invitation: str) -> dict[str, str]:
        store = FileStore(f"{self.seat.directory}/phalanx")
        self.world = World(self.seat.rank, self.seat.ranks, store, timeout_ms=120_000)
        self.group = self.world.create_group("benchmark", range(self.seat.ranks))
        build = json.loads(ffi.string(lib.phx_build_info()).decode())
        isa, compiler = str(build.get("isa", "?")), str(build.get("compiler", "?"))
        return {"libphalanx": ffi.string(lib.phx_version()).decode(), "isa": isa, "compiler": compiler}

    def probe(self, what: str, sizes: list[int]) -> dict[str, Any]:
        """What a call costs by itself: an all_reduce of one number in a group that has only this rank.

        Args:
            what: "call".
            sizes: Not used.

        Returns:
            call_ns: samples, each with one reading of the clock in it.
        """
        alone = self.world.create_group(f"alone-{self.seat.rank}", [self.seat.rank])
        measured = self._user(Request("all_reduce", "float32", 1, "user"))
        measured.plan.timed.arguments[0] = number(alone.pointer)
        measured.plan.ranks = 1  # for the check of the result
        measured.plan.rank = 0
        try:
            return {"call_ns": measured.round(0, _WARM_UP, _CALLS, 0)}
        finally:
            measured.close()

    def prepare(self, request: Request) -> Measured:
        measured = self._symmetric(request) if request.variant == "symmetric" else self._user(request)
        measured.plan.barrier = _native.Call.of(address("phx_barrier"), number(self.group.pointer), 0, 0)
        return measured

    def _user(self, request: Request) -> Measured:
        measured = self.with_memory(request)
        plan, group = measured.plan, number(self.group.pointer)
        if request.collective == "barrier":
            plan.timed = _native.Call.of(address("phx_barrier"), group, 0, 0)
            return measured
        given, taken = plan.input or 0, plan.output or 0
        tail = _tail(request)
        if request.variant == "list":
            given, taken = (
                self._blocks(measured, place, request) if blocks > 1 else place
                for place, blocks in zip(
                    (given, taken), _native.blocks(request.collective, self.seat.ranks), strict=True
                )
            )
            function = address(f"phx_{request.collective}_blocks")
            plan.timed = _native.Call.of(function, group, given, taken, _native.DTYPES[request.dtype], *tail)
            return measured
        buffers = (given,) if request.collective == "broadcast" else (given, taken)
        plan.timed = _native.Call.of(
            address(f"phx_{request.collective}"), group, *buffers, request.count, _native.DTYPES[request.dtype], *tail
        )
        return measured

    def _blocks(self, measured: Measured, first: int, request: Request) -> int:
        """The address of a list of blocks."""
        listed = ffi.new(
            "phx_block[]", [(ffi.cast("void *", first + at), request.count, 0, 0) for at in self.places(request)]
        )
        measured.keep.append(listed)
        return number(listed)

    def _symmetric(self, request: Request) -> Measured:
        given, taken = self.sizes(request)
        block = self.world.alloc(max(given, 64))
        symm = self.group.rendezvous(block)
        plan = self.plan(request)
        plan.input = plan.output = symm.buffer_ptrs[self.seat.rank]
        made = 0
        if request.collective == "barrier":
            plan.timed = _native.Call.of(address("phx_symm_barrier"), number(symm.pointer), 0, 0)
        else:
            output: tuple[int, ...] = ()
            if request.collective not in ("all_reduce", "broadcast"):
                plan.output = made = self.native.alloc(taken)
            if request.collective != "broadcast":
                output = (int(plan.output),)
            plan.timed = _native.Call.of(
                address(f"phx_symm_{request.collective}"),
                number(symm.pointer),
                0,
                *output,
                request.count,
                _native.DTYPES[request.dtype],
                *_tail(request),
            )

        def close() -> None:
            self.group.barrier()  # nobody may still read this block
            measured.keep.clear()
            if made:
                self.native.free(made, taken)

        measured = Measured(self.native, plan, close)
        measured.keep = [block, symm]
        return measured

    def end(self) -> None:
        self.group.barrier()
        self.world.finalize()


def _tail(request: Request) -> tuple[int, ...]:
    """What follows the dtype: op or root, options, work."""
    middle = {"all_reduce": (lib.PHX_OP_SUM,), "reduce_scatter": (lib.PHX_OP_SUM,), "broadcast": (0,)}
    return (*middle.get(request.collective, ()), 0, 0)
