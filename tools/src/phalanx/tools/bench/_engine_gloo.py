"""gloo through torch.distributed. There is no C function to call, so the loop calls back into Python."""

import ctypes
import datetime
import importlib
import os
import re
from collections.abc import Callable
from typing import Any

from . import _native
from ._engine import Engine, Measured, MeasuredInPython, Request

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32)


def engine(seat: Any) -> Engine:
    """Make it."""
    return GlooEngine(seat)


def tensor_at(torch: Any, address: int, size: int, dtype: str) -> Any:
    """A tensor on memory that somebody else owns."""
    data = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(data, dtype=getattr(torch, dtype))


class GlooEngine(Engine):
    """Variants: "user" and "list" at the level of C; at that of Python "torch.distributed" and "functional"."""

    def start(self, invitation: str) -> dict[str, str]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.torch = importlib.import_module("torch")
        self.dist = importlib.import_module("torch.distributed")
        self.torch.set_num_threads(1)
        self.dist.init_process_group(
            "gloo",
            init_method=f"file://{self.seat.directory}/{self.seat.participant}",
            rank=self.seat.rank,
            world_size=self.seat.ranks,
            timeout=datetime.timedelta(minutes=5),
        )
        return {"torch": re.split(r"\s", self.torch.__version__)[0]}

    def prepare(self, request: Request) -> Measured:
        python = self.seat.level == "python"
        in_place = request.collective == "all_reduce"  # it has no other
        measured = self.with_memory(request, in_place, MeasuredInPython if python else Measured)
        plan = measured.plan
        try:
            given, taken = self.sizes(request)
            tensors = [
                tensor_at(self.torch, place, size, request.dtype)
                for place, size in ((plan.input, given), (plan.output, taken))
                if size
            ]
            call = self._call(request, *tensors)
            call()  # so that what it cannot do is known now
        except (RuntimeError, ValueError) as error:
            measured.close()
            raise _native.UnsupportedError(str(error).splitlines()[0]) from error
        if isinstance(measured, MeasuredInPython):
            measured.barrier, measured.call = self.dist.barrier, call
        else:
            measured.keep = [_callback(self.dist.barrier), _callback(call)]
            plan.barrier, plan.timed = (
                _native.Call.of(ctypes.cast(function, ctypes.c_void_p).value or 0) for function in measured.keep
            )
        return measured

    def _call(self, request: Request, *tensors: Any) -> Callable[[], Any]:
        dist = self.dist
        if request.collective == "barrier":
            return lambda: dist.barrier()
        given, taken = tensors
        if request.variant == "list":
            return self._list(request, given, taken)
        if request.variant == "functional":
            functional = importlib.import_module("._torch_compat", __package__).functional_collectives
            return lambda: functional.wait_tensor(functional.all_reduce(given, "sum", dist.group.WORLD))

        def call() -> Any:
            match request.collective:
                case "all_reduce":
                    dist.all_reduce(given)
                case "all_gather":
                    dist.all_gather_into_tensor(taken, given)
                case "reduce_scatter":
                    dist.reduce_scatter_tensor(taken, given)
                case "all_to_all":
                    dist.all_to_all_single(taken, given)
                case "broadcast":
                    dist.broadcast(given, 0)
            return taken

        return call

    def _list(self, request: Request, given: Any, taken: Any) -> Callable[[], Any]:
        places = [at // _native.DTYPE_BYTES[request.dtype] for at in self.places(request)]
        ins, outs = ([whole[at : at + request.count] for at in places] for whole in (given, taken))
        match request.collective:
            case "all_gather":
                return lambda: self.dist.all_gather(outs, ins[0])
            case "all_to_all":
                return lambda: self.dist.all_to_all(outs, ins)
            case _:
                return lambda: self.dist.reduce_scatter(outs[0], ins)

    def end(self) -> None:
        self.dist.destroy_process_group()


def _callback(function: Callable[[], Any]) -> Any:
    def call() -> int:
        try:
            function()
        except Exception as error:
            print(error, flush=True)
            return -1
        return 0

    return _CALLBACK(call)
