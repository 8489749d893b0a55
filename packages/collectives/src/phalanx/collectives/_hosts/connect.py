"""TCP connections between the ranks of one lane, made after each end has proved that it reads the same store.

Every rank leaves its address, its port and a secret in the store, and then dials the ranks before it. With D for who
dials and L for who listens, and MAC for HMAC-SHA-256 under L's secret:

    D to L    hello: magic, version, D's host, 16 random bytes
    L to D    16 random bytes, MAC("listens", hello, those bytes)
    D to L    MAC("dials", hello, those bytes)

Neither side believes what another one says before that. Strangers that connect and say nothing, too little or something
else hold up nobody: all that come are read at once, and the oldest goes when there are too many.
"""

import contextlib
import hashlib
import hmac
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from phalanx.collectives._hosts.address import INTERFACE_VARIABLES, own_address
from phalanx.core import PeerDeadError, PhalanxError, WaitTimeoutError
from phalanx.core.timeouts import milliseconds, timed_out

_HELLO = struct.Struct("<8sII16s")
_MAGIC, _VERSION = b"PHXHOSTS", 1
_NONCE, _PROOF = 16, hashlib.sha256().digest_size
_NEWCOMERS = 64  # that have not yet proved anything
_PAUSE_S = 0.01
_LONGEST_STEP_S = 86400.0  # sockets take 24 days at most
# How long a host or a network may be silent. (A process that is stopped is not: its kernel answers.)
_SILENT_S = 30
_PROBE_S = 5


def connect(store: Any, host: int, ranks: Sequence[int], timeout: timedelta, group: str) -> dict[int, socket.socket]:
    """Connect the ranks of one lane with each other. Collective among them.

    Args:
        store: A torch Store that they share, and nobody else.
        host: Of this rank.
        ranks: The global ranks of the lane, by host.
        timeout: For everything.
        group: Name of the group, for errors.

    Returns:
        By host, all but this one; not blocking.

    Raises:
        WaitTimeoutError: Ranks did not come in time; the text names them.
        PeerDeadError: An address cannot be reached.
    """
    return _Meeting(store, host, ranks, timeout, group).hold()


class _Meeting:
    def __init__(self, store: Any, host: int, ranks: Sequence[int], timeout: timedelta, group: str) -> None:
        self._store = store
        self._host = host
        self._ranks = ranks
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._group = group
        self._secret = os.urandom(32)
        self._made: dict[int, socket.socket] = {}

    def hold(self) -> dict[int, socket.socket]:
        try:
            with self._listen() as listener:
                self._publish(listener)
                for host in range(self._host):
                    self._made[host] = self._dial(host, self._read(host))
                self._accept(listener, set(range(self._host + 1, len(self._ranks))))
        except BaseException:
            for each in self._made.values():
                each.close()
            raise
        with contextlib.suppress(RuntimeError):  # not every store can
            self._store.delete_key(str(self._host))
        for each in self._made.values():
            _prepare(each)
        return self._made

    # ---- finding each other ------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        try:
            address = own_address(self._store)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family, backlog=len(self._ranks) + _NEWCOMERS)
        except OSError as error:
            raise self._error(PeerDeadError, f"cannot listen for other ranks: {error}", None) from None
        listener.setblocking(False)
        return listener

    def _publish(self, listener: socket.socket) -> None:
        address, port = listener.getsockname()[:2]
        self._store.set(str(self._host), json.dumps([address, port, self._secret.hex()]))

    def _read(self, host: int) -> tuple[str, int, bytes]:
        try:
            self._store.wait([str(host)], timedelta(seconds=max(self._left(), 0.001)))
            address, port, secret = json.loads(self._store.get(str(host)))
        except RuntimeError:
            raise self._late([host]) from None
        return address, int(port), bytes.fromhex(secret)

    # ---- the two ends ------------------------------------------------------------------------------------------------

    def _dial(self, host: int, where: tuple[str, int, bytes]) -> socket.socket:
        """Connect with a rank that listens; again if it hung up, as it does when too many strangers come."""
        address, port, secret = where
        while self._left() > 0:
            made = None
            try:
                made = socket.create_connection((address, port), timeout=max(self._left(), 0.001))
                if self._greet(made, secret):
                    made.setblocking(False)
                    return made
            except TimeoutError:
                _close(made)
                raise self._late([host], f" (at {address}, port {port})") from None
            except OSError as error:
                _close(made)
                text = f"cannot connect to rank {self._ranks[host]}, at {address}, port {port}: {error}."
                raise self._error(PeerDeadError, f"{text} {_ADVICE}", host) from None
            _close(made)
            time.sleep(_PAUSE_S)
        raise self._late([host], f" (at {address}, port {port}, where each attempt is hung up on)")

    def _greet(self, made: socket.socket, secret: bytes) -> bool:
        """Prove oneself, and have it proved. False: the other end hung up."""
        hello = _HELLO.pack(_MAGIC, _VERSION, self._host, os.urandom(_NONCE))
        try:
            made.sendall(hello)
            answer = self._receive(made, _NONCE + _PROOF)
            if not answer:
                return False
            nonce, proof = answer[:_NONCE], answer[_NONCE:]
            if not hmac.compare_digest(proof, _proof(secret, b"listens", hello, nonce)):
                raise OSError("who listens there has not read the store")
            made.sendall(_proof(secret, b"dials", hello, nonce))
        except ConnectionError:
            return False
        return True

    def _receive(self, connection: socket.socket, size: int) -> bytes:
        """So many bytes; none if the other end hung up before."""
        data = b""
        while len(data) < size:
            connection.settimeout(max(self._left(), 0.001))
            more = connection.recv(size - len(data))
            if not more:
                return b""
            data += more
        return data

    def _accept(self, listener: socket.socket, missing: set[int]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            newcomers: dict[socket.socket, _Newcomer] = {}
            try:
                while missing:
                    left = self._left()
                    for key, _ in selector.select(max(left, 0)):
                        if key.fileobj is listener:
                            self._admit(listener, selector, newcomers)
                            continue
                        newcomer = newcomers.get(key.fileobj)  # type: ignore[call-overload]
                        if newcomer is None:
                            continue
                        done = newcomer.read(missing)
                        if done:
                            selector.unregister(newcomer.connection)
                            del newcomers[newcomer.connection]
                        if newcomer.host is not None and done:
                            missing.discard(newcomer.host)
                            self._made[newcomer.host] = newcomer.connection
                        elif done:
                            newcomer.connection.close()
                    if missing and left <= 0:
                        raise self._late(sorted(missing))
            finally:
                for connection in newcomers:
                    connection.close()

    def _admit(
        self, listener: socket.socket, selector: selectors.BaseSelector, newcomers: "dict[socket.socket, _Newcomer]"
    ) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # gone again
            return
        if len(newcomers) == _NEWCOMERS:
            oldest = next(iter(newcomers))
            selector.unregister(oldest)
            del newcomers[oldest]
            oldest.close()
        connection.setblocking(False)
        newcomers[connection] = _Newcomer(connection, self._secret)
        selector.register(connection, selectors.EVENT_READ)

    # ---- what goes wrong ---------------------------------------------------------------------------------------------

    def _left(self) -> float:
        return min(self._deadline - time.monotonic(), _LONGEST_STEP_S)

    def _late(self, hosts: Sequence[int], where: str = "") -> PhalanxError:
        names = ", ".join(str(self._ranks[host]) for host in hosts)
        text = (
            f"{timed_out(milliseconds(self._timeout))}: rank {self._ranks[self._host]} still waits for a "
            f"connection with rank(s) {names}{where}. {_ADVICE}"
        )
        return self._error(WaitTimeoutError, text, hosts[0])

    def _error(self, kind: type[PhalanxError], text: str, host: int | None) -> PhalanxError:
        return kind(
            f"group '{self._group}': {text}",
            rank=self._ranks[self._host],
            peer=-1 if host is None else self._ranks[host],
            operation="enable_group",
            group=self._group,
        )


_ADVICE = f"Are the addresses reachable? {INTERFACE_VARIABLES[0]} names the interface to use."


class _Newcomer:
    """Who has connected and not yet proved anything."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self.connection = connection
        self.host: int | None = None
        self._secret = secret
        self._nonce = os.urandom(_NONCE)
        self._got = b""

    def read(self, missing: set[int]) -> bool:
        """Read what there is. True when that was all: `host` is who it is, or None if it is to be hung up on."""
        size = _HELLO.size if self.host is None else _HELLO.size + _PROOF
        try:
            more = self.connection.recv(size - len(self._got))
        except BlockingIOError:
            return False
        except OSError:
            more = b""
        if not more:
            self.host = None
            return True
        self._got += more
        if len(self._got) < size:
            return False
        return self._greet(missing) if self.host is None else self._judge(missing)

    def _greet(self, missing: set[int]) -> bool:
        magic, version, host, _ = _HELLO.unpack(self._got)
        if magic != _MAGIC or version != _VERSION or host not in missing:
            return True
        answer = self._nonce + _proof(self._secret, b"listens", self._got, self._nonce)
        try:
            sent = self.connection.send(answer)
        except OSError:
            return True
        if sent != len(answer):
            return True
        self.host = host
        return False

    def _judge(self, missing: set[int]) -> bool:
        hello, proof = self._got[: _HELLO.size], self._got[_HELLO.size :]
        right = hmac.compare_digest(proof, _proof(self._secret, b"dials", hello, self._nonce))
        if not right or self.host not in missing:
            self.host = None
        return True


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + hello + nonce, "sha256")


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_S // _PROBE_S - 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_S * 1000)


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        connection.close()
