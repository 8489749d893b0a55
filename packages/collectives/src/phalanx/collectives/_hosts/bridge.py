"""Bytes between the ranks of one lane, one on each host, over gloo.

Nothing but bytes crosses: what reductions make of them is computed on every host from the same bytes in the same order,
so all ranks get the same bits. Each trade begins with which call it belongs to, and the tag of its data is made from
that: different calls never take each other's data, and are told apart at once.
"""

import contextlib
import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from phalanx.collectives import _torch_compat
from phalanx.core import MismatchError, PeerDeadError, PhalanxError, RevokedError, WaitTimeoutError

_ByHost = dict[int, torch.Tensor]
_HEAD_BYTES = 512
_SMALL_BYTES = 3584  # of data that go with the head
_FIRST_TAGS = 1 << 30  # above those of data
_GAVE_UP = "!"  # begins what is sent in place of a call
_TELL = timedelta(milliseconds=200)
_LINGER_S = 0.1  # gloo ends connections with a reset, after which the other end cannot read what came before it
_ERRORS: dict[str, type[PhalanxError]] = {
    each.__name__: each for each in (MismatchError, PeerDeadError, RevokedError, WaitTimeoutError)
}


class Bridge:
    """The connections of one lane.

    Args:
        store: A torch Store that all its ranks share, and nobody else.
        host: Of this rank.
        ranks: The global ranks of the lane, by host.
        timeout: Of the meeting, and of every message.
        group: Name of the group, for errors.
    """

    def __init__(self, store: Any, host: int, ranks: Sequence[int], timeout: timedelta, group: str) -> None:
        self._host = host
        self._ranks = ranks
        self._timeout = timeout
        self._group = group
        self._unfinished: object = None
        self._told = False
        try:
            self._gloo: Any = _torch_compat.make_gloo(store, host, len(ranks), timeout)
        except RuntimeError as error:
            raise WaitTimeoutError(
                f"group '{group}': rank {ranks[host]} could not connect to rank(s) {self._others()} on other hosts: "
                f"{_first_line(error)}. Are their addresses reachable? GLOO_SOCKET_IFNAME names the interface to use.",
                operation="enable_group",
                group=group,
            ) from None

    def _others(self) -> str:
        return ", ".join(str(rank) for host, rank in enumerate(self._ranks) if host != self._host)

    def trade(self, call: str, number: int, outgoing: _ByHost, incoming: _ByHost) -> None:
        """Send to some hosts and receive from some, all at once. With it goes which call it belongs to.

        Args:
            call: The collective, alike on all ranks that make the same call.
            number: Of the trade among those of the group, alike on all ranks.
            outgoing: By host, contiguous; left as they are.
            incoming: By host, contiguous; written.

        Raises:
            WaitTimeoutError, PeerDeadError, MismatchError: It did not happen within the timeout, or cannot any more.
                The bridge is of no use after it.
        """
        if self._gloo is None:
            raise PeerDeadError(f"{call} on group '{self._group}': the connections between the hosts were closed")
        said = _head(call)
        tag = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=4).digest(), "little") >> 2
        first_tag = _FIRST_TAGS + number % _FIRST_TAGS
        out = {host: tensor.view(-1).view(torch.uint8) for host, tensor in outgoing.items() if tensor.numel()}
        into = {host: tensor.view(-1).view(torch.uint8) for host, tensor in incoming.items() if tensor.numel()}
        firsts = {host: torch.empty(_HEAD_BYTES + _SMALL_BYTES, dtype=torch.uint8) for host in incoming}
        coming = self._begin(self._gloo.recv, call, firsts, first_tag)
        leaving = self._begin(
            self._gloo.send, call, {host: _first(said, out.get(host)) for host in outgoing}, first_tag
        )
        data = self._begin(self._gloo.recv, call, _large(into), tag) + self._begin(
            self._gloo.send, call, _large(out), tag
        )
        self._finish(call, coming)
        for host, first in firsts.items():
            if not torch.equal(first[:_HEAD_BYTES], said):
                with contextlib.suppress(RuntimeError):  # so that the other side sees it too
                    for _, work in leaving:
                        work.wait(_TELL)
                self._told = True
                self._unfinished = (leaving, data, out, into)  # else gloo would close, and the other end still reads
                raise self._other(call, host, bytes(first[:_HEAD_BYTES].tolist()).decode(errors="replace").strip())
            if host in into and _is_small(into[host]):
                into[host].copy_(first[_HEAD_BYTES : _HEAD_BYTES + len(into[host])])
        self._finish(call, leaving + data)

    def _begin(self, begin: Any, call: str, tensors: _ByHost, tag: int) -> list[tuple[int, Any]]:
        works = []
        for host, tensor in tensors.items():
            with self._named(call, host):
                works.append((host, begin([tensor], host, tag)))
        return works

    def _finish(self, call: str, works: list[tuple[int, Any]]) -> None:
        for host, work in works:
            with self._named(call, host):
                work.wait(self._timeout)

    def give_up(self, number: int, error: PhalanxError) -> None:
        """Tell the other hosts an error in place of the trade of that number, which they are in or will come to."""
        if self._gloo is None:
            return
        self._told = True
        first = _first(_head(f"{_GAVE_UP}{type(error).__name__}:{error}"), None)
        with contextlib.suppress(RuntimeError):
            tag = _FIRST_TAGS + number % _FIRST_TAGS
            works = [self._gloo.send([first], host, tag) for host in range(len(self._ranks)) if host != self._host]
            for work in works:
                with contextlib.suppress(RuntimeError):
                    work.wait(_TELL)

    def _other(self, call: str, host: int, theirs: str) -> PhalanxError:
        """The error of a rank that said something else than this call."""
        me, peer = self._ranks[self._host], self._ranks[host]
        if theirs.startswith(_GAVE_UP):
            kind, _, text = theirs.removeprefix(_GAVE_UP).partition(":")
            return _ERRORS.get(kind, RevokedError)(
                f"{call} on group '{self._group}': rank {peer} on another host gave up: {text}",
                rank=me,
                peer=peer,
                operation=call.partition("(")[0],
                group=self._group,
            )
        return MismatchError(
            f"{call} on group '{self._group}': rank {peer} on another host called {theirs} while rank {me} called "
            f"{call}. Every rank of a group must call the same collectives in the same order with the same dtype and "
            "count.",
            rank=me,
            peer=peer,
            operation=call.partition("(")[0],
            group=self._group,
        )

    @contextlib.contextmanager
    def _named(self, call: str, host: int) -> Any:
        try:
            yield
        except RuntimeError as error:
            self.close()
            raise self._error(call, host, _first_line(error)) from None

    def _error(self, call: str, host: int, text: str) -> PhalanxError:
        where = f"{call} on group '{self._group}'"
        me, peer = self._ranks[self._host], self._ranks[host]
        known: dict[str, Any] = {"rank": me, "peer": peer, "operation": call.partition("(")[0], "group": self._group}
        if "timed out" in text.lower() or "timeout" in text.lower():
            return WaitTimeoutError(
                f"{where}: after {self._timeout.total_seconds() * 1000:.0f} ms rank {me} still waits for rank {peer} "
                "on another host. Look at that host and at the network between the two.",
                **known,
            )
        return PeerDeadError(f"{where}: the connection to rank {peer} on another host has ended: {text}", **known)

    def close(self) -> None:
        """Let go of the connections: whoever waits at the other end is told."""
        gloo, self._gloo, self._unfinished = self._gloo, None, None
        if gloo is not None:
            if self._told:
                time.sleep(_LINGER_S)
            with contextlib.suppress(RuntimeError):
                gloo.abort()


def _head(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()[:_HEAD_BYTES].ljust(_HEAD_BYTES)), dtype=torch.uint8)


def _first(head: torch.Tensor, data: torch.Tensor | None) -> torch.Tensor:
    """The first message of a trade: which call it is, and the data if there is little."""
    made = torch.zeros(_HEAD_BYTES + _SMALL_BYTES, dtype=torch.uint8)
    made[:_HEAD_BYTES] = head
    if data is not None and _is_small(data):
        made[_HEAD_BYTES : _HEAD_BYTES + len(data)] = data
    return made


def _is_small(data: torch.Tensor) -> bool:
    return len(data) <= _SMALL_BYTES


def _large(tensors: _ByHost) -> _ByHost:
    return {host: tensor for host, tensor in tensors.items() if not _is_small(tensor)}


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]
