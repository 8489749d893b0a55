"""The collectives of a group that spans hosts. They are complete when they return.

In each, the ranks of a host first do what they can among themselves; then each lane (one rank of every host) carries an
equal part between the hosts; then the ranks of a host share what came. Large tensors are cut into chunks, and while one
is on its way the ranks of a host work on others. See docs/explanation/hosts.md for the bytes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from phalanx.collectives._hosts.places import Places
from phalanx.collectives._hosts.stream import Trade
from phalanx.collectives.reducing import accumulation_dtype, combine
from phalanx.core import Group, MismatchError, PhalanxError, RevokedError

_LINE = 64
_WHOLE_BYTES = 8 << 10  # up to so many, every rank carries all: more bytes, and a step less
_CHUNK_BYTES = 2 << 20  # for each lane
# Each phase of a call waits so much longer than the one before: whoever waits for the one that is to blame is the first
# to tell, and the others hear of it.
_LONGER_MS = 5000
_REDUCTIONS = frozenset({"sum", "avg", "product", "min", "max", "band", "bor", "bxor"})


def _inside(reduction: str) -> str:
    """The reduction within a host: an average is a sum that is divided at the end."""
    return "sum" if reduction == "avg" else reduction


class Between(Protocol):
    """What carries tensors between the ranks of one lane: a Bridge, or a Carrier. See there."""

    @property
    def is_broken(self) -> bool: ...

    def begin(
        self, call: str, number: int, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]
    ) -> Trade: ...

    def finish(self, trade: Trade) -> None: ...

    def set_timeout(self, timeout: timedelta) -> None: ...

    def give_up(self, error: PhalanxError) -> None: ...

    def close(self) -> None: ...


class Spanning:
    """A group on several hosts, as one of its ranks sees it.

    Args:
        name: Of the group.
        places: Which rank is where.
        inside: The core's group of the ranks on this host.
        bridge: Of this rank's lane; None for a rank without one.
        timeout_ms: How long the ranks of a host wait for each other at first; later waits are longer.

    Attributes:
        places, inside: As given.
        heard: Asked when a connection between the hosts has ended without a word: the reason that was heard elsewhere,
            for which it may wait a little. Who closes a connection may have been told of a failure of others.
    """

    def __init__(self, name: str, places: Places, inside: Group, bridge: Between | None, timeout_ms: int) -> None:
        self._name = name
        self.places = places
        self.inside = inside
        self._bridge = bridge
        self.set_timeout(timeout_ms)
        self._size = sum(len(ranks) for ranks in places.hosts)
        self._calls = 0
        self._trades = 0
        self._failure: PhalanxError | None = None
        self.heard: Callable[[], PhalanxError | None] = lambda: None
        self._served: dict[str, Callable[..., torch.Tensor]] = {
            "all_reduce": self.all_reduce,
            "all_gather_into_tensor": self.all_gather,
            "reduce_scatter_tensor": self.reduce_scatter,
            "broadcast": self.broadcast,
        }

    def serves(self, op: str, *args: Any) -> bool:
        """Whether `run` has this op of torch.ops.phalanx; the others go through torch.distributed."""
        if op.removesuffix("_out") not in self._served:
            return False
        reduces = op.startswith(("all_reduce", "reduce_scatter"))
        return not reduces or (str(args[1]).lower() in _REDUCTIONS and args[0].dtype != torch.uint64)

    def run(self, op: str, tensor: torch.Tensor, *args: Any, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """Run an op with the arguments of torch.ops.phalanx but for the group's name. Collective.

        Raises:
            ValueError: A wrong argument; nothing was sent.
            PhalanxError: A rank has died, did not come, or called something else. The group is of no use after it.
        """
        if self._failure is not None:
            raise RevokedError(
                f"{op} on group '{self._name}': the group was revoked by an earlier failure: {self._failure}",
                operation=op,
                group=self._name,
            )
        self._calls += 1
        try:
            done = self._served[op.removesuffix("_out")](tensor.contiguous(), *args)
        except PhalanxError as error:
            broken = self._bridge is not None and self._bridge.is_broken
            self._fail((self.heard() if broken else None) or error)
            raise
        if out is None:
            return done
        out.copy_(done.view(out.shape))
        return None

    def set_timeout(self, timeout_ms: int) -> None:
        """Of later calls. Not collective, and not while a call runs."""
        longer_ms = _LONGER_MS if any(len(ranks) > 1 for ranks in self.places.hosts) else 0
        self._first_ms, self._last_ms = timeout_ms, timeout_ms + 2 * longer_ms
        if self._bridge is not None:
            self._bridge.set_timeout(timedelta(milliseconds=timeout_ms + longer_ms))

    def _fail(self, error: PhalanxError) -> None:
        """Tell the ranks of this host, and those of the others."""
        self._failure = error
        if self.inside.state == "active":
            self.inside.revoke(str(error))
        if self._bridge is not None and not isinstance(error, MismatchError):  # which the others see for themselves
            self._bridge.give_up(error)
            self.close()

    def close(self) -> None:
        """Let go of the connections between the hosts. Not collective."""
        if self._bridge is not None:
            self._bridge.close()

    def _describe(self, op: str, tensor: torch.Tensor, *more: object) -> str:
        listed = ", ".join(str(each) for each in (str(tensor.dtype).removeprefix("torch."), tensor.numel(), *more))
        return f"{op}({listed}) #{self._calls}"

    # ---- within the host ---------------------------------------------------------------------------------------------

    def _where(self, tensor: torch.Tensor) -> dict[str, Any]:
        """What the core is told besides of where the tensors of a call are."""
        return {}

    def _gather_here(
        self, mine: torch.Tensor, counts: Sequence[int], whole: torch.Tensor, is_last: bool = True
    ) -> None:
        """The elements of all ranks of this host, one after another, in `whole`."""
        dtype = str(whole.dtype).removeprefix("torch.")
        timeout_ms = self._last_ms if is_last else self._first_ms
        where = self._where(whole)
        self.inside.all_gather_v(mine.data_ptr(), whole.data_ptr(), counts, dtype, timeout_ms=timeout_ms, **where)

    def _reduce_here(self, whole: torch.Tensor, counts: Sequence[int], reduction: str) -> torch.Tensor:
        """This rank's part of the sum over the ranks of this host."""
        mine = whole.new_empty(counts[self.places.local])
        dtype, op = str(whole.dtype).removeprefix("torch."), _inside(reduction)
        more = {"timeout_ms": self._first_ms, **self._where(whole)}
        self.inside.reduce_scatter_v(whole.data_ptr(), mine.data_ptr(), counts, dtype, op, **more)
        return mine

    def _reduce_whole_here(self, whole: torch.Tensor, reduction: str) -> torch.Tensor:
        """The sum over the ranks of this host."""
        done = torch.empty_like(whole)
        dtype, op = str(whole.dtype).removeprefix("torch."), _inside(reduction)
        more = {"timeout_ms": self._first_ms, **self._where(whole)}
        self.inside.all_reduce(whole.data_ptr(), done.data_ptr(), whole.numel(), dtype, op, **more)
        return done

    # ---- between the hosts -------------------------------------------------------------------------------------------

    def _begin(self, call: str, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> Trade:
        assert self._bridge is not None
        self._trades += 1
        return self._bridge.begin(call, self._trades, outgoing, incoming)

    def _finish(self, trade: Trade) -> None:
        assert self._bridge is not None
        self._bridge.finish(trade)

    def _trade(self, call: str, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        self._finish(self._begin(call, outgoing, incoming))

    def _reduce_across(self, call: str, mine: torch.Tensor, reduction: str) -> Iterator[torch.Tensor | None]:
        """Reduce the same part of all hosts, and give the result to all of them. Yields None wherever something is on
        its way and others may go on, and the result at last."""
        host, hosts = self.places.host, range(len(self.places.hosts))
        if self.places.lane is None or not mine.numel():
            for _ in range(1 if len(hosts) <= 3 else 2):  # as often as the others
                yield None
            yield mine
            return
        if len(hosts) <= 3:  # whole parts: as many bytes as the other way, or few more, and half the messages
            parts = [mine if each == host else torch.empty_like(mine) for each in hosts]
            others = {each: parts[each] for each in hosts if each != host}
            trade = self._begin(call, dict.fromkeys(others, mine), others)
            yield None
            self._finish(trade)
            yield combine(parts, reduction, self._size)
            return
        pieces = list(mine.tensor_split(len(hosts)))
        own = pieces[host]
        theirs = {each: torch.empty_like(own) for each in hosts if each != host}
        trade = self._begin(f"{call} part 1", {each: pieces[each] for each in theirs}, theirs)
        yield None
        self._finish(trade)
        done = combine([own.clone() if each == host else theirs[each] for each in hosts], reduction, self._size)
        results = [done if each == host else done.new_empty(len(pieces[each])) for each in hosts]
        others = {each: results[each] for each in hosts if each != host}
        trade = self._begin(f"{call} part 2", dict.fromkeys(others, done), others)
        yield None
        self._finish(trade)
        yield torch.cat(results)

    # ---- the collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Reduce over all ranks."""
        reduction = reduction.lower()
        call = self._describe("all_reduce", tensor, reduction)
        wide = tensor.to(accumulation_dtype(tensor.dtype, reduction)).view(-1)
        out = torch.empty_like(tensor)
        flat, size = out.view(-1), wide.element_size()
        if self.places.even and len(self.places.hosts) <= 3 and wide.numel() * size <= _WHOLE_BYTES:
            *_, done = self._reduce_across(call, self._reduce_whole_here(wide, reduction), reduction)
            assert done is not None
            flat.copy_(done)
            return out
        length = max(1, _CHUNK_BYTES * self.places.lanes // size)
        spans = ((begin, min(begin + length, len(flat))) for begin in range(0, len(flat), length))
        _in_turns(self._all_reduce_chunk(call, wide[b:e], flat[b:e], reduction) for b, e in spans)
        return out

    def _all_reduce_chunk(self, call: str, wide: torch.Tensor, out: torch.Tensor, reduction: str) -> Iterator[None]:
        counts = self.places.shares(wide.numel(), _LINE // wide.element_size())
        for done in self._reduce_across(call, self._reduce_here(wide, counts, reduction), reduction):
            if done is None:
                yield
            else:
                self._gather_here(done.to(out.dtype), counts, out)

    def all_gather(self, tensor: torch.Tensor, group_size: int) -> torch.Tensor:
        """Join the tensors of all ranks along dim 0."""
        if group_size != self._size:
            raise ValueError(
                f"all_gather_into_tensor: group_size is {group_size}; group '{self._name}' has {self._size}"
            )
        places, chunk = self.places, tensor.numel() * tensor.element_size()
        call = self._describe("all_gather_into_tensor", tensor)
        block = tensor.new_empty(len(places.here) * chunk, dtype=torch.uint8)
        self._gather_here(tensor, [chunk] * len(places.here), block, is_last=False)
        parts = {host: self._cut(len(ranks) * chunk) for host, ranks in enumerate(places.hosts)}
        came: dict[int, torch.Tensor] = {}
        others = [host for host in parts if host != places.host]
        if places.lane is not None:
            begin, end = parts[places.host][places.lane]
            came = {host: block.new_empty(_length(parts[host][places.lane])) for host in others}
            self._trade(call, dict.fromkeys(others, block[begin:end]), came)
        counts = [sum(_length(parts[host][lane]) for host in others) for lane in range(places.lanes)]
        mine = torch.cat([came[host] for host in others]) if came else block.new_empty(0)
        shared = block.new_empty(sum(counts))
        self._gather_here(mine, counts + [0] * (len(places.here) - places.lanes), shared)
        blocks = {host: block.new_empty(len(places.hosts[host]) * chunk) for host in others}
        blocks[places.host] = block
        at = 0
        for lane in range(places.lanes):  # what lane i brought: its part of the block of every other host
            for host in others:
                begin, end = parts[host][lane]
                blocks[host][begin:end] = shared[at : at + end - begin]
                at += end - begin
        out = tensor.new_empty([self._size * (tensor.size(0) if tensor.dim() else 1), *tensor.shape[1:]])
        rows = out.view(-1).view(torch.uint8).view(self._size, chunk)
        for host, ranks in enumerate(places.hosts):
            for rank, row in zip(ranks, blocks[host].view(len(ranks), chunk), strict=True):
                rows[rank] = row  # not rows[ranks]: a list would be a copy to the device, which the host waits for
        return out

    def reduce_scatter(self, tensor: torch.Tensor, reduction: str, group_size: int) -> torch.Tensor:
        """Reduce over all ranks, and give each its part along dim 0."""
        if group_size != self._size or tensor.dim() == 0 or tensor.size(0) % self._size:
            raise ValueError(
                f"reduce_scatter_tensor: dimension 0 of {list(tensor.shape)} must be a multiple of the size of group "
                f"'{self._name}', which is {self._size} (group_size is {group_size})"
            )
        reduction, places = reduction.lower(), self.places
        shape = [tensor.size(0) // self._size, *tensor.shape[1:]]
        rank = places.here[places.local]
        if not places.even:
            return self.all_reduce(tensor, reduction).view(self._size, *shape)[rank].clone()
        call = self._describe("reduce_scatter_tensor", tensor, reduction)
        wide = tensor.to(accumulation_dtype(tensor.dtype, reduction)).view(self._size, -1)
        order = [ranks[lane] for lane in range(places.lanes) for ranks in places.hosts]
        hosts = range(len(places.hosts))
        per_lane = wide.size(1) * len(hosts)
        ordered = torch.cat([wide[each] for each in order])
        mine = self._reduce_here(ordered, [per_lane] * places.lanes, reduction).view(len(hosts), -1)
        parts = [mine[host] if host == places.host else torch.empty_like(mine[host]) for host in hosts]
        others = {host: parts[host] for host in hosts if host != places.host}
        self._trade(call, {host: mine[host] for host in others}, others)
        return combine(parts, reduction, self._size).to(tensor.dtype).view(shape)

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Give all ranks the tensor of group rank `src`."""
        if not 0 <= src < self._size:
            raise ValueError(f"broadcast: src is {src}; group '{self._name}' has ranks 0 to {self._size - 1}")
        places = self.places
        call = self._describe("broadcast", tensor, src)
        home = places.host_of(src)
        out = tensor.clone()
        flat = out.view(-1).view(torch.uint8) if out.numel() else out.new_empty(0, dtype=torch.uint8)
        if home == places.host:
            root = places.here.index(src)
            self.inside.broadcast(flat.data_ptr(), flat.numel(), "uint8", root, timeout_ms=self._first_ms)
        spans = self._cut(flat.numel())
        mine = flat.new_empty(0)
        if places.lane is not None:
            begin, end = spans[places.lane]
            mine = flat[begin:end]
            if home == places.host:
                others = [host for host in range(len(places.hosts)) if host != home]
                self._trade(call, dict.fromkeys(others, mine), {})
            else:
                self._trade(call, {}, {home: mine})
        if home != places.host:
            counts = [_length(span) for span in spans] + [0] * (len(places.here) - places.lanes)
            self._gather_here(mine.clone(), counts, flat)
        return out

    def _cut(self, nbytes: int) -> list[tuple[int, int]]:
        """Which bytes of a block each lane carries."""
        part = -(-nbytes // (self.places.lanes * _LINE)) * _LINE
        return [(min(lane * part, nbytes), min((lane + 1) * part, nbytes)) for lane in range(self.places.lanes)]


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _in_turns(chunks: Iterable[Iterator[None]]) -> None:
    """Run all of them to their ends, in an order that depends on nothing but how often they yield: a new one begins
    before the ones before it go on."""
    running: deque[Iterator[None]] = deque()
    for chunk in chunks:
        running.append(chunk)
        next(chunk)
        _advance(running, list(running)[:-1])
    while running:
        _advance(running, list(running))


def _advance(running: deque[Iterator[None]], some: list[Iterator[None]]) -> None:
    ended = object()
    for chunk in some:
        if next(chunk, ended) is ended:
            running.remove(chunk)
