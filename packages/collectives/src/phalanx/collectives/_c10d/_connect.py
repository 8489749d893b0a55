"""How the ranks of a process group of the backend get their group of the core: at its first collective or message."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from phalanx.collectives import _registry
from phalanx.collectives._bootstrap import Bootstrap, FirstFailure
from phalanx.collectives._torch_compat import PrefixStore
from phalanx.core import Group, InvalidArgumentError, RevokedError, UnsupportedError, World, ffi, lib
from phalanx.core.timeouts import milliseconds

hosts: dict[str, list[str]] = {}  # of the ranks of a default group, by its name


@cache
def host_name() -> str:
    """What this rank calls its host: the same exactly on ranks that can share memory."""
    with World(0, 1) as alone:
        return f"{alone.host_id:x}"


def default_ms(name: str, timeout: timedelta) -> int:
    """The timeout of a group in milliseconds.

    Raises:
        InvalidArgumentError: It is negative, which gloo refuses as well.
    """
    found = milliseconds(timeout)
    if timeout < timedelta(0) and found == 1:
        raise InvalidArgumentError(
            f"group '{name}': a timeout must not be negative, and this is {timeout.total_seconds()} s"
        )
    return found


@dataclass(frozen=True)
class Options:
    """Options of a process group of this backend: `pg_options` of init_process_group and new_group.

    Attributes:
        reduction_order: In which order a group on several hosts adds up: "hosts", or "ranks" for the bits of one host;
            see `phalanx.core.World.create_group`. The same on all ranks. None is what PHALANX_REDUCTION_ORDER says.

    Raises:
        InvalidArgumentError: There is no such order.

    Example:
        >>> Options(reduction_order="ranks")
        Options(reduction_order='ranks')
    """

    reduction_order: str | None = None

    def __post_init__(self) -> None:
        if self.reduction_order not in (None, "hosts", "ranks"):
            raise InvalidArgumentError(
                f"reduction_order is {self.reduction_order!r}; expected 'hosts', 'ranks' or None"
            )

    @property
    def keeps_order_of_ranks(self) -> bool:
        """Whether the ranks must be added in their order on several hosts too, as only the core does."""
        return (self.reduction_order or os.environ.get("PHALANX_REDUCTION_ORDER")) == "ranks"


class Connection:
    """A process group of the backend, and what the core has for it.

    Args:
        name, store, timeout_ms, options: Those of the process group.
        ranks: Its global ranks, in order.
        position: The position of this rank among them.
        by_hand: Whether it is known not to be one of the groups that torch makes of ranks of the default group.
        key: The name of the process group in this process, where that is not `name`.
        changed: Whether these are other ranks than those that the process group was made with.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        position: int,
        store: Any,
        timeout_ms: int,
        options: Options,
        *,
        by_hand: bool = True,
        key: str = "",
        changed: bool = False,
    ) -> None:
        self.name = name
        self.key = key or name
        self.store = store
        self.changed_store = store if changed else None  # which torch does not know
        self.timeout_ms = timeout_ms
        self.options = options
        self._by_hand = by_hand
        self._rank: _registry.Rank | None = None
        self._rank_is_own = False
        self.ranks = tuple(ranks)
        self.position = position
        self.token = ""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._group: Group | None = None
        self._failure = FirstFailure(name)
        self._closed = False
        _registry.connections[self.key] = self

    def group(self, timeout_ms: int) -> Group:
        """The core's group. Collective the first time.

        Raises:
            WaitTimeoutError: Ranks did not come in time; the text names them. It may be tried again.
            UnsupportedError: The core cannot serve these ranks: they are on several hosts, and there is no UCX. The
                same on every rank.
            PhalanxError: The ranks could not meet. Every later call raises too.
        """
        if self._pid != os.getpid():  # before the lock, which may have been held at the fork
            raise UnsupportedError(_registry.inherited(self.name, self._pid), group=self.name)
        with self._lock:
            group = self._group
            if group is not None:
                return group
            with self._failure:
                group = self._meet(timeout_ms)
            with self._ending:
                try:
                    self._check()
                except RevokedError as error:
                    group.revoke(str(error))  # the others have met, and would wait for this rank
                    raise
                self._group = group
                return group

    def share_rank(self) -> _registry.Rank | None:
        """The rank that serves the group, if its ranks are connected; shared, so `close` leaves it open."""
        self._rank_is_own = False
        return self._rank

    def adopt_rank(self) -> None:
        """Leave the world of the rank when this is closed: its group, the default one, gets other ranks."""
        self._rank_is_own = True

    def _check(self) -> None:
        """Raise RevokedError if this was closed, also while the ranks meet."""
        if self._closed:
            text = f"group '{self.name}' was aborted or destroyed by rank {self.ranks[self.position]}"
            raise RevokedError(text, operation="enable_group", group=self.name)

    def set_timeout(self, timeout_ms: int) -> None:
        """Set the default of later waits on the core's group, which functional collectives share."""
        self.timeout_ms = timeout_ms
        group = self._group
        if group is not None:
            group.set_timeout(timeout_ms)

    def address(self, timeout_ms: int) -> tuple[int, str]:
        """Where the core's group is in memory, retained, and the token of its bootstrap. Collective the first time."""
        group = self.group(timeout_ms)
        return int(ffi.cast("uintptr_t", lib.phx_group_retain(group.pointer))), self.token

    def block(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The block of symmetric memory that a tensor lies in: see `SymmetricMemory.block`."""
        return (0, 0) if _registry.symmetric_memory is None else _registry.symmetric_memory.block(tensor)

    def close(self) -> None:
        """Let go of the core's group; whoever is meeting gives up. Not collective. A second call does nothing."""
        if self._pid != os.getpid():
            return
        with self._ending:
            self._closed = True
            released, self._group = self._group, None
            rank = self._rank if self._rank_is_own else None
        if _registry.connections.get(self.key) is self:
            del _registry.connections[self.key]
        del released  # not under the lock
        if rank is not None:
            rank.close()

    def _meet(self, timeout_ms: int) -> Group:
        with self._ending:
            self._check()
            if self._rank is None:
                self._rank, self._rank_is_own = _registry.rank_of(
                    self.ranks, self.position, self.store, self.timeout_ms, self._by_hand
                )
            rank = self._rank

        def check_peer(number: int) -> None:
            self._check()
            rank.check_peer(number)

        # Groups of one name and other ranks, such as the rows of a mesh, may meet at the same time.
        store = PrefixStore(f"phalanx/c10d/{self.name}/{_registry.members(self.ranks)}", self.store)
        bootstrap = Bootstrap(store, self.name, self.ranks, self.position, timeout_ms, check_peer, self.timeout_ms)
        self.token = bootstrap.run("").token
        with rank.store.use(PrefixStore(self.token, store)):
            group = rank.world().create_group(
                self.name, self.ranks, timeout_ms, reduction_order=self.options.reduction_order
            )
        group.set_timeout(self.timeout_ms)
        return group
