"""Which process groups the core serves, and what belongs to them. All state belongs to a rank, none to the process.

A rank is known by its default process group: torch's own tests run several ranks in one process, each in a thread with
a default group of its own. The ranks of a group meet at its first collective on a CPU tensor. What was made then is
released when torch.distributed forgets the group (destroy_process_group), or when the group is garbage.
"""

import atexit
import contextlib
import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives import _gpus, _ops, _torch_compat
from phalanx.collectives._hosts import Bridge, Carrier, GpuSpanning, Places, Spanning
from phalanx.collectives._meeting import Meeting, TokenStore
from phalanx.collectives._streams import Beside
from phalanx.core import (
    AlreadyExistsError,
    CallbackStore,
    Group,
    NotFoundError,
    PhalanxError,
    RevokedError,
    UnsupportedError,
    WaitTimeoutError,
    World,
)

log = logging.getLogger("phalanx.collectives")

# Backends whose ranks are processes and have a store. Others (fake, threaded, mpi, ...) stay with torch.distributed.
_BACKENDS = {"gloo", "nccl", "ucc", "xccl"}
_MAX_WORLD_SIZE = 4096  # of the core
_CUDA = 2  # PHX_DEV_CUDA


class Rank:
    """One rank: the core's world, made when its first group is."""

    def __init__(self, default_group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._lock = threading.RLock()
        self._world: World | None = None
        self._watch = watch(default_group, lambda: _end_rank(self))

    @cached_property
    def store(self) -> Any:
        """Torch's default store, below a prefix. An object of our own: see _torch_compat.life_of."""
        return _torch_compat.PrefixStore("phalanx", _torch_compat.default_store())

    @cached_property
    def tokens(self) -> TokenStore:
        """The same store for the core."""
        return TokenStore(self.store)

    @cached_property
    def timeout_ms(self) -> int:
        """What init_process_group was told."""
        return int(max(1, round(self.store.timeout.total_seconds() * 1000)))

    def making_a_group(self) -> bool:
        """Whether the calling thread is in the core's group_create."""
        return "tokens" in self.__dict__ and self.tokens.in_use()

    def world(self) -> World:
        """The core's world, made at the first call."""
        with self._lock:
            if self._world is None:
                store = CallbackStore(self.tokens)
                self._world = World(self.rank, self.size, store, timeout_ms=self.timeout_ms)
            return self._world

    def close(self) -> None:
        """Leave the world, if there is one."""
        with self._lock:
            world, self._world = self._world, None
        if world is not None:
            world.finalize()


class Entry:
    """A group as its rank sees it.

    Attributes:
        name: Its name, by which ops find it.
        size: Number of its ranks.
        group_rank: Position of this rank in it.
        ranks: Its global ranks, in order.
        core: The core's group, or None: its ranks are on several hosts, torch.distributed serves it, or that is not
            decided yet.
        hosts: Of a group on several hosts that has several ranks on one: what serves it.
        decided: Whether the ranks have met.
        on_gpus: Whether the core serves tensors of GPUs too.
        hosts_on_gpus: As `hosts`, for tensors of GPUs.
        decided_on_gpus: Whether that is known.
        beside: Streams of messages of GPUs.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_deciding",
        "_registered",
        "beside",
        "core",
        "decided",
        "decided_on_gpus",
        "group_rank",
        "hosts",
        "hosts_on_gpus",
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
        self.hosts: Spanning | None = None
        self.decided = False
        self.on_gpus = False
        self.hosts_on_gpus: GpuSpanning | None = None
        self.decided_on_gpus = False
        self.beside = Beside()
        self._context = 0
        self._registered = False
        self._deciding = threading.Lock()

    def decide(self) -> None:
        """Find out whether the core serves the group. Collective among its ranks the first time.

        Raises:
            WaitTimeoutError: Ranks did not come in time; the text names them. It may be tried again.
            PhalanxError: The ranks could not meet. Every later call raises too.
        """

    def served_here(self, tensor: torch.Tensor) -> bool:
        """Whether the core serves it: the ranks share this host."""
        return self.core is not None and (tensor.is_cpu or (tensor.is_cuda and self.on_gpus))

    def may_serve(self, tensor: torch.Tensor) -> bool:
        """Whether the ops of phalanx may do anything with a tensor but hand it to torch.distributed."""
        if tensor.is_cpu:
            return not self.decided or self.core is not None or self.hosts is not None
        return tensor.is_cuda and (self.on_gpus or self.hosts_on_gpus is not None)

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
            if self.core is not None:
                self._ask_the_others(self.core, _gpus.refusal(device))
            elif self.hosts is not None:
                self.hosts_on_gpus = self._span_on_gpus(device)
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

    def _span_on_gpus(self, device: torch.device) -> GpuSpanning | None:
        return None

    def register(self, core: Group) -> None:
        """Let the native ops find it."""
        ops = _ops.loaded()
        self._context = int(ops.lib.phxt_context())
        try:
            ops.check(ops.lib.phxt_group_add(self._context, self.name.encode(), core.pointer))
        except AlreadyExistsError:  # of a group that was not destroyed in good order
            ops.check(ops.lib.phxt_group_remove(self._context, self.name.encode()))
            ops.check(ops.lib.phxt_group_add(self._context, self.name.encode(), core.pointer))
        self._registered = True

    def release(self) -> None:
        """Take the group out of the native ops and let go of it. Not collective."""
        was_on_gpus = self.on_gpus
        self.decided = self.decided_on_gpus = self.on_gpus = False
        if self._registered:
            self._registered = False
            ops = _ops.loaded()
            with contextlib.suppress(NotFoundError):
                ops.check(ops.lib.phxt_group_remove(self._context, self.name.encode()))
            if was_on_gpus:
                ops.lib.phxt_sweep()  # forgets events that streams have passed
        self.core = None
        hosts, self.hosts = self.hosts, None
        if hosts is not None:
            hosts.close()
        on_gpus, self.hosts_on_gpus = self.hosts_on_gpus, None
        if on_gpus is not None:
            on_gpus.close()


class _ProcessGroupEntry(Entry):
    """That of a group of torch.distributed."""

    __slots__ = ("_failure", "_group", "_lock", "_rank", "_watch")

    def __init__(self, group: dist.ProcessGroup, rank: Rank) -> None:
        super().__init__(str(group.group_name), int(group.rank()), tuple(dist.get_process_group_ranks(group)))
        self._rank = rank
        self._failure: PhalanxError | None = None
        self._lock = threading.Lock()
        self._group = weakref.ref(group)
        key = id(group)
        self._watch = watch(group, lambda: _forget(key))

    def decide(self) -> None:
        with self._lock:
            if self.decided:
                return
            if self._failure is not None:
                raise RevokedError(
                    f"the ranks of group '{self.name}' could not meet before, so they may be out of step; make a new "
                    f"process group. The first failure was: {self._failure}",
                    operation="enable_group",
                    group=self.name,
                )
            try:
                self.core, self.hosts = self._meet()
            except WaitTimeoutError:  # nothing has been sent: a late rank may still come
                raise
            except PhalanxError as error:
                self._failure = error
                raise
            if self.core is not None:
                self.register(self.core)
            self.decided = True
        group = self._group()
        if group is not None and _entries.get(id(group)) is self:
            ready[id(group)] = self
            if _torch_compat.is_ordinary(group):  # names of threaded groups are per thread
                ready[self.name] = self
        else:  # destroyed meanwhile
            self.release()

    def _meet(self) -> tuple[Group | None, Spanning | None]:
        from phalanx.collectives.c10d._connect import connections  # here: it imports this module

        group = self._group()
        connection = connections.get(self.name)
        if group is None:
            return None, None
        if connection is not None and not connection.spans_hosts:  # of the backend `phalanx`: its group of the core
            return connection.group(self._rank.timeout_ms), None
        ordinary = _torch_compat.is_ordinary(group) and not _torch_compat.backends_of(group) - _BACKENDS
        if not ordinary and connection is None:
            return None, None
        rank = self._rank
        refusal = _ops.refusal()
        if rank.size > _MAX_WORLD_SIZE:
            refusal = f"there are {rank.size} ranks, more than {_MAX_WORLD_SIZE}"
        store = _torch_compat.PrefixStore(f"{self.name}/{_short(self.ranks)}", rank.store)
        host = "" if refusal else f"{rank.world().host_id:x}"
        answer = Meeting(store, self.name, self.ranks, self.group_rank, rank.timeout_ms).hold(refusal, host)
        if answer.refusal:
            log.warning("group '%s' goes through torch.distributed: %s", self.name, answer.refusal)
            return None, None
        rank.tokens.use(answer.token)
        try:
            places = Places(answer.hosts, self.group_rank)
            if len(places.hosts) == 1:
                return rank.world().create_group(self.name, self.ranks), None
            if len(places.hosts) == self.size:
                log.info("group '%s' goes through torch.distributed: each rank is on a host of its own", self.name)
                return None, None
            own = _torch_compat.PrefixStore(answer.token, store)
            return None, span(rank, self.name, self.ranks, places, own, rank.timeout_ms, self.name)[1]
        except UnsupportedError as error:  # raised on every rank alike
            log.info("group '%s' goes through torch.distributed: %s", self.name, error)
            return None, None
        finally:
            rank.tokens.use(None)

    def _span_on_gpus(self, device: torch.device) -> GpuSpanning | None:
        group, hosts = self._group(), self.hosts
        if group is None or hosts is None or "nccl" not in _torch_compat.backends_of(group):
            return None
        rank = self._rank
        store = _torch_compat.PrefixStore(f"{self.name}/{_short(self.ranks)}/gpus", rank.store)
        refusal = _gpus.refusal(device)
        answer = Meeting(store, self.name, self.ranks, self.group_rank, rank.timeout_ms).hold(refusal)
        if answer.refusal:
            log.warning("group '%s': tensors of GPUs go through torch.distributed: %s", self.name, answer.refusal)
            return None
        own = _torch_compat.PrefixStore(answer.token, store)
        return span_on_gpus(self.name, self.ranks, hosts.places, hosts.inside, "nccl", own, rank.timeout_ms)


def _short(ranks: Sequence[int]) -> str:
    """A short name of the ranks of a group: groups of one name and other ranks, such as the rows of a mesh, may meet at
    the same time."""
    return hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]


def span(
    rank: Rank, name: str, ranks: Sequence[int], places: Places, store: Any, timeout_ms: int, core_name: str
) -> tuple[Group, Spanning]:
    """The core's group of the ranks of a group that are on this host, and its collectives on all hosts. Collective.

    Args:
        rank: This rank. Its store has the token of the group.
        name: Of the group, for errors.
        ranks: Its global ranks, in order.
        places: Where they are.
        store: A torch store of their own.
        timeout_ms: Of everything.
        core_name: What the core's group is called, but for the host.
    """
    inside = rank.world().create_group(
        f"{core_name} on host {places.host}", [ranks[each] for each in places.here], timeout_ms
    )
    try:
        bridge = _bridge(name, ranks, places, store, timeout_ms)
    except PhalanxError as error:
        inside.revoke(str(error))
        raise
    return inside, Spanning(name, places, inside, bridge, timeout_ms)


def span_on_gpus(
    name: str, ranks: Sequence[int], places: Places, inside: Group, backend: str, store: Any, timeout_ms: int
) -> GpuSpanning:
    """The collectives on all hosts for tensors of GPUs. Collective.

    Args:
        name, ranks, places, store, timeout_ms: As for `span`.
        inside: The core's group of the ranks on this host.
        backend: What carries data between the hosts: "nccl", or "gloo" for tensors of the CPU.
    """
    carrier = None
    try:
        bridge = _bridge(name, ranks, places, store, timeout_ms)
        if bridge is not None:
            timeout = timedelta(milliseconds=timeout_ms)
            try:
                own = _torch_compat.PrefixStore(f"{backend} of lane {places.lane}", store)
                made = _torch_compat.make_backend(backend, own, places.host, len(places.hosts), timeout)
            except RuntimeError as error:
                bridge.close()
                raise PhalanxError(f"group '{name}': no {backend} between its hosts: {error}", group=name) from None
            ends = [ranks[host[places.local]] for host in places.hosts]
            carrier = Carrier(made, bridge, ends, name, timeout)
    except PhalanxError as error:
        inside.revoke(str(error))
        raise
    return GpuSpanning(name, places, inside, carrier, timeout_ms)


def _bridge(name: str, ranks: Sequence[int], places: Places, store: Any, timeout_ms: int) -> Bridge | None:
    """That of this rank's lane, if it has one. Collective."""
    lane = places.lane
    if lane is None:
        return None
    ends = [ranks[host[lane]] for host in places.hosts]
    own = _torch_compat.PrefixStore(f"lane {lane}", store)
    return Bridge(own, places.host, ends, timedelta(milliseconds=timeout_ms), name)


def watch(group: dist.ProcessGroup, gone: Callable[[], None]) -> tuple[Any, ...]:
    """Call `gone` when torch.distributed forgets the group, or the group dies. May call it more than once.

    Returns:
        What must be kept for that.
    """

    def call(_: Any) -> None:
        gone()

    return weakref.ref(group, call), weakref.ref(_torch_compat.life_of(group), call)


# By the id of the process group, or of the core's; id of the default group. An id is not used again before its entry is
# gone.
_entries: dict[int, Entry] = {}
_ranks: dict[int, Rank] = {}
_lock = threading.RLock()  # reentrant: a garbage collection may call _forget at any time

# The decided entries, by id of the process group and, where that is unique, by name: what the fast road looks at.
ready: dict[int | str, Entry] = {}


def entry_of(group: dist.ProcessGroup) -> Entry:
    """The entry of a process group; a new one, undecided, the first time. Not collective.

    Raises:
        ValueError: The group was destroyed, or this rank is not in it.
    """
    entry = _entries.get(id(group))
    if entry is not None:
        return entry
    if not _torch_compat.is_registered(group):
        raise ValueError(
            f"the process group {group!r} is not one of this rank's: it was destroyed, or made by other means than "
            "torch.distributed.init_process_group and new_group"
        )
    default = dist.group.WORLD
    assert default is not None
    with _lock:
        rank = _ranks.get(id(default))
        if rank is None:
            rank = _ranks[id(default)] = Rank(default)
        entry = _entries.get(id(group))
        if entry is None:
            entry = _entries[id(group)] = _ProcessGroupEntry(group, rank)
        return entry


def entry_of_core(group: Group) -> Entry:
    """The entry of a group of the core, which is released with it. Not collective."""
    entry = _entries.get(id(group))
    if entry is not None:
        return entry
    with _lock:
        entry = Entry(f"{group.name}@{group.id:016x}", group.group_rank, group.ranks)
        entry.register(group)
        # Not entry.core = group: the entry must not keep it alive.
        entry.core = weakref.proxy(group)
        entry.decided = True
        _entries[id(group)] = ready[id(group)] = ready[entry.name] = entry
        weakref.finalize(group, _forget, id(group)).atexit = False
    return entry


def entry_named(name: str) -> Entry:
    """The entry of the group of that name in this rank. Not collective.

    Raises:
        ValueError: There is none.
    """
    found = ready.get(name)
    if found is not None:
        return found
    group = _torch_compat.group_named(name)
    if group is None:
        raise ValueError(
            f"no process group is named '{name}' in this rank; a group's name is its attribute group_name. Was it "
            "destroyed, or torch.distributed.init_process_group not called?"
        )
    return entry_of(group)


def making_a_group() -> bool:
    """Whether the calling thread is inside the core's group_create, where no other call into it is allowed."""
    return any(rank.making_a_group() for rank in list(_ranks.values()))


def release_rank() -> None:
    """Release everything of the calling rank. Not collective."""
    default = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    rank = _ranks.get(id(default)) if default is not None else None
    if rank is not None:
        _end_rank(rank)


def _forget(key: int) -> None:
    with _lock:
        entry = _entries.pop(key, None)
        ready.pop(key, None)
        if entry is not None and ready.get(entry.name) is entry:
            del ready[entry.name]
    if entry is not None:
        entry.release()


def _end_rank(rank: Rank) -> None:
    with _lock:
        for key in [key for key, entry in _entries.items() if getattr(entry, "_rank", None) is rank]:
            _forget(key)
        for key in [key for key, each in _ranks.items() if each is rank]:
            del _ranks[key]
    rank.close()


@atexit.register
def _end_all() -> None:
    for rank in list(_ranks.values()):
        _end_rank(rank)
