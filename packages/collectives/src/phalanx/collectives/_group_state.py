"""A group as its rank sees it: whether the core serves it, and what belongs to it. _registry.py has all of them."""

import contextlib
import logging
import os
import threading
from typing import Any

import torch

from phalanx.collectives import _cuda, _library
from phalanx.core import AlreadyExistsError, Group, NotFoundError, UnsupportedError

log = logging.getLogger("phalanx.collectives")

_CUDA = 2  # PHX_DEVICE_CUDA

_registered: "dict[tuple[int, str], GroupState]" = {}  # what the native ops know, by context and name


def tell(name: str, group_rank: int, what: str) -> None:
    """Log a fact that all ranks of a group know: only the first rank warns, so that a job logs one line."""
    log.log(logging.INFO if group_rank else logging.WARNING, "group '%s': %s", name, what)


class GroupState:
    """A group as its rank sees it."""

    def __init__(self, name: str, group_rank: int, ranks: tuple[int, ...]) -> None:
        self.name = name  # the same on all its ranks
        self.op_name = name  # by which the native ops find it
        self.size = len(ranks)
        self.group_rank = group_rank
        self.ranks = ranks  # global ranks, in order
        self.core: Group | None = None  # None: torch.distributed serves it, or that is not decided yet
        # Whether ops may be called past the dispatcher: the core serves the group, and no coalescing manager is open.
        self.fast_path = False
        self.decided = False  # whether the ranks have met
        self.on_gpus = False  # whether the core serves tensors of GPUs, too
        self.decided_on_gpus = False
        self.side_streams = _cuda.SideStreams()  # for messages of GPUs
        self._context = 0
        self._pid = os.getpid()
        self._deciding = threading.Lock()
        self._managers = 0

    def decide(self) -> None:
        """Find out whether the core serves the group. Collective among its ranks the first time.

        Raises:
            WaitTimeoutError: Ranks did not come in time; the text names them. It may be tried again.
            PhalanxError: The ranks could not meet. Every later call raises too.
        """

    def serves(self, tensor: torch.Tensor) -> bool:
        """Whether the core serves collectives of this tensor; before the ranks have met, whether it may."""
        if tensor.is_cpu:
            return self.core is not None or not self.decided
        return tensor.is_cuda and self.on_gpus

    def count_managers(self, change: int) -> None:
        """Count the coalescing managers that are open on the group, on any thread: while one is, calls are recorded."""
        with self._deciding:
            self._managers += change
            self.fast_path = self.core is not None and self._managers == 0

    def decide_on_gpus(self, device: torch.device) -> None:
        """Find out whether the core serves tensors of GPUs. Collective among the ranks of the group the first time.

        The device is the GPU of this rank, with its index.

        Raises:
            UnsupportedError: Its stream is being captured.
            PhalanxError: As for `decide`.
        """
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"group '{self.name}': its first collective on a GPU connects the ranks, which cannot be captured "
                "into a CUDA graph; call enable_group(group, device=...) or one collective before the capture",
                operation="enable_group",
                group=self.name,
            )
        if not self.decided:
            self.decide()
        with self._deciding:
            if self.decided_on_gpus:
                return
            if self.core is not None and self.core.hosts > 1:
                tell(
                    self.name,
                    self.group_rank,
                    f"tensors of GPUs go through torch.distributed: its ranks are on {self.core.hosts} hosts, between "
                    "which the core moves memory of the CPU only. For tensors of GPUs the process group needs NCCL: "
                    "make it with the backend 'cpu:gloo,cuda:nccl' or 'cpu:phalanx,cuda:nccl'",
                )
            elif self.core is not None:
                self._ask_the_others(self.core, _cuda.refusal(device))
            self.decided_on_gpus = True

    def _ask_the_others(self, core: Group, refusal: str) -> None:
        if not refusal:
            try:
                self._let_ops_serve_gpus(True)
            except UnsupportedError as error:
                refusal = str(error)
        refuses = torch.tensor([bool(refusal)], dtype=torch.uint8)
        every = torch.empty(self.size, dtype=torch.uint8)
        core.all_gather(refuses.data_ptr(), every.data_ptr(), 1, "uint8")
        self.on_gpus = not bool(every.any())
        if not self.on_gpus:
            self._let_ops_serve_gpus(False)
            ranks = ", ".join(str(rank) for rank, no in zip(self.ranks, every.tolist(), strict=True) if no)
            reason = f"; this rank's: {refusal}" if refusal else ""
            log.warning(
                f"group '{self.name}': tensors of GPUs go through torch.distributed, because the core cannot use the "
                f"GPUs of rank(s) {ranks}{reason}"
            )

    def _let_ops_serve_gpus(self, serve: bool) -> None:
        ops = _library.loaded()
        ops.check(ops.lib.phxt_group_serve(self._context, self.op_name.encode(), _CUDA, int(serve)))

    def attach(self, core: Group, kept: Any = None) -> None:
        """The core serves the group from now on, and the native ops find it. `kept` is what stands for it here."""
        ops, name = _library.loaded(), self.op_name.encode()
        self._context = int(ops.lib.phxt_context())
        try:
            ops.check(ops.lib.phxt_group_add(self._context, name, core.pointer))
        except AlreadyExistsError:  # that of a group which was not destroyed in good order
            ops.check(ops.lib.phxt_group_remove(self._context, name))
            ops.check(ops.lib.phxt_group_add(self._context, name, core.pointer))
        _registered[self._context, self.op_name] = self
        self.core = core if kept is None else kept
        self.count_managers(0)

    def complete(self) -> None:
        """Wait, for the timeout of the group at most, for collectives that nobody has waited for. Raises nothing."""
        if self._pid == os.getpid() and _registered.get((self._context, self.op_name)) is self:
            ops = _library.loaded()
            ops.lib.phxt_wait_group(self._context, self.op_name.encode(), 0)  # nobody is there to get its error

    def release(self) -> None:
        """Take the group out of the native ops and let go of it. Not collective. In a forked child, nothing."""
        if self._pid != os.getpid():
            return
        was_on_gpus = self.on_gpus
        self.decided = self.decided_on_gpus = self.on_gpus = self.fast_path = False
        if _registered.get((self._context, self.op_name)) is self:  # and not a later group of that name
            del _registered[self._context, self.op_name]
            ops = _library.loaded()
            with contextlib.suppress(NotFoundError):
                ops.check(ops.lib.phxt_group_remove(self._context, self.op_name.encode()))
            if was_on_gpus:
                ops.lib.phxt_sweep()  # forgets events that streams have passed
        self.core = None
