"""Which process groups the core serves, and what belongs to them. All state belongs to a rank, none to the process.

A rank is known by its default process group: torch's own tests run several ranks in one process, each in a thread with
a default group of its own. The ranks of a group meet at its first collective on a CPU tensor. What was made then is
released when torch.distributed forgets the group (destroy_process_group), or when the group is garbage.
"""

import atexit
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives import _gpus, _ops, _torch_compat
from phalanx.collectives._entry import Entry, log
from phalanx.collectives._hosts import GpuSpanning, Places, Spanning, span, span_on_gpus
from phalanx.collectives._meeting import Meeting, TokenStore
from phalanx.core import (
    CallbackStore,
    Group,
    PhalanxError,
    RevokedError,
    UnsupportedError,
    WaitTimeoutError,
    World,
)

# Backends whose ranks are processes and have a store. Others (fake, threaded, mpi, ...) stay with torch.distributed.
_BACKENDS = {"gloo", "nccl", "ucc", "xccl"}
_MAX_WORLD_SIZE = 4096  # of the core


class Rank:
    """One rank: the core's world, made when its first group is."""

    def __init__(self, default_group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.pid = os.getpid()
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
        """Leave the world, if there is one. In a forked child, nothing."""
        if self.pid != os.getpid():
            return
        with self._lock:
            world, self._world = self._world, None
        if world is not None:
            world.finalize()


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
        if self._rank.pid != os.getpid():  # before the lock, which may have been held at the fork
            raise UnsupportedError(inherited(self.name, self._rank.pid), group=self.name)
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
            return None, span(rank.world(), self.name, self.ranks, places, own, rank.timeout_ms, self.name)[1]
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
    if group in _inherited:
        raise UnsupportedError(inherited(str(group.group_name), _inherited[group]), group=str(group.group_name))
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


# ---- forks: the groups of a process are of no use in its forked child, which makes groups of its own

# The process groups that were made before the fork, and by which process.
_inherited: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def inherited(name: str, pid: int) -> str:
    """The text for a group that a forked child has from its parent."""
    return (
        f"group '{name}' belongs to process {pid}, and this process ({os.getpid()}) is a fork of it: threads and "
        "connections do not survive a fork. Call init_process_group after the fork, or start processes with the "
        "'spawn' method"
    )


def _after_fork_in_child() -> None:
    # Any thread of the parent may have held it.
    _lock._at_fork_reinit()  # type: ignore[attr-defined]
    for group in _torch_compat.registered_groups():
        _inherited.setdefault(group, os.getppid())


os.register_at_fork(after_in_child=_after_fork_in_child)
