"""What a group on several hosts has for tensors of GPUs: the calls of the core's group, put on the current stream.

Within a host the core does the work, between hosts a backend of torch carries bytes (see _hosts/carrier.py). All three
of its kinds of traffic have a backend of their own, for they need not have one order: the lanes of the Spanning, the
exchanges of blocks, and messages.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from phalanx.collectives._hosts import Carrier, GpuSpanning
from phalanx.collectives._hosts.carrier import Load, Parcel
from phalanx.collectives._streams import where
from phalanx.collectives.c10d._hosts_base import BaseRoad
from phalanx.collectives.c10d._hosts_calls import Blocks, Calls
from phalanx.collectives.c10d._hosts_messages import FarMessages, Message
from phalanx.collectives.c10d._hosts_tensors import name_of
from phalanx.collectives.c10d._python_tensors import Buffers
from phalanx.collectives.c10d._python_work import fail
from phalanx.core import DType, PhalanxError

_DRAIN_S = 5.0  # what close waits for streams


class GpuRoad(Calls):
    """A group on several hosts, for tensors of GPUs. A call returns when its work is on the stream.

    Args:
        road: The group. It ends when this fails, and ends this.
        spanning: Its collectives, as the following belongs to this.
        exchanges: Between all its ranks.
        messages: Likewise.
    """

    def __init__(self, road: BaseRoad, spanning: GpuSpanning, exchanges: Carrier, messages: FarMessages) -> None:
        super().__init__(road.size, road.position, spanning)
        self._road = road
        self._gpu_spanning = spanning
        self._exchanges = exchanges
        self._messages = messages
        self._issuing = threading.RLock()  # a backend takes calls of one thread at a time
        spanning.failed = exchanges.failed = messages.carrier.failed = self._failed
        spanning.heard = road.heard
        exchanges.check = messages.carrier.check = spanning.check

    # ---- how calls are run --------------------------------------------------------------------------

    def _at(self, address: int, count: int, kind: DType, owner: Any) -> torch.Tensor:
        assert isinstance(owner, Buffers)
        return owner.elements_at(address, count, kind)

    def _run(self, what: str, run: Callable[[], None], *, timeout_ms: int, **_: Any) -> None:
        with self._issuing, torch.no_grad():
            self.send_off()
            self._gpu_spanning.set_timeout(timeout_ms)
            self._exchanges.set_timeout(timedelta(milliseconds=timeout_ms))
            error = self._road.attempt(what, run)
        if error is not None:
            raise error

    def _exchange(self, call: str, what: str, sent: Blocks, got: Blocks, kind: DType, **more: Any) -> None:
        number = self._road.next_exchange(what)
        here = self._spanning.places.here
        outgoing, incoming = (
            {rank: block for rank, block in blocks.items() if rank not in here} for blocks in (sent, got)
        )

        def run() -> None:
            load = self._exchanges.begin(f"{call} on GPUs({name_of(kind)})", number, outgoing, incoming)
            self._exchange_here(sent, got, kind, int(more["timeout_ms"]))  # while the others are on their way
            self._exchanges.finish(load)

        self._run(what, run, **more)

    def _exchange_here(self, sent: Blocks, got: Blocks, kind: DType, timeout_ms: int) -> None:
        """Between the ranks of this host."""
        here = self._spanning.places.here
        if len(here) == 1:
            if self._position in sent and self._position in got:
                got[self._position].copy_(sent[self._position])
            return
        like = next(iter((sent or got).values()))
        nothing = like.new_empty(0)
        gives, takes = ([blocks.get(rank, nothing) for rank in here] for blocks in (sent, got))
        source, out = (_joined(blocks) for blocks in (gives, takes))
        in_counts, out_counts = ([block.numel() for block in blocks] for blocks in (gives, takes))
        more = {"timeout_ms": timeout_ms, **where(like.device)}
        inside = self._spanning.inside
        inside.all_to_all_v(source.data_ptr(), in_counts, out.data_ptr(), out_counts, kind, **more)
        for block, part in zip(takes, torch.split(out, out_counts), strict=True):
            if block.data_ptr() != part.data_ptr():
                block.copy_(part)

    def barrier(self, timeout_ms: int, *, device: tuple[str, int], **_: Any) -> None:
        """Of streams, as the core's."""
        data = torch.zeros(1, dtype=torch.uint8, device=torch.device(*device))
        self._run("barrier", lambda: self._reduced(data), timeout_ms=timeout_ms)

    def _reduced(self, data: torch.Tensor) -> None:
        self._spanning.run("all_reduce", data, "max")

    # ---- messages -----------------------------------------------------------------------------------

    def is_here(self, position: int) -> bool:
        """Whether a rank shares the host with this one."""
        return position in self._spanning.places.here

    def send(self, data: int, peer: int, count: int, dtype: Any, **more: Any) -> None:
        """To a rank on this host."""
        self._within("send", data, peer, count, dtype, more)

    def recv(self, data: int, peer: int, count: int, dtype: Any, **more: Any) -> None:
        """From a rank on this host."""
        self._within("recv", data, peer, count, dtype, more)

    def _within(self, what: str, data: int, peer: int, count: int, dtype: Any, more: dict[str, Any]) -> None:
        self._road.check(what)
        inside = self._spanning.inside
        call: Any = inside.send if what == "send" else inside.recv
        call(data, self._spanning.places.here.index(peer), count, dtype, **more)

    def message(self, what: str, peer: int, tag: int, tensor: torch.Tensor, buffers: Buffers, limit_ms: int) -> Message:
        """Begin a message to or from a rank on another host; see FarMessages.

        Args:
            what: "send" or "recv".
            peer: The position of the other end.
            tag: Of the message.
            tensor: What goes or comes.
            buffers: What it belongs to.
            limit_ms: What it may take.
        """
        with self._issuing:
            self._road.check(what)
            self._messages.carrier.set_timeout(timedelta(milliseconds=limit_ms))
            return self._messages.add(what == "send", peer, tag, tensor, buffers, self._sent_off)

    def _sent_off(self) -> None:
        """For a work of torch."""
        with self._issuing, torch.no_grad():
            try:
                self.send_off()
            except PhalanxError as error:
                fail("send and recv", error)

    def send_off(self) -> None:
        """Let the messages go that were begun."""
        if self._messages.are_waiting:
            error = self._road.attempt("send and recv", self._messages.send_off)
            if error is not None:
                raise error

    # ---- the end ------------------------------------------------------------------------------------

    def _failed(self, error: PhalanxError) -> None:
        """In the thread of a carrier."""
        self._road.fail(error)

    def fail(self, error: PhalanxError) -> None:
        """The group has failed: let go of everything, so that streams go on."""
        self._gpu_spanning.end(error)
        for carrier in (self._exchanges, self._messages.carrier):
            carrier.abort()
            carrier.close()

    def close(self) -> None:
        """Let streams end what is under way, for a while, and let go of everything. Not collective."""
        with self._issuing:
            if self._messages.are_waiting:
                self._road.attempt("send and recv", self._messages.send_off)
        until = time.monotonic() + _DRAIN_S
        self._gpu_spanning.drain(until)
        for carrier in (self._exchanges, self._messages.carrier):
            carrier.drain(until)
            carrier.close()
        self._gpu_spanning.close()


def introduce(carrier: Carrier, position: int, size: int, device: torch.device) -> None:
    """Let the backend between all ranks connect them, which takes a call of all. Collective."""
    mine, theirs = (torch.zeros(1, dtype=torch.uint8, device=device) for _ in range(2))
    load = Load("the first call for a GPU", 0)
    carrier.start(load, [Parcel((position + 1) % size, mine, 0)], [Parcel((position - 1) % size, theirs, 0)])
    carrier.finish(load)


def _joined(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Blocks one after another: where they are, if they are so already."""
    some = [block for block in blocks if block.numel()]
    if not some:
        return blocks[0]
    following = some[0].data_ptr()
    for block in some:
        if block.data_ptr() != following:
            return torch.cat(list(blocks))
        following += block.nbytes
    return some[0].as_strided((sum(block.numel() for block in some),), (1,))
