"""The transports of a group, the core and the back end of its process group, and the choice between them."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed import Work

from phalanx.collectives import _call_rows, _p2p_streams, _torch_compat
from phalanx.collectives._cuda import stream_kwargs
from phalanx.collectives._group_state import GroupState
from phalanx.collectives._op_table import Collective
from phalanx.collectives._p2p_streams import Message
from phalanx.collectives._registry import state_named
from phalanx.collectives._work import CoreWork
from phalanx.collectives.profiling import shown
from phalanx.collectives.reductions import check_reduction, element_type
from phalanx.core import ANY_RANK, Group, PeerDeadError, ffi, lib


class _Transport:
    """What serves a group."""

    def __init__(self, state: GroupState) -> None:
        self.state = state


class CoreTransport(_Transport):
    """The core."""

    @property
    def _core(self) -> Group:
        core = self.state.core
        assert core is not None
        return core

    def start(self, collective: Collective, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        """Start a collective on the arguments of its op but the name of the group; what it gives may be pending."""
        started: torch.Tensor = getattr(torch.ops.phalanx, collective.name)(tensor, *args, self.state.op_name)
        return started

    def barrier(self, tensor: torch.Tensor) -> None:
        """Wait on the host until all ranks have come, also for a GPU. Only the device of the tensor counts."""
        if tensor.is_cpu:
            self._core.barrier()
            return
        device = tensor.device
        self._core.barrier(**stream_kwargs(device))
        if torch.cuda.is_current_stream_capturing():
            return  # a barrier of streams, whenever the graph is replayed
        torch.cuda.current_stream(device).synchronize()
        error = self._core.error()
        if error is not None and not isinstance(error, PeerDeadError):  # a later call says so
            raise error

    def memory(self, message: Message) -> torch.Tensor:
        """The memory that the core reads or writes for a message."""
        memory = _call_rows.memory_of(message.tensor, self.state.on_gpus)
        assert memory is not None
        return memory.contiguous() if message.sends else memory

    def post(self, message: Message) -> Work:
        """Send or receive a message, and return at once."""
        memory = self.memory(message)
        if memory.is_cuda:
            return _p2p_streams.put([message._replace(tensor=memory)], (message.sends, message.peer))[0]
        code, lanes, _ = element_type(memory.dtype)
        function = lib.phx_send if message.sends else lib.phx_recv
        address = ffi.cast("void *", memory.data_ptr())
        count = memory.numel() * lanes
        begin = partial(function, self._core.pointer, address, count, code, message.peer, message.tag, ffi.NULL)
        title = "send" if message.sends else "recv"
        with shown(title, [memory], [memory], self._core, name=self.state.name, peer=message.peer, message=True):
            work = CoreWork(begin, (memory,), self.state.ranks, is_message=True)
        if not message.sends and not memory.is_inference():
            increment_version(memory)
        return work


class C10dTransport(_Transport):
    """The back end of the process group, by torch.distributed. Its methods do what those of CoreTransport do."""

    def _name(self) -> str:
        """The name by which torch finds the group.

        Raises:
            ValueError: The group was registered by a name that now means another one.
        """
        state = self.state
        if state.op_name != state.name and state_named(state.name) is not state:
            raise ValueError(
                f"group '{state.name}': the name '{state.name}' means another process group now, and torch has no "
                "other name for this one; register it again, under a name of its own"
            )
        return state.name

    def _process_group(self) -> dist.ProcessGroup:
        group = _torch_compat.group_named(self._name())
        assert group is not None
        return group

    def start(self, collective: Collective, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        tensor, name = tensor.contiguous(), self._name()
        if collective.reduces:
            args = check_reduction(collective.name, args[0]), *args[1:]
        if collective.through_torch is not None:
            return collective.through_torch(self.state, tensor, *args)
        started: torch.Tensor = getattr(torch.ops._c10d_functional, collective.torch_name)(tensor, *args, name)
        return started

    def barrier(self, tensor: torch.Tensor) -> None:
        group, device = self._process_group(), tensor.device
        options = dist.BarrierOptions()
        options.asyncOp = False
        if f"{device.type}:" not in dist.get_backend_config(group):
            dist.barrier(group)  # such as nccl alone, and no tensor given
            return
        options.device = device  # torch makes a tensor there, and dispatches by it
        work = group.barrier(options)
        if work is not None:
            work.wait()

    def post(self, message: Message) -> Work:
        group = self._process_group()
        if message.sends:
            work = dist.isend(message.tensor.contiguous(), group=group, tag=message.tag, group_dst=message.peer)
        else:
            source = None if message.peer == ANY_RANK else message.peer
            work = dist.irecv(message.tensor, group=group, tag=message.tag, group_src=source)
        assert work is not None
        return work


Transport = CoreTransport | C10dTransport


def transport_for(state: GroupState, tensor: torch.Tensor, *, by_address: bool = False) -> Transport:
    """The transport of a group for a tensor. The ranks have met; before that, a CPU tensor counts as the core's.

    With `by_address`, the core would be given the memory of the tensor, as for messages, and not the tensor.
    """
    served = state.serves(tensor) and (not by_address or _call_rows.memory_of(tensor, state.on_gpus) is not None)
    return CoreTransport(state) if served else C10dTransport(state)
