"""How the ranks of a process group of the backend get their group of the core: at its first collective or message."""

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

from phalanx.collectives import _registry
from phalanx.collectives._meeting import Meeting
from phalanx.collectives._torch_compat import PrefixStore
from phalanx.collectives.c10d import _torch_compat
from phalanx.core import Group, PhalanxError, RevokedError, UnsupportedError, WaitTimeoutError, ffi

# By name of the process group, while it is not destroyed.
connections: dict[str, "Connection"] = {}


class Connection:
    """A process group of the backend, and what the core has for it.

    Args:
        name: Of the process group.
        ranks: Its global ranks, in order.
        position: Of this rank among them.
    """

    def __init__(self, name: str, ranks: Sequence[int], position: int) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.position = position
        self.token = ""
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._failure: PhalanxError | None = None
        self._closed = False
        connections[name] = self

    def group(self, timeout_ms: int) -> Group:
        """The core's group. Collective the first time.

        Args:
            timeout_ms: How long to wait for the others, in milliseconds.

        Raises:
            WaitTimeoutError: Ranks did not come in time; the text names them. It may be tried again.
            UnsupportedError: The ranks are not on one host.
            PhalanxError: The ranks could not meet. Every later call raises too.
        """
        with self._lock:
            if self._group is None:
                if self._failure is not None:
                    text = f"the ranks of group '{self.name}' could not meet before; make a new process group. "
                    raise RevokedError(f"{text}The first failure was: {self._failure}", group=self.name)
                try:
                    group = self._meet(timeout_ms)
                except WaitTimeoutError:  # nothing has been sent: a late rank may still come
                    raise
                except PhalanxError as error:
                    self._failure = error
                    raise
                self.check()
                self._group = group
            return self._group

    def check(self) -> None:
        """Raise RevokedError if this was closed, also while the ranks meet."""
        if self._closed:
            text = f"group '{self.name}' was aborted or destroyed by rank {self.ranks[self.position]}"
            raise RevokedError(text, operation="enable_group", group=self.name)

    def known(self) -> Group | None:
        """The core's group if the ranks have met, and this was not closed."""
        return self._group

    def address(self, timeout_ms: int) -> tuple[int, str]:
        """Where the core's group is in memory, and the token of the meeting. Collective the first time."""
        return int(ffi.cast("uintptr_t", self.group(timeout_ms).pointer)), self.token

    def close(self) -> None:
        """Let go of the core's group; whoever is meeting gives up. Not collective. A second call does nothing."""
        self._closed = True
        if connections.get(self.name) is self:
            del connections[self.name]
        self._group = None

    def _meet(self, timeout_ms: int) -> Group:
        found: Any = _torch_compat.group_named(self.name)
        if found is None:
            raise RevokedError(f"process group '{self.name}' is not one of this rank's: was it destroyed?")
        rank = _registry.entry_of(found)._rank  # type: ignore[attr-defined]
        # Groups of one name and other ranks, such as the rows of a mesh, may meet at the same time.
        members = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        store = _StoreOfMeeting(PrefixStore(f"c10d/{self.name}/{members}", rank.store), self)
        answer = Meeting(store, self.name, self.ranks, self.position, timeout_ms).hold("")
        self.token = answer.token
        rank.tokens.use(answer.token)
        try:
            group: Group = rank.world().create_group(self.name, self.ranks, timeout_ms)
        except UnsupportedError as error:
            advice = "backend 'phalanx' serves ranks that share a host; use gloo or nccl for a group of several hosts"
            raise UnsupportedError(f"{error}. The {advice}.", group=self.name) from None
        finally:
            rank.tokens.use(None)
        return group


class _StoreOfMeeting:
    """A store for a meeting that ends when the connection is closed.

    Args:
        base: A torch Store.
        connection: Whose ranks meet.
    """

    def __init__(self, base: Any, connection: Connection) -> None:
        self._base = base
        self._connection = connection
        self.set, self.get, self.delete_key = base.set, base.get, base.delete_key

    def check(self, keys: list[str]) -> bool:
        self._connection.check()  # every rank looks for what the others wrote again and again
        return bool(self._base.check(keys))
