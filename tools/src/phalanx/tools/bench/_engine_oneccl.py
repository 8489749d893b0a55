"""oneCCL through its C API, which looks like NCCL's. On CPU its calls return when they are complete."""

import base64
import ctypes
from pathlib import Path
from typing import Any

from . import _native
from ._engine import Engine, Measured, Request

# oneapi/ccl/v2/types.h of 2022.1
_ID_BYTES = 4096
_DTYPES = {"float32": 7, "bfloat16": 9}
_SUM = 0


class _Id(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * _ID_BYTES),)


def engine(seat: Any) -> Engine:
    """Make it."""
    return OneCclEngine(seat)


class OneCclEngine(Engine):
    """One variant: "user"."""

    def __init__(self, seat: Any) -> None:
        super().__init__(seat)
        self.lib = ctypes.CDLL(str(Path(seat.files, "libccl.so.2")), mode=ctypes.RTLD_GLOBAL)

    def invite(self) -> str:
        made = _Id()
        self._must(self.lib.onecclGetUniqueId(ctypes.byref(made)), "onecclGetUniqueId")
        return base64.b64encode(bytes(made)).decode()

    def start(self, invitation: str) -> dict[str, str]:
        given = _Id.from_buffer_copy(base64.b64decode(invitation))
        self.comm = ctypes.c_void_p()
        join = self.lib.onecclCommInitRank
        join.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, _Id, ctypes.c_int]
        self._must(join(ctypes.byref(self.comm), self.seat.ranks, given, self.seat.rank), "onecclCommInitRank")
        number = ctypes.c_int()
        self._must(self.lib.onecclGetVersion(ctypes.byref(number)), "onecclGetVersion")
        self.word = self.native.alloc(64)
        return {"oneccl": f"{number.value // 10000}.{number.value // 100 % 100}"}

    def prepare(self, request: Request) -> Measured:
        if request.variant == "list":
            raise _native.UnsupportedError("it has no lists of blocks")
        measured = self.with_memory(request)
        plan, comm, dtype = measured.plan, self.comm.value or 0, _DTYPES[request.dtype]
        given, taken, count = plan.input or 0, plan.output or 0, request.count
        # It has no barrier: the smallest all-reduce is one.
        barrier = self._call("onecclAllReduce", self.word, self.word, 1, _DTYPES["float32"], _SUM, comm, 0)
        plan.barrier = barrier
        match request.collective:
            case "barrier":
                measured.close()
                raise _native.UnsupportedError("it has none")
            case "all_reduce":
                plan.timed = self._call("onecclAllReduce", given, taken, count, dtype, _SUM, comm, 0)
            case "all_gather":
                plan.timed = self._call("onecclAllGather", given, taken, count, dtype, comm, 0)
            case "reduce_scatter":
                plan.timed = self._call("onecclReduceScatter", given, taken, count, dtype, _SUM, comm, 0)
            case "all_to_all":
                plan.timed = self._call("onecclAllToAll", given, taken, count, dtype, comm, 0)
            case "broadcast":
                plan.timed = self._call("onecclBroadcast", given, taken, count, dtype, 0, comm, 0)
        return measured

    def _call(self, function: str, *arguments: int) -> _native.Call:
        where = ctypes.cast(getattr(self.lib, function), ctypes.c_void_p).value
        return _native.Call.of(where or 0, *arguments)

    @staticmethod
    def _must(status: int, what: str) -> None:
        if status != 0:
            raise RuntimeError(f"{what} returned {status}")

    def end(self) -> None:
        self.lib.onecclCommDestroy(self.comm)
