"""Tensors between ranks on several hosts, carried by a backend of torch.distributed: NCCL for those of GPUs.

It has the calls of a Bridge, and something goes with it that carries no data (a Bridge, where its ranks are one lane):
over it each rank says which trade it makes. So different calls, ranks that give up and processes that end are known by
name, which the backend does not do.

Where a GPU does the work, `finish` makes the current stream wait, not the host. A thread looks after what is under way
then, and ends it when it cannot end by itself any more.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

from phalanx.collectives._hosts.stream import Trade
from phalanx.collectives._streams import Mark
from phalanx.core import PeerDeadError, PhalanxError, UnsupportedError, WaitTimeoutError
from phalanx.core.timeouts import milliseconds, timed_out

_ByHost = dict[int, torch.Tensor]
_LOOK_S = 0.05  # between looks of the thread while something is under way


class Words(Protocol):
    """What tells the other ranks which trade is made, and hears it from them: see Bridge."""

    @property
    def is_broken(self) -> bool: ...

    def announce(self, call: str, number: int, outgoing: _ByHost, incoming: _ByHost) -> Trade: ...

    def finish(self, trade: Trade) -> None: ...

    def look(self, call: str) -> None: ...

    def late(self, trade: Trade) -> WaitTimeoutError: ...

    def set_timeout(self, timeout: timedelta) -> None: ...

    def give_up(self, error: PhalanxError) -> None: ...

    def close(self) -> None: ...


class Parcel(NamedTuple):
    """A tensor that goes to a host, or comes from there.

    Attributes:
        host: The other end.
        tensor: Contiguous.
        tag: Alike at both ends.
    """

    host: int
    tensor: torch.Tensor
    tag: int


class Load(Trade):
    """A trade whose data a backend carries.

    Args:
        call, number: As of Trade.

    Attributes:
        word: The trade that says so to the other hosts.
        works: What the backend began, and with which hosts.
        kept: What it reads and writes.
    """

    def __init__(self, call: str, number: int) -> None:
        super().__init__(call, number)
        self.word = Trade(call, number)
        self.works: list[tuple[Any, list[int]]] = []
        self.kept: list[torch.Tensor] = []


class _OnStream(NamedTuple):
    load: Load
    mark: Any  # after it on the stream
    begun_s: float


class Carrier:
    """A lane, one rank of each host; or any other ranks: "host" is where one of them is in their order.

    Args:
        backend: A Backend of torch.distributed (not a process group) among the ranks, in their order. Belongs to this,
            as the next one.
        words: Between the same ranks, such as a Bridge.
        ranks: The global ranks, by host.
        group: Name of the group, for errors.
        timeout: Of every wait.

    Attributes:
        is_broken: As of Bridge.
        failed: Called in the thread with what ended what was under way.
        check: Called in the thread now and then; raises what has gone wrong elsewhere in the group.
    """

    def __init__(self, backend: Any, words: Words, ranks: Sequence[int], group: str, timeout: timedelta) -> None:
        self._backend = backend
        self._words = words
        self._ranks = ranks
        self._group = group
        self._timeout = timeout
        self._closed = False
        self._changed = threading.Condition()
        self._under_way: deque[_OnStream] = deque()
        self._thread: threading.Thread | None = None
        self.failed: Callable[[PhalanxError], None] = lambda error: None
        self.check: Callable[[], None] = lambda: None

    @property
    def is_broken(self) -> bool:
        return self._words.is_broken

    def set_timeout(self, timeout: timedelta) -> None:
        """Of every later wait."""
        self._timeout = timeout
        self._words.set_timeout(timeout)

    # ---- trades ------------------------------------------------------------------------------------------------------

    def begin(self, call: str, number: int, outgoing: _ByHost, incoming: _ByHost) -> Load:
        """As Bridge.begin. On a GPU it comes after what the current stream has to do.

        Raises:
            PhalanxError: As for `finish`.
        """
        load = Load(call, number)
        load.word = self._words.announce(call, number, outgoing, incoming)
        self._words.look(call)  # before the backend waits for a rank that makes another call
        tag = number & 0x7FFFFFFF
        self.start(
            load,
            [Parcel(host, tensor, tag) for host, tensor in outgoing.items()],
            [Parcel(host, tensor, tag) for host, tensor in incoming.items()],
        )
        return load

    def start(self, load: Load, outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> None:
        """Begin a trade that the other ranks have been told of. Several tensors of one host come as they go.

        Raises:
            PhalanxError: As for `finish`.
        """
        load.kept = [each.tensor for each in (*outgoing, *incoming)]
        backend = self._backend
        calls = [(backend.recv, each) for each in incoming if each.tensor.numel()]
        calls += [(backend.send, each) for each in outgoing if each.tensor.numel()]
        hosts = sorted({each.host for _, each in calls})
        try:
            if not calls or not backend.supports_coalescing:
                load.works = [(call([_plain(each.tensor)], each.host, each.tag), [each.host]) for call, each in calls]
                return
            backend._start_coalescing()  # or NCCL would wait for one before it begins the next
            try:
                for call, each in calls:
                    call([_plain(each.tensor)], each.host, each.tag)
            finally:
                work = backend._end_coalescing()
            load.works = [(work, hosts)]
        except RuntimeError as error:
            raise self._broken(load, hosts, error) from None

    def finish(self, load: Trade) -> None:
        """Wait until a trade is done; on a GPU, let the current stream wait.

        Raises:
            WaitTimeoutError, PeerDeadError, MismatchError: As for Bridge.finish.
        """
        assert isinstance(load, Load)
        device = load.kept[0].device if load.kept else None
        on_stream = device is not None and device.type != "cpu"
        if not on_stream and load.word.to_come | load.word.to_go:
            self._words.finish(load.word)  # knows by name who does not come
        for work, hosts in load.works:
            try:
                work.wait() if on_stream else work.wait(self._timeout)
            except RuntimeError as error:
                raise self._broken(load, hosts, error) from None
        load.works = []
        if device is not None and on_stream:
            self._look_after(_OnStream(load, Mark(device), time.monotonic()))
        else:
            load.kept = []

    def _broken(self, load: Load, hosts: Sequence[int], error: RuntimeError) -> PhalanxError:
        """What the backend raised, or better what the words know."""
        call = load.call
        try:
            self._words.look(call)
        except PhalanxError as known:
            return known
        text = str(error).partition("\n")[0]
        kind = WaitTimeoutError if "timeout" in text.lower() or "timed out" in text.lower() else PeerDeadError
        if kind is WaitTimeoutError and not load.word.is_done:
            return self._words.late(load.word)
        others = [self._ranks[host] for host in hosts]
        return kind(
            f"{call} on group '{self._group}': {self._backend.name()}, which carries data to and from rank(s) "
            f"{', '.join(str(each) for each in others)} on another host, failed: {text}",
            peer=others[0],
            operation=call.partition("(")[0],
            group=self._group,
        )

    # ---- what streams have still to do -------------------------------------------------------------------------------

    def _look_after(self, each: _OnStream) -> None:
        with self._changed:
            if self._closed:
                return
            self._under_way.append(each)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="phalanx_carrier", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._under_way and not self._closed:
                    self._changed.wait()
                if not self._closed:
                    self._changed.wait(_LOOK_S)
                if self._closed:
                    return
            try:
                self._look()
            except PhalanxError as error:
                if not self._closed:
                    self.failed(error)
                return

    def _look(self) -> None:
        with self._changed:
            calls = list(self._under_way)
        if not calls:
            return
        self._words.look(calls[0].load.call)
        self.check()
        for each in calls:
            if not (each.load.word.is_done and each.mark.query()):
                if time.monotonic() - each.begun_s > self._timeout.total_seconds():
                    raise self._late(each.load)
                return
            each.load.kept = []
            with self._changed:
                if self._under_way:  # not closed
                    self._under_way.popleft()
                self._changed.notify_all()

    def _late(self, load: Load) -> WaitTimeoutError:
        if not load.word.is_done:
            return self._words.late(load.word)
        return WaitTimeoutError(
            f"{load.call} on group '{self._group}': {timed_out(milliseconds(self._timeout))}: all hosts called it, but "
            "this rank's stream has not ended it. Other work on a rank's stream may take longer than the timeout; or "
            "look at the network between the hosts.",
            operation=load.call.partition("(")[0],
            group=self._group,
        )

    # ---- the end -----------------------------------------------------------------------------------------------------

    def give_up(self, error: PhalanxError) -> None:
        """Tell the other hosts an error, and end what the backend has under way."""
        self._words.give_up(error)
        self.abort()

    def drain(self, until: float) -> None:
        """Let the host wait until streams have ended what is under way, or until then."""
        with self._changed:
            while self._under_way and not self._closed and self._thread is not None and self._thread.is_alive():
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, _LOOK_S))

    def abort(self) -> None:
        """End what the backend has under way, so that streams go on. Its results are unspecified then."""
        with contextlib.suppress(RuntimeError):  # gloo cannot; nobody's stream waits for it
            self._backend.abort()

    def close(self) -> None:
        """Let go of backend, connections and thread. From any thread, its own one included."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._under_way.clear()
            self._changed.notify_all()
        self._words.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with contextlib.suppress(RuntimeError):
            self._backend.shutdown()
        self._backend = _Closed()


class _Closed:
    """In the place of a backend that was let go."""

    supports_coalescing = False

    def name(self) -> str:
        return "a backend that was closed"

    def abort(self) -> None: ...

    def send(self, *_: Any) -> None:
        raise UnsupportedError("the backend between the hosts was closed")

    recv = send


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: no backend knows all dtypes."""
    return tensor.view(-1).view(torch.uint8)
