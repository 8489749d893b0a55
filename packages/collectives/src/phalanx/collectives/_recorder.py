"""The record of the calls inside the body of a coalescing manager, and how they are issued at the end.

Whatever the core can take with others becomes a row of one phx_coalesced. The rest is issued one by one after it: what
torch.distributed serves, and all_to_all_single with uneven splits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import increment_version
from torch.distributed import Work

from phalanx.collectives import _call_rows, _library, reductions
from phalanx.collectives._async_tensor import AsyncCollectiveTensor, WaitHandle, start, wait_plain, wrap
from phalanx.collectives._cuda import options_on
from phalanx.collectives._group_state import GroupState
from phalanx.collectives._layout import joined_at, parts_first
from phalanx.collectives._op_table import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, Collective
from phalanx.collectives._p2p_streams import Message
from phalanx.collectives._transport import transport_for
from phalanx.collectives._work import CompositeWork, CoreWork, DeferredWork, StreamWork
from phalanx.collectives.profiling import shown
from phalanx.core import RevokedError, check, ffi, lib

# What a call reads and writes; and, from when it was called, the version of what it reads, if that has one, and where
# the two are, if they have memory.
_Call = tuple[torch.Tensor, torch.Tensor, int | None, int, int]


def _call(source: torch.Tensor, out: torch.Tensor) -> _Call:
    return source, out, _version(source), _address(source), _address(out)


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode
        return None


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _count_versions(tensors: list[torch.Tensor]) -> None:
    try:
        increment_version(tensors)
    except RuntimeError:
        increment_version([each for each in tensors if not each.is_inference()])


class Recorder:
    """The calls of one body on one group, and `work`, that of all of them."""

    def __init__(self, group: GroupState) -> None:
        self.group = group
        self.work = CompositeWork(group.name)
        self._works: list[Work] = []
        self._handle: WaitHandle | None = None
        self._rows: list[int] = []
        self._rows_on: dict[torch.device, list[int]] = {}  # of calls on GPUs
        # For each broadcast from this rank: its call, the rows and its own row, and the place of its source.
        self._roots: list[tuple[int, list[int], int, int]] = []
        self._kept: list[torch.Tensor] = []  # whose memory rows name, and that no call has
        self._calls: list[_Call] = []
        self._written: list[torch.Tensor] = []
        self._results: list[AsyncCollectiveTensor] = []
        self._singles: list[Callable[[], Callable[[], None]]] = []  # each starts one, and gives what ends it
        self._messages: list[DeferredWork] = []
        self._before: list[Callable[[], Any]] = []
        self._after: list[Callable[[], Any]] = []

    # ---- in the body -------------------------------------------------------------------------------------------------

    def record(self, collective: Collective, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        """Record a functional collective, given its arguments but the group, checked. Its result is of no use before
        the body is left."""
        source = _call_rows.waited(tensor)
        out: torch.Tensor = collective.result(source, *args)
        self._add(collective, source, out, args)
        return self._pending(out)

    def write(self, collective: Collective, target: torch.Tensor, argument: Any) -> None:
        """Record a collective in place, given its other argument, checked.

        Raises:
            RuntimeError: It needs a gradient.
        """
        if target.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{collective.name}_: an op that writes into its argument has no gradient, and the argument needs one; "
                f"use {collective.name}, or call it with torch.no_grad() or on a detached tensor"
            )
        self.write_into(collective, target, target, argument)

    def write_into(self, collective: Collective, out: torch.Tensor, tensor: torch.Tensor, *args: Any) -> None:
        """Record a collective, given its arguments but the group, checked, with its result in `out`.

        This tensor of the caller has as many elements as the result, in the same order; its shape does not matter.
        """
        if self._quick(collective, tensor, out, args):
            self._written.append(out)
            return
        source, target = _call_rows.waited(tensor), _call_rows.waited(out)
        memory = _call_rows.memory_of(target, self.group.on_gpus) if self.group.core is not None else None
        if memory is not None and memory.is_contiguous() and memory.data_ptr() == target.data_ptr():
            self._add(collective, source, memory, args)
        else:
            made = collective.result(source, *args)
            self._add(collective, source, made, args)
            self._calls[-1] = _call(source, target)
            self._kept.append(made)
            self._after.append(lambda: target.copy_(made.view(target.shape)))
        self._written.append(target)

    def joined(self, gathered: torch.Tensor, dim: int) -> torch.Tensor:
        """The result of a recorded all_gather, joined along another dim than 0."""
        result: torch.Tensor = _Joined.apply(self, gathered, dim)  # type: ignore[no-untyped-call]
        return result

    def _joined(self, gathered: torch.Tensor, dim: int) -> torch.Tensor:
        if not isinstance(gathered, AsyncCollectiveTensor):
            raise TypeError(
                f"all_gather_tensor: expected a result that a coalescing_manager records, not {type(gathered).__name__}"
            )
        whole, size = gathered.elem, self.group.size
        shape = list(whole.shape)
        shape[0] //= size
        shape[dim] *= size
        out = whole.new_empty(shape)
        self._after.append(lambda: out.copy_(joined_at(whole, size, dim)))
        return self._pending(out)

    def copied(self, out: torch.Tensor, result: torch.Tensor) -> None:
        """Copy a recorded result into a tensor when it is there."""
        elem = result.elem if isinstance(result, AsyncCollectiveTensor) else result
        self._after.append(lambda: out.copy_(elem))
        self._calls.append(_call(out, out))
        self._written.append(out)

    def post(self, message: Message) -> Work:
        """Record a message."""
        transport = transport_for(message.state, message.tensor, by_address=True)
        work = DeferredWork(partial(transport.post, message), self.work.refuse_until_issued)
        self._messages.append(work)
        return work

    def _pending(self, out: torch.Tensor) -> AsyncCollectiveTensor:
        if self._handle is None:
            self._handle = WaitHandle.of(self.work.wait)
        result = start(out) if out.is_cpu else wrap(out)
        result._state = self._handle
        self._results.append(result)
        return result

    def _add(self, collective: Collective, source: torch.Tensor, out: torch.Tensor, args: tuple[Any, ...]) -> None:
        if self.group.core is not None and collective.kind >= 0:
            memory = _call_rows.memory_of(source, self.group.on_gpus)
            if memory is not None and not (collective is ALL_TO_ALL and args[0]):
                rows = self._rows if memory.is_cpu else self._rows_on.setdefault(memory.device, [])
                self._add_row(rows, collective, memory, out, args)
                self._calls.append(_call(source, out))
                return

        def begin() -> Callable[[], None]:
            started = transport_for(self.group, source).start(collective, source, *args)

            def end() -> None:
                out.copy_(torch.ops.phalanx.wait_tensor(started).view(out.shape))

            return end

        self._singles.append(begin)
        self._calls.append(_call(source, out))

    def _quick(self, collective: Collective, source: torch.Tensor, out: torch.Tensor, args: tuple[Any, ...]) -> bool:
        """As `_add` into a plain tensor of the caller, for what is plain itself: no more than it takes."""
        code = reductions.PLAIN_CODES.get(source.dtype)
        if code is None or self.group.core is None or type(source) is not torch.Tensor or not source.is_contiguous():
            return False
        reduction = count = 0
        address = other = source.data_ptr()
        if collective is ALL_REDUCE:
            reduction = reductions.REDUCTIONS.get(args[0], 0)
            if not reduction or not source.is_cpu or not address or out is not source or source.is_neg():
                return False
            self._rows += (_call_rows.SIZE, collective.kind, address, address, source.numel(), code, reduction, 0, 0)
        else:
            if type(out) is not torch.Tensor or out.dtype is not source.dtype or not out.is_contiguous():
                return False
            if collective is ALL_GATHER:
                count = source.numel()
            elif collective is REDUCE_SCATTER:
                count = out.numel()
                reduction = reductions.REDUCTIONS.get(args[0], 0)
            other = out.data_ptr()
            if not (count and address and other and source.is_cpu and out.is_cpu) or source.is_neg() or out.is_neg():
                return False
            if collective is REDUCE_SCATTER and not reduction:
                return False
            self._rows += (_call_rows.SIZE, collective.kind, address, other, count, code, reduction, 0, 0)
        self._calls.append((source, out, _version(source), address, other))
        return True

    def _add_row(
        self, rows: list[int], collective: Collective, source: torch.Tensor, out: torch.Tensor, args: tuple[Any, ...]
    ) -> None:
        reduction = root = 0
        if collective.reduces:
            reduction = reductions.reduction_of(collective.name, args[0], source.dtype)
        code, lanes, _ = reductions.element_type(source.dtype)
        count = (out if collective is REDUCE_SCATTER else source).numel() * lanes
        if collective is ALL_TO_ALL:
            count //= self.group.size
        given = source if source.is_contiguous() else source.contiguous()
        if collective is BROADCAST:
            root = args[0]
            if root == self.group.group_rank and given.data_ptr() != out.data_ptr():
                self._before.append(partial(out.copy_, given))
                self._roots.append((len(self._calls), rows, len(rows), given.data_ptr()))
                self._kept.append(given)
            given = out  # the core's is in place
        rows += (_call_rows.SIZE, collective.kind, given.data_ptr(), out.data_ptr(), count, code, reduction, root, 0)
        self._kept.append(given)

    # ---- at its end --------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget everything: the body raised."""
        self.work.dropped()
        self._handle = None
        self._results.clear()

    def issue(self, blocking: bool) -> None:
        """Start all that was recorded; if `blocking`, also wait until it is complete.

        Raises:
            RuntimeError: An input was changed in the body; nothing was sent.
            ValueError: A call writes what another reads or writes; nothing was sent.
            PhalanxError: The core refused or failed.
        """
        # The results have them; here they would be a cycle of garbage.
        handle, self._handle = self._handle, None
        results, self._results = self._results, []
        try:
            with torch.no_grad():
                self._issue()
        except BaseException as error:
            self.work.failed(error)
            raise
        self.work.issued(self._works, self._after, (self._kept, self._calls))
        if blocking:
            self.work.wait()
        for result in results:
            result._state = True if blocking else handle  # also where a use in the body raised

    def _issue(self) -> None:
        for source, out, version, here, there in self._calls:
            changed = version is not None and source._version != version
            if changed or (here and source.data_ptr() != here) or (there and out.data_ptr() != there):
                raise RuntimeError(
                    f"coalescing_manager on group '{self.group.name}': a tensor of shape {list(source.shape)} was "
                    "changed in the body after it was passed to a collective, which is sent only at the end of the "
                    "body; change the tensor before that call, or after the with block. Nothing was sent"
                )
        core = self.group.core
        if core is None and (self._rows or self._rows_on):
            raise RevokedError(
                f"coalescing_manager on group '{self.group.name}': the group was destroyed in the body of the with "
                "block; nothing was sent",
                operation="coalesced",
                group=self.group.name,
            )
        if self._singles or self._after:  # where there are none, the core looks
            _call_rows.check_overlaps(self.group.name, [each[:2] for each in self._calls])
        if _library.loaded().lib.phxt_pending_count():
            for call in self._calls:
                for each in call[:2]:
                    if type(each) is torch.Tensor and each.is_cpu:
                        wait_plain(each)
        if self._rows_on:
            for call in self._calls:
                for each in call[:2]:
                    if each.is_cuda:
                        torch.ops.phalanx.wait_tensor(each)  # another stream may write it
        for prepare in self._before:
            prepare()
        self._give_sources()
        if self._rows:
            count = len(self._rows) // _call_rows.FIELDS
            rows = _call_rows.packed(self._rows, count)
            assert core is not None
            begin = partial(lib.phx_coalesced, core.pointer, rows, count, ffi.NULL)
            on_cpu = [call for call in self._calls if not call[1].is_cuda]
            sources, targets = [call[0] for call in on_cpu], [call[1] for call in on_cpu]
            with shown("coalesced", sources, targets, core, name=self.group.name):
                self._works.append(CoreWork(begin, (*self._kept, *self._calls), self.group.ranks))
        for device, rows in self._rows_on.items():
            assert core is not None
            count = len(rows) // _call_rows.FIELDS
            options, _gpu = options_on(device)
            check(lib.phx_coalesced(core.pointer, _call_rows.packed(rows, count), count, options, ffi.NULL))
            self._works.append(StreamWork(device))
        if self._written:
            _count_versions(self._written)
        self._after[:0] = [begin() for begin in self._singles]
        for message in self._messages:
            message.begin()
            self._works.append(message)

    def _give_sources(self) -> None:
        """Let broadcasts from here send their sources, which others can perhaps read where they lie, not the copies.

        The core takes it for written, and would refuse the list if another call uses the same memory.
        """
        if not self._roots:
            return
        shared = _call_rows.sharing([each[:2] for each in self._calls])
        for call, rows, row, address in self._roots:
            if call not in shared:
                rows[row + _call_rows.IN] = rows[row + _call_rows.OUT] = address

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded."""
        return not (self._calls or self._messages)


class _Joined(Function):
    """The join of a recorded all_gather, differentiable."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, gathered: torch.Tensor, dim: int) -> Any:
        ctx.size, ctx.dim = recorder.group.size, dim
        return recorder._joined(gathered, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, parts_first(grad, ctx.size, ctx.dim), None
