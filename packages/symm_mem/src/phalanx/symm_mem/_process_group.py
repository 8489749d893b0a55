"""Groups: those of torch, and groups that are defined by a name and a store."""

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from phalanx.collectives import GroupLike, c10d, check_group, process_group_of
from phalanx.core import (
    AlreadyExistsError,
    Group,
    InvalidArgumentError,
    NotFoundError,
    PeerDeadError,
    PhalanxError,
    RevokedError,
    UnsupportedError,
    as_store,
    load_torch_ops,
)
from phalanx.core.torch_ops import EVERY_CONTEXT
from phalanx.symm_mem import _torch_compat
from phalanx.symm_mem._state import RankContext, Slot, current

_serials = itertools.count(1)
_STORE_PREFIX = "phalanx.symm_mem"  # of the keys of this package in the store of a process group


@dataclass(frozen=True)
class GroupInfo:
    """The arguments of `set_group_info`.

    Attributes:
        rank: This rank's position in the group.
        world_size: Number of ranks of the group.
        store: The store through which the ranks exchange addresses.
    """

    rank: int
    world_size: int
    store: Any


class _WatchingStore:
    """The torch Store of a process group, which checks that its ranks are alive while the core waits for them."""

    def __init__(self, base: Any, process_group: Callable[[], dist.ProcessGroup | None]) -> None:
        self._base, self._process_group = base, process_group
        self.set, self.get, self.add, self.wait = base.set, base.get, base.add, base.wait
        self.delete_key, self.compare_set = base.delete_key, base.compare_set

    def check(self, keys: list[str]) -> bool:
        if self._base.check(keys):
            return True
        process_group = self._process_group()
        if process_group is not None:
            try:
                check_group(process_group)
            except PeerDeadError as error:
                name = process_group.group_name
                text = f"rendezvous on group {name!r}: {error}. Make a new process group without it."
                dead = PeerDeadError(text, rank=error.rank, peer=error.peer, operation="rendezvous", group=name)
                dead.callback_status = dead.status  # type: ignore[attr-defined]
                raise dead from None
        return False


class RankGroup:
    """A group as this rank sees it. It is initialized at the first rendezvous."""

    def __init__(self, name: str, info: GroupInfo, process_group: dist.ProcessGroup | None = None) -> None:
        self.name = name
        self.info = info
        self.changed_store = None if process_group is None else c10d.changed_store(process_group)
        # Weak: a process group that is destroyed must not be kept alive here.
        self.process_group = None if process_group is None else weakref.ref(process_group)
        self.global_ranks = tuple(range(info.world_size))
        if process_group is not None:
            self.global_ranks = _torch_compat.ranks_of(process_group)
        self.slots: dict[Slot[Any], Any] = {}  # values of other modules: buffers
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._failure: PhalanxError | None = None
        self._native_name: str | None = None

    def initialize(self, context: RankContext, timeout_ms: int) -> Group:
        """The group of the core. Collective the first time."""
        if self._group is not None:
            return self._group
        with self._lock:
            if self._group is None:
                self._group = self._attach(context, timeout_ms)
            return self._group

    def initialized(self) -> Group | None:
        """The group of the core, or None before its initialization. Not collective."""
        return self._group

    def native_name(self) -> str:
        """The name by which native ops of torch.ops.phalanx find the group. Collective the first time."""
        if self._native_name is None:
            group, ops = self.initialize(current(), 0), load_torch_ops()
            # Unique in the process: several ranks of a process may use the same group name.
            name = f"{self.name} (symm_mem {next(_serials)})"
            ops.check(ops.lib.phxt_group_add(EVERY_CONTEXT, name.encode(), group.pointer))
            weakref.finalize(self, ops.lib.phxt_group_remove, EVERY_CONTEXT, name.encode())
            self._native_name = name
        return self._native_name

    def _attach(self, context: RankContext, timeout_ms: int) -> Group:
        if self._failure is not None:
            raise RevokedError(
                f"rendezvous on group {self.name!r}: its ranks failed to connect before, so they may be out of step; "
                f"use a group of another name. The first failure was: {self._failure}",
                group=self.name,
            )
        info = self.info
        default_ms = context.timeout_ms or self._timeout_ms()
        try:
            store = info.store if self.process_group is None else _WatchingStore(info.store, self.process_group)
            group = context.world.attach_group(self.name, info.rank, info.world_size, store, timeout_ms or default_ms)
            group.set_timeout(default_ms)
            return group
        except (InvalidArgumentError, UnsupportedError):  # no other rank took part, or all ranks got the same error
            raise
        except PhalanxError as error:
            if isinstance(error.__cause__, PeerDeadError):  # from _WatchingStore, with global ranks
                self._failure = error.__cause__
                raise error.__cause__ from None
            self._failure = self.with_global_ranks(error)
            raise

    def _timeout_ms(self) -> int:
        """The timeout of the process group, or 0 if it is not known."""
        process_group = None if self.process_group is None else self.process_group()
        return 0 if process_group is None else _torch_compat.timeout_ms_of(process_group)

    def with_global_ranks(self, error: PhalanxError) -> PhalanxError:
        """Change an error of the core, which has group ranks, to name the global ranks."""
        if self.global_ranks == tuple(range(len(self.global_ranks))):
            return error
        listed = ", ".join(map(str, self.global_ranks))
        own = ", ".join(map(str, range(len(self.global_ranks))))
        error.args = (f"{error} (Ranks {own} of group {self.name!r} are the global ranks {listed}.)",)
        error.rank, error.peer = self._global(error.rank), self._global(error.peer)
        return error

    def _global(self, rank: int) -> int:
        return self.global_ranks[rank] if 0 <= rank < len(self.global_ranks) else rank


_groups: Slot[dict[str, RankGroup]] = Slot(dict)  # the groups of a rank, by name


def set_group_info(group_name: str, rank: int, world_size: int, store: Any) -> None:
    """Define a group by name, without a ProcessGroup. Not collective: the first rendezvous initializes the group.

    As `_SymmetricMemory.set_group_info` of torch.

    Args:
        group_name: The name, the same on all ranks of the group.
        rank: This rank's position in the group, 0 to world_size - 1.
        world_size: Number of ranks of the group.
        store: A torch.distributed.Store, a phalanx.core.Store, or an object with the methods of the former. It is used
            for the initialization only.

    Raises:
        AlreadyExistsError: The name is taken.
        InvalidArgumentError: An argument is wrong.

    Example:
        >>> set_group_info("pair", rank, 2, dist.FileStore("pair", 2))
        >>> rendezvous(empty(4), "pair").world_size
        2
    """
    if not isinstance(group_name, str) or not group_name:
        raise InvalidArgumentError(f"set_group_info: group_name is {group_name!r}; give a name")
    if not isinstance(world_size, int) or world_size < 1:
        raise InvalidArgumentError(
            f"set_group_info: world_size is {world_size!r}; give the number of ranks of group {group_name!r}, 1 or more"
        )
    if not isinstance(rank, int) or not 0 <= rank < world_size:
        raise InvalidArgumentError(
            f"set_group_info: rank is {rank!r}; the ranks of group {group_name!r} are 0 to {world_size - 1}"
        )
    as_store(store)  # raises if it is not a store
    group = RankGroup(group_name, GroupInfo(rank, world_size, store))
    if _groups.of(current()).setdefault(group_name, group) is not group:
        raise AlreadyExistsError(
            f"set_group_info: a group named {group_name!r} exists already; use another name", group=group_name
        )


def get_group_info(group_name: str) -> GroupInfo:
    """The rank, size and store of a group. Not collective.

    Args:
        group_name: A name given to `set_group_info`, or the name of a torch process group.

    Raises:
        NotFoundError: There is no such group.

    Example:
        >>> get_group_info(group.group_name).world_size
        2
    """
    return resolve(group_name, "get_group_info").info


def enable_symm_mem_for_group(group_name: str) -> None:
    """Check that a torch process group exists. Not needed before `rendezvous`. Not collective.

    As the function of this name in `torch.distributed._symmetric_memory`.

    Args:
        group_name: Name of the process group.

    Raises:
        NotFoundError: There is no such group.

    Example:
        >>> enable_symm_mem_for_group(group.group_name)
    """
    resolve(group_name, "enable_symm_mem_for_group")


def resolve(group: GroupLike, operation: str) -> RankGroup:
    """The group for a group argument. Not collective.

    Raises:
        NotFoundError: No group has this name.
        InvalidArgumentError: The argument is not a group.
    """
    context = current()
    if not isinstance(group, str):
        try:
            process_group = process_group_of(group, operation=operation)
        except (ValueError, AssertionError) as error:
            raise InvalidArgumentError(str(error)) from None
        return _from_process_group(context, process_group, operation)
    known = _groups.of(context).get(group)
    if known is not None and known.process_group is None:
        return known
    named = _torch_compat.process_group_named(group)
    if named is None:
        raise NotFoundError(
            f"{operation}: there is no group named {group!r}; call set_group_info({group!r}, ...) first, or give the "
            "name of a torch process group",
            group=group,
        )
    return _from_process_group(context, named, operation)


def _from_process_group(context: RankContext, process_group: dist.ProcessGroup, operation: str) -> RankGroup:
    name, groups = process_group.group_name, _groups.of(context)
    known = groups.get(name)
    if known is not None:
        before = known.process_group() if known.process_group is not None else None
        if before is process_group and known.changed_store is c10d.changed_store(process_group):
            return known
        if known.process_group is None:
            raise AlreadyExistsError(
                f"{operation}: the process group {name!r} has the same name as a group made by set_group_info; give "
                "set_group_info another name",
                group=name,
            )
        if before not in (None, process_group) and before.rank() != process_group.rank():
            raise InvalidArgumentError(
                f"{operation}: group {name!r} has rank {before.rank()} and rank {process_group.rank()} in this "
                "context; if the ranks are threads of one process, each needs its own `with rank_context():`",
                group=name,
            )
        # Otherwise it was destroyed and this is a new one of the same name, or its ranks have changed.
    if _torch_compat.is_fake(process_group):
        raise UnsupportedError(
            f"{operation}: the ranks of group {name!r} are not processes (its backend is 'fake'), so there is no "
            "memory to share; use a group of another backend",
            group=name,
        )
    # Groups of other ranks may have the same name and store.
    ranks = "_".join(map(str, _torch_compat.ranks_of(process_group)))
    base = c10d.changed_store(process_group) or _torch_compat.store_of(process_group)
    store = _torch_compat.PrefixStore(f"{_STORE_PREFIX}/{ranks}", base)
    group = RankGroup(name, GroupInfo(process_group.rank(), process_group.size(), store), process_group)
    with context.lock:
        if groups.get(name) is known:
            groups[name] = group
    return groups[name]
