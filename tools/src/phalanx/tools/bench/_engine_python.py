"""The Python API of Phalanx: phalanx.collectives, torch.ops.phalanx, phalanx.core. all_reduce only."""

import importlib
from collections.abc import Callable
from typing import Any

from phalanx.core import FileStore, ReduceOp, World, ffi, lib, load_torch_ops

from . import _native
from ._engine import Engine, Measured, MeasuredInPython, Request
from ._engine_gloo import GlooEngine, tensor_at


def engine(seat: Any) -> Engine:
    """Make it."""
    return PythonEngine(seat)


class PythonEngine(GlooEngine):
    """Variants: the keys of `_ways`. It needs torch.distributed, because phalanx.collectives takes its groups."""

    def start(self, invitation: str) -> dict[str, str]:
        versions = super().start(invitation)
        seat = self.seat
        self.world = World(seat.rank, seat.ranks, FileStore(f"{seat.directory}/phalanx-python"), timeout_ms=120_000)
        self.group = self.world.create_group("benchmark", range(seat.ranks))
        self.ops = load_torch_ops()
        self.ops.check(self.ops.lib.phxt_group_add(self.ops.lib.phxt_context(), b"benchmark", self.group.pointer))
        return {"libphalanx": ffi.string(lib.phx_version()).decode()} | versions

    def prepare(self, request: Request) -> Measured:
        if request.collective != "all_reduce":
            raise _native.UnsupportedError("at the level of Python only all_reduce is measured")
        measured = self.with_memory(request, False, MeasuredInPython)
        assert isinstance(measured, MeasuredInPython)
        plan = measured.plan
        given, taken = self.sizes(request)
        buffer = tensor_at(self.torch, plan.input, given, request.dtype)
        output = tensor_at(self.torch, plan.output, taken, request.dtype)
        measured.barrier = self.group.barrier
        measured.call = self._ways(buffer, output)[request.variant]
        return measured

    def _ways(self, buffer: Any, output: Any) -> dict[str, Callable[[], Any]]:
        collectives = importlib.import_module("phalanx.collectives")
        ops, world = self.torch.ops.phalanx, self.dist.group.WORLD
        group, count = self.group, buffer.numel()
        given, taken = ffi.cast("void *", buffer.data_ptr()), ffi.cast("void *", output.data_ptr())
        name = str(buffer.dtype).removeprefix("torch.")
        pointer, dtype, total = group.pointer, _native.DTYPES[name], int(ReduceOp.SUM)

        def functional() -> Any:
            return collectives.wait_tensor(collectives.all_reduce(buffer, "sum", world))

        def functional_in_place() -> Any:
            return collectives.all_reduce_(buffer, "sum", world)

        def op() -> Any:
            return ops.wait_tensor(ops.all_reduce(buffer, "sum", "benchmark"))

        def op_in_place() -> Any:
            ops.all_reduce_(buffer, "sum", "benchmark")
            ops.wait_tensor(buffer)
            return buffer

        def blocking_op() -> Any:
            return ops.blocking_all_reduce(buffer, "sum", "benchmark")

        def blocking_op_in_place() -> Any:
            ops.blocking_all_reduce_(buffer, "sum", "benchmark")
            return buffer

        def core_method() -> Any:
            group.all_reduce(buffer.data_ptr(), output.data_ptr(), count, name)
            return output

        def c_call() -> Any:
            if lib.phx_all_reduce(pointer, given, taken, count, dtype, total, ffi.NULL, ffi.NULL):
                raise RuntimeError(ffi.string(lib.phx_last_error()).decode())
            return output

        return {
            "phalanx.collectives.all_reduce": functional,
            "phalanx.collectives.all_reduce_": functional_in_place,
            "torch.ops.phalanx.all_reduce": op,
            "torch.ops.phalanx.all_reduce_": op_in_place,
            "torch.ops.phalanx.blocking_all_reduce": blocking_op,
            "torch.ops.phalanx.blocking_all_reduce_": blocking_op_in_place,
            "phalanx.core Group.all_reduce": core_method,
            "phx_all_reduce (C, by cffi)": c_call,
        }

    def end(self) -> None:
        self.group.barrier()
        self.ops.check(self.ops.lib.phxt_group_remove(self.ops.lib.phxt_context(), b"benchmark"))
        self.world.finalize()
        super().end()
