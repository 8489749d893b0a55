"""A group as its rank sees it: who serves it, and what belongs to it. Which ones there are is in _registry.py."""

import contextlib
import logging
import os
import threading

import torch

from phalanx.collectives import _gpus, _ops
from phalanx.collectives._streams import Beside
from phalanx.core import AlreadyExistsError, Group, NotFoundError, UnsupportedError

log = logging.getLogger("phalanx.collectives")

_CUDA = 2  # PHX_DEVICE_CUDA

_registered: "dict[tuple[int, str], Entry]" = {}  # whom the native ops know, by context and name


def tell(name: str, group_rank: int, what: str) -> None:
    """Log what all ranks of a group know: its first rank warns, so that it is one line of a job.

    Args:
        name: Of the group.
        group_rank: Of the caller.
        what: A sentence that the name of the group begins.
    """
    log.log(logging.INFO if group_rank else logging.WARNING, "group '%s': %s", name, what)


class Entry:
    """A group as its rank sees it.

    Attributes:
        name: Its name, by which ops find it.
        size: Number of its ranks.
        group_rank: Position of this rank in it.
        ranks: Its global ranks, in order.
        core: The core's group, or None: torch.distributed serves it, or that is not decided yet.
        decided: Whether the ranks have met.
        on_gpus: Whether the core serves tensors of GPUs too.
        decided_on_gpus: Whether that is known.
        beside: Streams of messages of GPUs.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_deciding",
        "_pid",
        "beside",
        "core",
        "decided",
        "decided_on_gpus",
        "group_rank",
        "name",
        "on_gpus",
        "ranks",
        "size",
    )

    def __init__(self, name: str, group_rank: int, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.size = len(ranks)
        self.group_rank = group_rank
        self.ranks = ranks
        self.core: Group | None = None
        self.decided = False
        self.on_gpus = False
        self.decided_on_gpus = False
        self.beside = Beside()
        self._context = 0
        self._pid = os.getpid()
        self._deciding = threading.Lock()

    def decide(self) -> None:
        """Find out whether the core serves the group. Collective among its ranks the first time.

        Raises:
            WaitTimeoutError: Ranks did not come in time; the text names them. It may be tried again.
            PhalanxError: The ranks could not meet. Every later call raises too.
        """

    def served_here(self, tensor: torch.Tensor) -> bool:
        """Whether the core serves collectives of this tensor."""
        return self.core is not None and (tensor.is_cpu or (tensor.is_cuda and self.on_gpus))

    def may_serve(self, tensor: torch.Tensor) -> bool:
        """Whether the ops of phalanx may do anything with a tensor but hand it to torch.distributed."""
        if tensor.is_cpu:
            return not self.decided or self.core is not None
        return tensor.is_cuda and self.on_gpus

    def decide_on_gpus(self, device: torch.device) -> None:
        """Find out whether the core serves tensors of GPUs. Collective among the ranks of the group the first time.

        Args:
            device: The GPU of this rank, with its index.

        Raises:
            UnsupportedError: Its stream is being captured.
            PhalanxError: As for `decide`.
        """
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"the first collective of group '{self.name}' on a GPU cannot be captured: its ranks meet in it. Make "
                "one before the capture",
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
                    "which the core moves memory of the CPU only. The process group needs NCCL for them, as "
                    "'cpu:gloo,cuda:nccl' and 'cpu:phalanx,cuda:nccl' have",
                )
            elif self.core is not None:
                self._ask_the_others(self.core, _gpus.refusal(device))
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
            ranks = [str(rank) for rank, no in zip(self.ranks, every.tolist(), strict=True) if no]
            reason = f"; this one: {refusal}" if refusal else ""
            log.warning(
                "group '%s': tensors of GPUs go through torch.distributed, for rank(s) %s cannot use the core there%s",
                self.name,
                ", ".join(ranks),
                reason,
            )

    def _let_ops_serve_gpus(self, serve: bool) -> None:
        ops = _ops.loaded()
        ops.check(ops.lib.phxt_group_serve(self._context, self.name.encode(), _CUDA, int(serve)))

    def register(self, core: Group) -> None:
        """Let the native ops find it."""
        ops = _ops.loaded()
        self._context = int(ops.lib.phxt_context())
        try:
            ops.check(ops.lib.phxt_group_add(self._context, self.name.encode(), core.pointer))
        except AlreadyExistsError:  # of a group that was not destroyed in good order
            ops.check(ops.lib.phxt_group_remove(self._context, self.name.encode()))
            ops.check(ops.lib.phxt_group_add(self._context, self.name.encode(), core.pointer))
        _registered[self._context, self.name] = self

    def complete(self) -> None:
        """Wait, for the timeout of the group at most, for collectives that nobody has waited for. Raises nothing."""
        if self._pid == os.getpid() and _registered.get((self._context, self.name)) is self:
            ops = _ops.loaded()
            ops.lib.phxt_wait_group(self._context, self.name.encode(), 0)  # an error of it has no one to go to

    def release(self) -> None:
        """Take the group out of the native ops and let go of it. Not collective. In a forked child, nothing."""
        if self._pid != os.getpid():
            return
        was_on_gpus = self.on_gpus
        self.decided = self.decided_on_gpus = self.on_gpus = False
        if _registered.get((self._context, self.name)) is self:  # and not a later group of that name
            del _registered[self._context, self.name]
            ops = _ops.loaded()
            with contextlib.suppress(NotFoundError):
                ops.check(ops.lib.phxt_group_remove(self._context, self.name.encode()))
            if was_on_gpus:
                ops.lib.phxt_sweep()  # forgets events that streams have passed
        self.core = None
