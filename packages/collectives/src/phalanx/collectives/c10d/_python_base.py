"""The process group in Python: its life, and how it issues what it is called for. As backend.cpp."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch

from phalanx.collectives._streams import Beside, where
from phalanx.collectives.c10d import _torch_compat
from phalanx.collectives.c10d._connect import Connection, default_ms
from phalanx.collectives.c10d._python_stream import AnyWork, StreamWork
from phalanx.collectives.c10d._python_tensors import Buffers, check_tensor
from phalanx.collectives.c10d._python_work import CHANNEL, Batch, Engine, Work, fail
from phalanx.core import Group, InvalidArgumentError, PhalanxError
from phalanx.core.timeouts import milliseconds

_MESSAGES = ("send", "recv")  # which do not count as collectives
_KEPT = 64  # coalesced works that are kept though they are complete

Tensors = Sequence[torch.Tensor]
Issue = Callable[[Group, dict[str, Any]], Any]


def checked(method: Callable[..., AnyWork]) -> Callable[..., AnyWork]:
    """A method of a group whose arguments may be wrong on this rank alone. As checked.h.

    Such a call is refused before the core is called: by InvalidArgumentError where it would be a ValueError, and, of a
    collective, by an error of the other ranks too.
    """
    tells = method.__name__ not in ("send", "recv", "recv_anysource")

    @wraps(method)
    def call(self: "BaseGroup", *args: Any, **kwargs: Any) -> AnyWork:
        self._thread.core_was_called = False
        args = _with_options(method.__name__, args)
        try:
            return method(self, *args, **kwargs)
        except (ValueError, TypeError, RuntimeError) as error:
            if self._thread.core_was_called:
                raise
            if tells and not _on_gpu(args):
                opts = kwargs.get("opts", args[-1] if args and hasattr(args[-1], "timeout") else None)
                self._engine.refuse(f"{method.__name__}: {error}", self._limit_ms(opts))
            self._thread.core_was_called = True  # a collective that makes others has told once
            if isinstance(error, ValueError) and not isinstance(error, PhalanxError):
                raise InvalidArgumentError(str(error)) from None
            raise

    return call


# The methods that torch also has in forms without an options object: its fields, in the order of the arguments.
_FIELDS = {
    "allreduce": ("Allreduce", "reduceOp"),
    "broadcast": ("Broadcast", "rootRank"),
    "reduce": ("Reduce", "rootRank", "reduceOp"),
    "allgather": ("Allgather",),
    "gather": ("Gather", "rootRank"),
    "scatter": ("Scatter", "rootRank"),
    "reduce_scatter": ("ReduceScatter", "reduceOp"),
}


def _with_options(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a method as it takes them with an options object: lists of tensors, and lists of such lists."""
    if name not in _FIELDS:
        return args
    kind, *fields = _FIELDS[name]
    count = 1 if name in ("allreduce", "broadcast", "reduce") else 2
    given, rest = args[:count], args[count:]
    has_tensor = any(isinstance(each, torch.Tensor) for each in given)
    if not has_tensor and (not rest or hasattr(rest[0], "timeout")):
        return args
    opts = getattr(_torch_compat.options, f"{kind}Options")()
    for field, value in zip(fields, rest, strict=False):
        setattr(opts, field, value)
    if has_tensor:
        given = tuple([each] if isinstance(each, torch.Tensor) or each else [] for each in given)
    return (*given, opts)


def _on_gpu(given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return given.is_cuda
    return isinstance(given, list | tuple) and any(_on_gpu(each) for each in given)


class BaseGroup(_torch_compat.GroupBase):  # type: ignore[misc]
    """A process group of the backend `phalanx`.

    Args:
        connection: Where the core's group comes from.
        store: Torch's, of this group.
        timeout_ms: Of collectives and messages that give none.
    """

    def __init__(self, connection: Connection, store: Any, timeout_ms: int) -> None:
        super().__init__(connection.position, len(connection.ranks))
        self._store = store
        self._position, self._count = connection.position, len(connection.ranks)
        self._group_name, self._group_desc = connection.name, "undefined"
        self._engine = Engine(connection)
        self._timeout_ms = timeout_ms
        self._thread = threading.local()  # core_was_called: whether the call of this thread has passed its checks
        self._sequence = 0
        self._monitored = 0
        self._batch: list[AnyWork] | None = None
        self._beside = Beside()  # of messages
        _torch_compat.claim_devices(self, ["cpu", "cuda"])

    # ---- life ---------------------------------------------------------------------------------------

    def name(self) -> str:
        return "phalanx"

    # C++ asks for these. The base class has names only for groups that hold Backends.

    def getBackendName(self) -> str:  # noqa: N802
        return "phalanx"

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._group_desc = description

    def rank(self) -> int:
        return self._position

    def size(self) -> int:
        return self._count

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_ms = default_ms(self._engine.connection.name, timeout)

    def abort(self) -> None:
        connection = self._engine.connection
        rank = connection.ranks[self._position]
        self._engine.abort(f"rank {rank} aborted process group '{connection.name}'")

    def shutdown(self) -> None:
        self._engine.close()

    def _set_sequence_number_for_group(self) -> None:
        """All ranks count from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _start_coalescing(self, device: Any) -> None:
        self._batch = []

    def _end_coalescing(self, device: Any) -> Batch:
        works, self._batch = self._batch or [], None
        return Batch(works)

    # ---- how all are issued -------------------------------------------------------------------------

    def _kept(self, buffers: Buffers) -> dict[str, Any]:
        """What each call of the core's group is given besides."""
        return {}

    def _group_on(self, device: torch.device, group: Group, what: str) -> Any:
        """What has the calls of the core's group for tensors of that GPU."""
        return group

    def _limit_ms(self, opts: Any) -> int:
        return self._timeout_ms if opts is None or opts.timeout == _torch_compat.UNSET else milliseconds(opts.timeout)

    def _issue(self, what: str, opts: Any, buffers: Buffers, call: Issue, **extra: Any) -> AnyWork:
        """Start it, or run it to its end if torch waits for it anyway."""
        device = buffers.device(what)
        if device.type != "cpu":
            return self._put_on_stream(what, opts, buffers, call, device, **extra)
        self._thread.core_was_called = True
        timeout_ms = self._limit_ms(opts)
        group = self._engine.group(timeout_ms, what)
        self._engine.sweep()
        self._sequence += 1
        work = Work(self._engine, what, buffers, timeout_ms, self._sequence)
        blocking = opts is not None and not opts.asyncOp and self._batch is None
        more = {"channel": CHANNEL, "timeout_ms": timeout_ms, "blocking": blocking, **self._kept(buffers)}
        try:
            with _torch_compat.event(what, buffers.outputs):
                made = call(group, {**more, **extra})
        except PhalanxError as error:
            fail(what, error)
        if blocking:
            work.completed()
            work.wait()  # raises what went wrong after it
        else:
            self._begin(work, made)
        return work

    def _put_on_stream(
        self, what: str, opts: Any, buffers: Buffers, call: Issue, device: torch.device, **extra: Any
    ) -> StreamWork:
        """Put it on the current stream of that GPU, and return at once."""
        self._thread.core_was_called = True
        timeout_ms = self._limit_ms(opts)
        group = self._group_on(device, self._engine.group(timeout_ms, what), what)
        self._sequence += 0 if what in _MESSAGES else 1
        with torch.cuda.device(device):
            more = {"channel": CHANNEL, "timeout_ms": timeout_ms, **where(device), **self._kept(buffers)}
            try:
                call(group, {**more, **extra})
            except PhalanxError as error:
                fail(what, error)
            buffers.finish()  # what is to be copied is on the stream as well
            work = StreamWork(self._engine, what, buffers.outputs, device, self._sequence)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _begin(self, work: Work, made: Any) -> None:
        work.started(made)
        self._engine.add(work)
        if self._batch is not None:
            if len(self._batch) >= _KEPT:  # an exception may have kept torch from ending it
                self._batch = [each for each in self._batch if not (each.is_completed() and each.is_success())]
            self._batch.append(work)

    def _check_list(self, tensors: Sequence[Any], what: str) -> None:
        if len(tensors) != self._count:
            raise ValueError(f"{what}: a list of {self._count} tensors is needed, not of {len(tensors)}")

    def _check_sizes(self, tensors: Tensors, one: torch.Tensor, what: str) -> None:
        self._check_list(tensors, what)
        for each in tensors:
            check_tensor(each, what, one)
            if each.numel() != one.numel():
                raise ValueError(f"{what}: a tensor of the list has {each.numel()} elements, and not {one.numel()}")

    def _root(self, rank: int, what: str) -> int:
        if not 0 <= rank < self._count:
            raise ValueError(f"{what}: root rank {rank} is not in the group, whose size is {self._count}")
        return rank
