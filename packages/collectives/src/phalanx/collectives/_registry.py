"""Which process groups the core serves, and what belongs to them. All state belongs to a rank, none to the process.

A rank is known by its default process group: torch's own tests run several ranks in one process, each in a thread with
a default group of its own. The ranks of a group meet at its first collective on a CPU tensor. What was made then is
released when torch.distributed forgets the group (destroy_process_group), or when the group is garbage.
"""

import atexit
import hashlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from phalanx.collectives import _library, _torch_compat
from phalanx.collectives._bootstrap import Bootstrap, FirstFailure, StoreInUse
from phalanx.collectives._group_state import GroupState, tell
from phalanx.collectives._work import complete_works
from phalanx.core import CallbackStore, Group, UnsupportedError, World
from phalanx.core.timeouts import milliseconds
from phalanx.core.world import abort_after_error

# Backends whose ranks are processes and have a store. Others (fake, threaded, mpi, ...) stay with torch.distributed.
_BACKENDS = {"gloo", "nccl", "ucc", "xccl"}
_MAX_WORLD_SIZE = 4096  # of the core


class Rank:
    """One rank of `size`: the core's world, made when its first group is. The timeout is that of groups without one."""

    def __init__(self, rank: int, size: int, timeout_ms: int) -> None:
        self.rank = rank
        self.size = size
        self.pid = os.getpid()
        self.store = StoreInUse()
        self._timeout_ms = timeout_ms
        self._lock = threading.RLock()
        self._world: World | None = None
        self.watch: tuple[Any, ...] = ()
        self.default_id = 0
        _live.add(self)

    def world(self) -> World:
        """The core's world, made at the first call."""
        with self._lock:
            if self._world is None:
                store = CallbackStore(self.store)
                self._world = World(self.rank, self.size, store, timeout_ms=self._timeout_ms)
            return self._world

    def check_peer(self, number: int) -> None:
        """Raise if that rank of the world is known to have ended. Never blocks.

        Raises:
            PeerDeadError: It has; the text names it and its process.
        """
        world = self._world
        if world is not None:
            world.check_peer(number)

    def close(self) -> None:
        """Leave the world, if there is one. In a forked child, nothing."""
        if self.pid != os.getpid():
            return
        with self._lock:
            world, self._world = self._world, None
        if world is not None:
            world.finalize()


class Connection(Protocol):
    """A process group of the backend `phalanx`, as it is served: see c10d/_connect.py."""

    timeout_ms: int
    ranks: tuple[int, ...]
    changed_store: Any

    def group(self, timeout_ms: int) -> Group: ...
    def set_timeout(self, timeout_ms: int) -> None: ...
    def share_rank(self) -> Rank | None: ...


class SymmetricMemory(Protocol):
    """Where windows of the backend find the memory of tensors: phalanx.symm_mem, once it was imported."""

    def block(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The first byte of the block that a tensor lies in, and the address of the phx_world of that block.

        Two zeros if it lies in none. Not collective.

        Args:
            tensor: On the CPU.
        """


symmetric_memory: SymmetricMemory | None = None
connections: dict[str, Connection] = {}  # by name of the process group, while it is not destroyed


def rank_of_default() -> Rank | None:
    """The rank that serves groups of the default group's ranks, once there is one.

    That of a default group on several hosts is made with it, before torch says which the default group is.
    """
    default = dist.group.WORLD
    if default is None:
        return None
    with _lock:
        rank = _ranks.get(id(default))
        connection = connections.get(str(default.group_name))
        if rank is None and connection is not None:
            rank = connection.share_rank()
            if rank is not None:
                _add_rank(default, rank)
        return rank


def _add_rank(default: dist.ProcessGroup, rank: Rank) -> None:
    """Let a rank serve the groups of a default group, until that ends."""
    rank.default_id = id(default)
    _ranks[rank.default_id] = rank
    rank.watch = watch(default, lambda: _end_rank(rank))


def rank_of(
    ranks: Sequence[int], position: int, store: Any, timeout_ms: int, by_hand: bool = False
) -> tuple[Rank, bool]:
    """The rank that a group of the caller is served as, and whether that is for this group alone.

    Groups that torch made of ranks of the default group share its world. A group made by hand, or by an elastic
    manager, may have ranks of several default groups or of none, in any order: it has a world of its own, in which its
    ranks have the numbers that the group gives them. Its owner closes it. `by_hand` says that it is known to be one.
    """
    default = dist.group.WORLD
    if default is None or by_hand or not _is_of_default(ranks, position, store):
        return Rank(ranks[position], max(ranks) + 1, timeout_ms), True
    with _lock:
        rank = rank_of_default()
        if rank is None:
            timeout = _torch_compat.timeout_ms_of(default) or timeout_ms
            rank = Rank(dist.get_rank(), dist.get_world_size(), timeout)
            _add_rank(default, rank)
        return rank, False


def check_group(group: dist.ProcessGroup) -> None:
    """Raise if a rank of a group is known to have ended. Never blocks. Not collective.

    This rank knows it of a rank that it is connected to, in any group that torch made of ranks of the default group.
    For code that waits for the ranks of a group by means of its own.

    Args:
        group: A process group; its ranks need not be connected.

    Raises:
        PeerDeadError: A rank has ended; the text names it and its process.

    Example:
        >>> check_group(group)  # no rank of it is known to have ended
    """
    rank = rank_of_default()
    if rank is None:
        return
    ranks, own = _torch_compat.ranks_of(group), int(group.rank())
    if not _is_of_default(ranks, own, _torch_compat.store_of(group)):
        return
    for each in ranks:
        if each != ranks[own]:
            rank.check_peer(each)


def _is_of_default(ranks: Sequence[int], position: int, store: Any) -> bool:
    """Whether the numbers of a group are those of the default group, which has the same store below all prefixes."""
    if ranks[position] != dist.get_rank() or max(ranks) >= dist.get_world_size():
        return False
    return _torch_compat.base_of(store) is _torch_compat.base_of(_torch_compat.default_store())


class _ProcessGroupState(GroupState):
    """The state of a group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        connection = connections.get(name)  # it knows the ranks of a group that was reconfigured
        ranks = _torch_compat.ranks_of(group) if connection is None else connection.ranks
        super().__init__(name, int(group.rank()), ranks)
        self._by_hand = not _torch_compat.is_known(group)
        if self._by_hand:  # somebody registered it by a name, which may mean another group later
            self.op_name = f"{name}@{id(group):x}"
        self._rank: Rank | None = None  # once its ranks begin to meet
        self._rank_is_own = False
        self._default_id = _default_id()
        self._failure = FirstFailure(name)
        self._lock = threading.Lock()
        self._group = weakref.ref(group)
        key = id(group)
        self._watch = watch(group, lambda: _forget(key))

    def decide(self) -> None:
        if self._pid != os.getpid():  # before the lock, which may have been held at the fork
            raise UnsupportedError(inherited(self.name, self._pid), group=self.name)
        with self._lock:
            if self.decided:
                return
            with self._failure:
                core = self._meet()
            if core is not None:
                self.attach(core)
            self.decided = True
        group = self._group()
        if group is not None and _states.get(id(group)) is self:
            ready[id(group)] = self
            if type(group) is dist.ProcessGroup:  # names of the threaded groups of torch's tests are per thread
                ready[self.op_name] = self
        else:  # destroyed meanwhile
            self.release()

    def _meet(self) -> Group | None:
        group = self._group()
        connection = connections.get(self.name)
        if group is None:
            return None
        if connection is not None:  # of the backend `phalanx`: its group of the core
            return connection.group(connection.timeout_ms)
        if type(group) is not dist.ProcessGroup or _torch_compat.backends_of(group) - _BACKENDS:
            return None
        base = _torch_compat.store_of(group)
        timeout_ms = _torch_compat.timeout_ms_of(group) or milliseconds(base.timeout)
        if self._rank is None:
            self._rank, self._rank_is_own = rank_of(self.ranks, self.group_rank, base, timeout_ms, self._by_hand)
        rank = self._rank
        refusal = _library.refusal()
        if rank.size > _MAX_WORLD_SIZE:
            refusal = f"there are {rank.size} ranks, more than {_MAX_WORLD_SIZE}"
        # Groups of other ranks may have its name and its store.
        store = _torch_compat.PrefixStore(f"phalanx/{self.name}/{members(self.ranks)}", base)
        bootstrap = Bootstrap(store, self.name, self.ranks, self.group_rank, timeout_ms, rank.check_peer)
        answer = bootstrap.run(refusal)
        if answer.refusal:
            tell(self.name, self.group_rank, f"it goes through torch.distributed: {answer.refusal}")
            return None
        try:
            with rank.store.use(_torch_compat.PrefixStore(answer.token, store)):
                core = rank.world().create_group(self.name, self.ranks, timeout_ms)
        except UnsupportedError as error:  # raised on every rank
            tell(self.name, self.group_rank, f"it goes through torch.distributed: {error}")
            return None
        core.set_timeout(timeout_ms)
        return core

    def release(self) -> None:
        super().release()
        if self._rank is not None and self._rank_is_own:
            self._rank.close()


def members(ranks: Sequence[int]) -> str:
    """A short name of the ranks of a group: groups of one name and other ranks, such as the rows of a mesh, may meet at
    the same time."""
    return hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]


def watch(group: dist.ProcessGroup, gone: Callable[[], None]) -> tuple[Any, ...]:
    """Call `gone` when torch.distributed forgets the group, or the group dies, as long as the result is kept. May call
    it more than once."""

    def call(_: Any, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            gone()

    return weakref.ref(group, call), weakref.ref(_torch_compat.life_of(group), call)


# By the id of the process group, or of the core's; id of the default group. An id is not used again before its state is
# gone.
_states: dict[int, GroupState] = {}
_ranks: dict[int, Rank] = {}
_live: weakref.WeakSet[Rank] = weakref.WeakSet()
_lock = threading.RLock()  # reentrant: a garbage collection may call _forget at any time

# The decided states, by id of the process group and, where that is unique, by name: where the fast path looks.
ready: dict[int | str, GroupState] = {}


def state_of(group: dist.ProcessGroup, name: str | None = None, operation: str = "a collective") -> GroupState:
    """The state of a process group; a new one, undecided, the first time. Not collective.

    `name` is that by which torch has found it, if not its own. The text of an error begins with `operation`.

    Raises:
        ValueError: The group was destroyed, or this rank is not in it.
    """
    state = _states.get(id(group))
    if state is not None:
        return state
    if name is None and not _torch_compat.is_registered(group):
        raise ValueError(
            f"{operation}: this rank does not know the process group {group!r}: it was destroyed, or was not made by "
            "torch.distributed.init_process_group or new_group; make a new one with one of these"
        )
    name = _torch_compat.name_of(group) or str(name)
    if group in _inherited:
        raise UnsupportedError(inherited(name, _inherited[group]), group=name)
    with _lock:
        state = _states.get(id(group))
        if state is None:
            state = _states[id(group)] = _ProcessGroupState(group, name)
        return state


def state_of_core(group: Group) -> GroupState:
    """The state of a group of the core, which is released with it. Not collective."""
    state = _states.get(id(group))
    if state is not None:
        return state
    with _lock:
        state = GroupState(f"{group.name}@{group.id:016x}", group.group_rank, group.ranks)
        state.attach(group, weakref.proxy(group))  # the state must not keep it alive
        state.decided = True
        _states[id(group)] = ready[id(group)] = ready[state.name] = state
        weakref.finalize(group, _forget, id(group)).atexit = False
    return state


def state_named(name: str, operation: str = "a collective") -> GroupState:
    """The state of the process group, or core group, of that name in this rank. Not collective.

    Raises:
        ValueError: There is none.
    """
    found = ready.get(name)
    if found is not None:
        return found
    group = _torch_compat.group_named(name)
    if group is None:
        for state in list(_states.values()):
            if state.op_name == name:
                return state
        raise ValueError(
            f"{operation}: no process group is named '{name}' in this rank; the name of a group is its attribute "
            "group_name. Was the group destroyed, or torch.distributed.init_process_group not called?"
        )
    return state_of(group, name, operation)


def _default_id() -> int:
    """By which the calling rank is known."""
    default = dist.group.WORLD if dist.is_available() else None
    return 0 if default is None else id(default)


def forget_group(name: str) -> bool:
    """Forget what is known of the group of that name: its ranks have changed. Not collective.

    Returns:
        Whether it is the default group, and a rank served groups of its ranks.
    """
    default = dist.group.WORLD
    rank = None
    for key in [key for key, state in list(_states.items()) if state.name == name]:
        _forget(key)
    if default is not None and str(default.group_name) == name:
        with _lock:
            rank = _ranks.pop(id(default), None)
    return rank is not None


def release_rank() -> None:
    """Release everything of the calling rank. Not collective."""
    default = _default_id()
    rank = _ranks.get(default)
    _forget_all(default)
    if rank is not None:
        _end_rank(rank)


def _forget_all(default: int) -> None:
    with _lock:
        for key in [key for key, state in _states.items() if getattr(state, "_default_id", -1) == default]:
            _forget(key)


def _complete_all() -> None:
    """Wait for what this process has started and nobody has waited for: the others need its part of it."""
    with _lock:
        states = list(_states.values())
    for state in states:
        state.complete()  # in a forked child, nothing
    complete_works()


def _forget(key: int) -> None:
    with _lock:
        state = _states.pop(key, None)
        ready.pop(key, None)
        if state is not None and ready.get(state.op_name) is state:
            del ready[state.op_name]
    if state is not None:
        state.release()


def _end_rank(rank: Rank) -> None:
    with _lock:
        _forget_all(rank.default_id)
        for key in [key for key, each in _ranks.items() if each is rank]:
            del _ranks[key]
    rank.close()


# Actions at the end of the process, before its worlds are left.
before_end: list[Callable[[], None]] = []


@atexit.register
def _end_all() -> None:
    if not abort_after_error():
        _complete_all()
    for action in before_end:
        action()
    with _lock:
        for key in list(_states):
            _forget(key)
    for rank in list(_live):
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
