"""MPICH, Open MPI and Intel MPI: the C functions of the library that mpi4py loaded."""

import contextlib
import ctypes
import importlib
import re
from pathlib import Path
from typing import Any

from . import _native
from ._engine import Engine, Measured, Request


def engine(seat: Any) -> Engine:
    """Make it."""
    return MpiEngine(seat)


def loaded_library() -> str:
    """Path of the libmpi of this process."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if re.fullmatch(r"libmpi\.so(\.\d+)*", path.rpartition("/")[2]):
                return path
    raise RuntimeError("mpi4py has loaded no libmpi.so")


class MpiEngine(Engine):
    """Variants: "user", and "list" for blocks that lie apart."""

    def start(self, invitation: str) -> dict[str, str]:
        self.mpi = importlib.import_module("mpi4py.MPI")  # calls MPI_Init_thread
        self.lib = ctypes.CDLL(loaded_library())
        if self.mpi.COMM_WORLD.Get_size() != self.seat.ranks or self.mpi.COMM_WORLD.Get_rank() != self.seat.rank:
            raise RuntimeError("the ranks did not find each other: mpi4py does not fit the launcher")
        # The first word with digits and dots: other parts of the text name hosts and directories.
        found = re.search(r"\d+(\.\d+)+", self.mpi.Get_library_version())
        version = importlib.import_module("mpi4py").__version__
        return {self.seat.participant: found.group() if found else "?", "mpi4py": version}

    def prepare(self, request: Request) -> Measured:
        mpi = self.mpi
        comm, total = self._handle(mpi.COMM_WORLD), self._handle(mpi.SUM)
        dtype = self._dtype(request)
        measured = self.with_memory(request)
        plan = measured.plan
        given, taken, count = plan.input or 0, plan.output or 0, request.count
        barrier = self._call("MPI_Barrier", comm)
        plan.barrier = barrier
        if request.variant == "list":
            plan.timed = self._list(measured, request, dtype, comm)
            return measured
        match request.collective:
            case "barrier":
                plan.timed = barrier
            case "all_reduce":
                plan.timed = self._call("MPI_Allreduce", given, taken, count, dtype, total, comm)
            case "all_gather":
                plan.timed = self._call("MPI_Allgather", given, count, dtype, taken, count, dtype, comm)
            case "reduce_scatter":
                plan.timed = self._call("MPI_Reduce_scatter_block", given, taken, count, dtype, total, comm)
            case "all_to_all":
                plan.timed = self._call("MPI_Alltoall", given, count, dtype, taken, count, dtype, comm)
            case "broadcast":
                plan.timed = self._call("MPI_Bcast", given, count, dtype, 0, comm)
        return measured

    def _list(self, measured: Measured, request: Request, dtype: int, comm: int) -> _native.Call:
        ranks, places = self.seat.ranks, self.places(request)
        given, taken = measured.plan.input or 0, measured.plan.output or 0
        counts, starts = (ctypes.c_int * ranks)(*[request.count] * ranks), (ctypes.c_int * ranks)(*places)
        if request.collective == "all_gather":
            size = _native.DTYPE_BYTES[request.dtype]
            starts = (ctypes.c_int * ranks)(*(at // size for at in places))
            measured.keep = [counts, starts]
            where = [ctypes.addressof(one) for one in measured.keep]
            return self._call("MPI_Allgatherv", given, request.count, dtype, taken, *where, dtype, comm)
        if request.collective != "all_to_all":
            measured.close()
            raise _native.UnsupportedError(f"MPI has no {request.collective} with lists of blocks")
        handle = ctypes.c_int if self.mpi._sizeof(self.mpi.FLOAT) == ctypes.sizeof(ctypes.c_int) else ctypes.c_void_p
        measured.keep = [counts, starts, (handle * ranks)(*[dtype] * ranks)]
        where = [ctypes.addressof(one) for one in measured.keep]
        return self._call("MPI_Alltoallw", given, *where, taken, *where, comm)

    def _dtype(self, request: Request) -> int:
        if request.dtype == "float32":
            return self._handle(self.mpi.FLOAT)
        if request.collective not in ("all_reduce", "reduce_scatter"):
            return self._handle(self.mpi.UINT16_T)  # nothing is added: any 16 bits will do
        bfloat16 = getattr(self.mpi, "BFLOAT16_T", self.mpi.DATATYPE_NULL)
        if bfloat16 != self.mpi.DATATYPE_NULL:
            return self._handle(bfloat16)
        # MPICH has one of its own, which mpi4py does not know.
        with contextlib.suppress(OSError):
            header = Path(self.seat.files).with_name("include").joinpath("mpi.h").read_text(encoding="utf-8")
            if found := re.search(r"#define MPIX_BFLOAT16\s+\(\(MPI_Datatype\)(0x[0-9a-f]+)\)", header):
                return int(found.group(1), 16)
        raise _native.UnsupportedError("this MPI has no bfloat16")

    def _handle(self, thing: Any) -> int:
        """As C passes it: an int in the ABI of MPICH, a pointer in that of Open MPI."""
        return int(self.mpi._handleof(thing))

    def _call(self, function: str, *arguments: int) -> _native.Call:
        where = ctypes.cast(getattr(self.lib, function), ctypes.c_void_p).value
        return _native.Call.of(where or 0, *arguments)

    def end(self) -> None:
        self.mpi.Finalize()
