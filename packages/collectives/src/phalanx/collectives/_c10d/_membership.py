"""How the members of a process group of the backend change: torch's `reconfigure` (2.14) and `shrink`."""

import json
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import torch.distributed as dist

from phalanx.collectives import _registry
from phalanx.collectives._c10d._connect import Connection, Facts, Options, host_name, hosts
from phalanx.collectives._torch_compat import PrefixStore, TCPStore, base_of
from phalanx.core import InvalidArgumentError, RevokedError, WaitTimeoutError

_LOOPBACK = "127.0.0.1"


class Handle(NamedTuple):
    """What a process must know of another one in order to meet it.

    Attributes:
        host: What ranks call its host; the same exactly on those that can share memory.
        address: Of its store, for other hosts.
        port: Of its store.
        id: Drawn at random.
    """

    host: str
    address: str
    port: int
    id: str

    @classmethod
    def read(cls, text: str) -> "Handle":
        """The handle in a text that `Membership.handle` gave.

        Raises:
            InvalidArgumentError: It is not one.
        """
        try:
            name, host, address, port, identity = json.loads(text)
            if name == "phalanx":
                return cls(str(host), str(address), int(port), str(identity))
        except (ValueError, TypeError):
            pass
        raise InvalidArgumentError(f"reconfigure: {text!r} is not a handle that get_reconfigure_handle of phalanx gave")

    def __str__(self) -> str:
        return json.dumps(["phalanx", *self])


class Roster(NamedTuple):
    """The ranks of a backend: see roster_of in module.cpp.

    Attributes:
        position: Of this rank.
        ranks: Their numbers, in order.
        store: A torch Store that they share.
        connection: Of the group, with `address` and `close`.
    """

    position: int
    ranks: Sequence[int]
    store: Any
    connection: Any


class Unconnected:
    """In place of the connection of a group that has no members before the first `reconfigure`.

    Args:
        name: Of the process group.
        options: Of the process group.
    """

    def __init__(self, name: str, options: Options) -> None:
        self._name = self.key = name
        self.options = options

    def address(self, timeout_ms: int) -> tuple[int, str]:
        """Raise RevokedError."""
        raise RevokedError(
            f"group '{self._name}' was made with enable_reconfigure and has no members yet: call reconfigure first",
            operation="enable_group",
            group=self._name,
        )

    def block(self, tensor: Any) -> int:
        """0: see Connection.block."""
        return 0

    rendezvous = address

    def close(self) -> None:
        """Nothing."""


class Membership:
    """What gives a process group other members.

    Args:
        name: Of the process group.
        timeout_ms: Of the group.
        roster: Its first ranks.
        make: Makes a backend of (name, timeout in milliseconds, roster).
    """

    def __init__(self, name: str, timeout_ms: int, roster: Roster, make: Callable[[str, int, Roster], Any]) -> None:
        self._name = name
        self._timeout_ms = timeout_ms
        self._key = roster.connection.key
        self._options: Options = roster.connection.options
        self._position, self._ranks, self._store, _ = roster
        self._make = make
        self._lock = threading.Lock()
        self._server: Any = None
        self._handle: Handle | None = None
        self._used: set[int] = set()
        self._shrinks = 0

    def handle(self) -> str:
        """How other processes reach this one: the address of a store that it serves from now on. Not collective."""
        with self._lock:
            if self._handle is None:
                self._server = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
                self._handle = Handle(host_name(), _own_address(self._store), self._server.port, uuid4().hex)
            return str(self._handle)

    def reconfigure(self, uuid: int, handles: list[str], ordered: bool, timeout_ms: int) -> Roster:
        """Meet the processes of these handles. Collective among them.

        Args:
            uuid: Of this membership: the same on all of them, and never used before.
            handles: One of each process, this one among them.
            ordered: Whether their order is that of the ranks; else the order of the texts is.
            timeout_ms: How long to wait for the others.

        Raises:
            InvalidArgumentError: A handle is wrong, twice there, or this process has none among them; or the uuid was
                used. Nothing was sent, and the group is as it was.
            DistBackendError: Processes did not come in time. The group is as it was, and the call may be made again
                with another uuid.
        """
        own = self.handle()
        chosen = handles if ordered else sorted(handles)
        members = [Handle.read(text) for text in chosen]
        if len(set(chosen)) != len(chosen):
            raise InvalidArgumentError("reconfigure: a handle is there twice")
        if own not in chosen:
            raise InvalidArgumentError(
                f"reconfigure: the handle of this process is not among the {len(chosen)} handles: {own}"
            )
        if uuid in self._used:
            raise InvalidArgumentError(f"reconfigure: uuid {uuid} was already used by this group; give a new one")
        self._used.add(uuid)
        store = PrefixStore(f"{self._name}/{uuid}", self._store_of(members[0], timeout_ms))
        before = _registry.connections.get(self._key)
        roster = self._meet(self._name, range(len(members)), chosen.index(own), store, timeout_ms, self._key)
        if _registry.forget_group(self._key) and isinstance(before, Connection):
            before.adopt_rank()
        hosts[self._key] = [member.host for member in members]
        self._position, self._ranks, self._store, _ = roster
        return roster

    def shrink(self, positions: Sequence[int], timeout_ms: int) -> Any:
        """A backend of the ranks at these positions of the group. Collective among them."""
        self._shrinks += 1
        name = f"{self._name}/shrunk/{self._shrinks}"
        ranks = [self._ranks[each] for each in positions]
        position = list(positions).index(self._position)
        return self._make(
            name, timeout_ms, self._meet(name, ranks, position, PrefixStore(name, self._store), timeout_ms)
        )

    def _meet(
        self, name: str, ranks: Sequence[int], position: int, store: Any, timeout_ms: int, key: str = ""
    ) -> Roster:
        """The ranks of a new group of the core, once they have met."""
        before = _registry.connections.get(key or name)
        connection = Connection(
            name, ranks, position, Facts(store, self._timeout_ms, True, self._options), key, changed=True
        )
        try:
            connection.group(timeout_ms)
        except BaseException as error:
            connection.close()
            if before is not None:
                _registry.connections[connection.key] = before
            if isinstance(error, WaitTimeoutError):
                late = str(error).partition(" to call ")[0]
                raise dist.DistBackendError(f"{late} to call reconfigure or shrink too") from None
            raise
        return Roster(position, ranks, store, connection)

    def _store_of(self, leader: Handle, timeout_ms: int) -> Any:
        """The store that the first of the members serves."""
        if self._handle == leader:
            return self._server
        address = _LOOPBACK if leader.host == host_name() else leader.address
        try:
            return TCPStore(address, leader.port, is_master=False, timeout=timedelta(milliseconds=timeout_ms))
        except RuntimeError as error:
            raise dist.DistBackendError(
                f"reconfigure of group '{self._name}': the first of the members, at {address}:{leader.port}, cannot be "
                f"reached: {error}. Has its process ended?"
            ) from None


def _own_address(store: Any) -> str:
    """The address by which this process reaches the store of its group, or that of its own host."""
    there = getattr(base_of(store), "host", "") or socket.gethostname()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((there, 1))
            return str(probe.getsockname()[0])
    except OSError:
        return _LOOPBACK
