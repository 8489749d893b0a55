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
from phalanx.collectives._c10d._connect import Connection, Options, host_name, hosts
from phalanx.collectives._torch_compat import PrefixStore, TCPStore, base_of
from phalanx.core import InvalidArgumentError, RevokedError, WaitTimeoutError

_LOOPBACK = "127.0.0.1"


class Handle(NamedTuple):
    """What a process must know of another one in order to meet it."""

    host: str  # the same exactly on ranks that can share memory
    address: str  # of its store, for other hosts
    port: int
    id: str  # drawn at random

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


class Unconnected(NamedTuple):
    """In place of the Connection of a group that has no members before the first `reconfigure`."""

    name: str
    ranks: Sequence[int]
    position: int
    store: Any
    options: Options

    @property
    def key(self) -> str:
        """See Connection."""
        return self.name

    def address(self, timeout_ms: int) -> tuple[int, str]:
        """Raise RevokedError."""
        raise RevokedError(
            f"group '{self.name}' was made with enable_reconfigure and has no members yet: call reconfigure first",
            operation="enable_group",
            group=self.name,
        )

    def block(self, tensor: Any) -> tuple[int, int]:
        """Zeros: see Connection.block."""
        return 0, 0

    def close(self) -> None:
        """Nothing."""


def roster_of(connection: Connection | Unconnected) -> tuple[int, Sequence[int], Any, Any]:
    """What C++ is told of the ranks of a backend: see roster_of in module.cpp."""
    return connection.position, connection.ranks, connection.store, connection


class Membership:
    """What gives a process group other members.

    Args:
        connection: Of its first ranks.
        timeout_ms: The timeout of the group.
        make: make(connection, timeout in milliseconds) makes a backend.
    """

    def __init__(
        self, connection: Connection | Unconnected, timeout_ms: int, make: Callable[[Connection, int], Any]
    ) -> None:
        self._connection = connection
        self._timeout_ms = timeout_ms
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
                self._handle = Handle(host_name(), _own_address(self._connection.store), self._server.port, uuid4().hex)
            return str(self._handle)

    def reconfigure(self, uuid: int, handles: list[str], ordered: bool, timeout_ms: int) -> tuple[Any, ...]:
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
        name, key = self._connection.name, self._connection.key
        store = PrefixStore(f"{name}/{uuid}", self._store_of(members[0], timeout_ms))
        before = _registry.connections.get(key)
        self._connection = self._meet(name, range(len(members)), chosen.index(own), store, timeout_ms, key)
        if _registry.forget_group(key) and isinstance(before, Connection):
            before.adopt_rank()
        hosts[key] = [member.host for member in members]
        return roster_of(self._connection)

    def shrink(self, positions: Sequence[int], timeout_ms: int) -> Any:
        """A backend of the ranks at these positions of the group. Collective among them."""
        self._shrinks += 1
        before = self._connection
        name = f"{before.name}/shrunk/{self._shrinks}"
        ranks = [before.ranks[each] for each in positions]
        position = list(positions).index(before.position)
        store = PrefixStore(name, before.store)
        return self._make(self._meet(name, ranks, position, store, timeout_ms, name), timeout_ms)

    def _meet(
        self, name: str, ranks: Sequence[int], position: int, store: Any, timeout_ms: int, key: str
    ) -> Connection:
        """The connection of a new group of the core, once its ranks have met."""
        before = _registry.connections.get(key)
        options = self._connection.options
        connection = Connection(name, ranks, position, store, self._timeout_ms, options, key=key, changed=True)
        try:
            connection.group(timeout_ms)
        except BaseException as error:
            connection.close()
            if before is not None:
                _registry.connections[key] = before
            if isinstance(error, WaitTimeoutError):
                late = str(error).partition(" to call ")[0]
                raise dist.DistBackendError(f"{late} to call reconfigure or shrink too") from None
            raise
        return connection

    def _store_of(self, leader: Handle, timeout_ms: int) -> Any:
        """The store that the first of the members serves."""
        if self._handle == leader:
            return self._server
        address = _LOOPBACK if leader.host == host_name() else leader.address
        try:
            return TCPStore(address, leader.port, is_master=False, timeout=timedelta(milliseconds=timeout_ms))
        except RuntimeError as error:
            raise dist.DistBackendError(
                f"reconfigure of group '{self._connection.name}': the first of the members, at "
                f"{address}:{leader.port}, cannot be reached: {error}. Has its process ended?"
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
