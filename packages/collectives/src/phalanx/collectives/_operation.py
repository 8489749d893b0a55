"""How a collective is called in eager mode: on the fast path, through the dispatcher, or recorded by a manager."""

from typing import Any

import torch

from phalanx.collectives import _autograd, _recording
from phalanx.collectives._async_tensor import AsyncCollectiveTensor, wrap
from phalanx.collectives._fast_path import FastPath
from phalanx.collectives._group_state import GroupState
from phalanx.collectives._library import wait
from phalanx.collectives._op_table import Collective
from phalanx.collectives._process_group import ensure_initialized
from phalanx.collectives._torch_compat import is_tracing, is_watched
from phalanx.collectives._transport import transport_for


class Operation(FastPath):
    """A collective that makes a new tensor: `fast` on the fast path, and `start` where that is closed."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(collective.name)
        self.collective = collective
        self.function = _autograd.FUNCTIONS[collective.name]

    def start(self, group: GroupState, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        """Check it, start it through the dispatcher, and wrap its result. In a coalescing manager, record it.

        The arguments are those of the op but the group's size and name. The ranks of the group meet here.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{self.collective.function}: expected a torch.Tensor as `self`, not {type(tensor).__name__}"
            )
        self.collective.check(group, tensor, *args)
        ensure_initialized(group, tensor)
        if self.collective.takes_size:
            args = (*args, group.size)
        if torch.is_grad_enabled() and tensor.requires_grad and not is_tracing():
            result: torch.Tensor = self.function.apply(
                lambda given, *inner: self._wrapped(group, given, *inner[:-1]), (*args, group.op_name), tensor
            )
            return result
        return self._wrapped(group, tensor, *args)

    def begin(self, group: GroupState, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        """`fast` where that is open, or `start`, of a collective whose kernel takes its arguments for checked."""
        self.collective.check(group, tensor, *args)
        started = self.fast(tensor, *args, group.op_name) if group.fast_path else None
        return self.start(group, tensor, *args) if started is None else started

    def begin_by_rows(self, group: GroupState, tensor: torch.Tensor, *args: Any) -> torch.Tensor | None:
        """The same of even parts along a dim other than 0, if the core reads and writes them where they lie.

        None: that is not for this tensor or group, or is not to be seen in a graph.
        """
        started = self.fast(tensor, *args, group.op_name) if group.fast_path else None
        if started is not None or is_tracing() or _recording.recorder_on(group) is not None:
            return started
        ensure_initialized(group, tensor)
        return self.start(group, tensor, *args) if tensor.is_cpu and group.serves(tensor) else None

    def _wrapped(self, group: GroupState, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        recorder = _recording.recorder_on(group)
        if recorder is not None and not is_tracing():
            recorded: torch.Tensor = recorder.record(self.collective, tensor, *args)
            return recorded
        if is_watched():  # what watches sees the op of phalanx, whoever serves it
            started = getattr(torch.ops.phalanx, self.collective.name)(tensor, *args, group.op_name)
        else:
            started = transport_for(group, tensor).start(self.collective, tensor, *args)
        if is_tracing() or type(started) is not torch.Tensor:
            return wait(started)
        return wrap(started)


class InPlaceOperation(FastPath):
    """A collective in place: `fast` on the fast path, and `start` where that is closed."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(f"{collective.name}_")
        self.collective = collective

    def start(self, group: GroupState, tensor: torch.Tensor, argument: Any) -> torch.Tensor:
        """Check it, and run it through the dispatcher. In a coalescing manager, record it."""
        recorder = _recording.recorder_on(group)
        if recorder is not None and group.decided and type(tensor) is torch.Tensor and not is_watched():
            self.collective.check(group, tensor, argument)
            recorder.write(self.collective, tensor, argument)
            return tensor
        target = tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
        if not isinstance(target, torch.Tensor):
            raise TypeError(f"{self.collective.name}_: expected a torch.Tensor as `self`, not {type(target).__name__}")
        self.collective.check(group, target, argument)
        ensure_initialized(group, target)
        if recorder is not None and not is_tracing():
            recorder.write(self.collective, target, argument)
            return tensor
        getattr(torch.ops.phalanx, f"{self.collective.name}_")(target, argument, group.op_name)
        torch.ops.phalanx.wait_tensor(target)
        return tensor
