"""The coalescing manager: the collectives of a body, sent as one call of the core."""

from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from phalanx.collectives import _c10d_hooks, _recording
from phalanx.collectives._errors import fail
from phalanx.collectives._process_group import GroupLike, find
from phalanx.collectives._recorder import Recorder
from phalanx.collectives._torch_compat import group_named, is_dynamo_compiling, is_tracing


class coalescing_manager:  # noqa: N801 - as torch's is called
    """Send the collectives and messages that the body calls on one group as one, when the body is left. Collective.

    As torch.distributed's _coalescing_manager, for every collective, and any mix of them, of reductions and of dtypes::

        with pc.coalescing_manager(group):
            pc.all_reduce_(a, "sum", group)
            b = pc.all_gather_tensor(c, 0, group)
            dist.all_reduce(d, group=group)
        # all of them are complete

        with pc.coalescing_manager(group, async_ops=True) as cm:
            ...
        cm.wait()

    It records the functions of phalanx.collectives, also those that write into a tensor, with isend, irecv and the
    functions made of them; and of torch.distributed all_reduce, all_gather_single (also as all_gather_into_tensor) and
    reduce_scatter_single (reduce_scatter_tensor). Every other call, and every call on another group, is issued at once,
    as without a manager.

    The calls are independent: none may write memory that another reads or writes, and the tensors must not be changed
    between the call and the end of the body (or `wait`, with async_ops). A result cannot be used inside the body.
    If the body raises, nothing is sent, and the group is as before.

    If torch.distributed serves the group, the calls are issued one after another at the end of the body, and waited
    for together. In a graph of torch.compile they are the single calls that they would be without a manager.

    Args:
        group: As for `all_reduce`. All its ranks must record the same calls in the same order. Managers nest on
            different groups only.
        device: Ignored; torch's manager has this argument.
        async_ops: Whether to wait not at the end of the body, but in `wait`, or at the first use of a result that is an
            AsyncCollectiveTensor.

    Attributes:
        works: Empty; after the body, with async_ops, the work of all calls, if there were any.

    Raises:
        ValueError: The group is not one of this rank's; or, at the end, two calls overlap: nothing was sent.
        RuntimeError: A manager is open on the group already; or, at the end, a tensor was changed: nothing was sent.
        PhalanxError: At the end, or from `wait`: as for `all_reduce`.

    Example:
        >>> with coalescing_manager(group):
        ...     a = all_reduce(torch.ones(2), "sum", group)
        ...     b = all_gather_tensor(torch.tensor([rank]), 0, group)
        >>> a, b
        (AsyncCollectiveTensor(tensor([2., 2.])), AsyncCollectiveTensor(tensor([0, 1])))
    """

    def __init__(
        self, group: GroupLike = None, device: torch.device | str | None = None, async_ops: bool = False
    ) -> None:
        self.works: list[dist.Work] = []
        self._group = group
        self._async_ops = async_ops
        self._recorder: Recorder | None = None
        self._process_group: dist.ProcessGroup | None = None

    def __enter__(self) -> "coalescing_manager":
        if is_dynamo_compiling() or is_tracing():
            return self
        if self._recorder is not None:
            raise RuntimeError("coalescing_manager: this manager is open already; make a new one for each with block")
        group = find(self._group, "", "coalescing_manager")
        recorder = Recorder(group)
        process_group = group_named(group.name)
        _recording.begin(group, recorder)
        try:
            if process_group is not None:
                _c10d_hooks.begin(process_group, group)
        except BaseException:
            _recording.end(group)
            raise
        self.works = []
        self._recorder, self._process_group = recorder, process_group
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:  # being traced
            return
        _recording.end(recorder.group)
        if self._process_group is not None:
            _c10d_hooks.end(self._process_group)
            self._process_group = None
        if kind is not None:
            recorder.drop()
            return
        if recorder.is_empty:
            return
        try:
            recorder.issue(blocking=not self._async_ops)
        except (RuntimeError, ValueError) as raised:
            fail(raised)
        if self._async_ops:
            self.works.append(recorder.work)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until all of the body is complete. Without async_ops there is nothing to wait for.

        Args:
            timeout: How long to wait; None is the timeout of the process group.

        Raises:
            RuntimeError: The body has not been left yet.
            PhalanxError: A call failed.
        """
        if self._recorder is not None:
            self._recorder.work.wait()
        for work in self.works:
            work.wait(timeout) if timeout else work.wait()
