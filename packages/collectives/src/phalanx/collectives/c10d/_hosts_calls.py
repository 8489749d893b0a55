"""The collectives of the core's group, with addresses, for groups on several hosts: on a Spanning, and by exchanges.

Reductions, gathers to all and broadcasts run on a Spanning (the core within each host, lanes between them). The others
are exchanges of blocks. How both are run is for those who derive from this: in a thread for tensors of the CPU
(_hosts_road.py), on a stream for those of a GPU (_hosts_gpus.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from phalanx.collectives._hosts import Spanning
from phalanx.collectives.c10d._hosts_pending import Pending
from phalanx.collectives.c10d._hosts_tensors import Reduction, as_dtype, as_op
from phalanx.core import Call, DType, ReduceOp, UnsupportedError

_JOINED_BYTES = 1 << 20  # larger calls gain nothing from a buffer with others
_Pair = tuple[torch.Tensor, torch.Tensor]  # source and output
Blocks = dict[int, torch.Tensor]  # by rank: what goes there, or comes from there


class Calls(ABC):
    """The collectives of a group on several hosts, as the group in Python calls those of the core's group.

    Args:
        size: How many ranks it has.
        position: Of this one.
        spanning: Its collectives.
    """

    def __init__(self, size: int, position: int, spanning: Spanning) -> None:
        self._size = size
        self._position = position
        self._spanning = spanning

    @abstractmethod
    def _at(self, address: int, count: int, kind: DType, owner: Any) -> torch.Tensor:
        """The elements at an address, which keep their owner."""

    @abstractmethod
    def _run(self, what: str, run: Callable[[], None], *_: Any, **more: Any) -> Pending | None:
        """Let something run on the Spanning. `more` is what the call was given besides."""

    @abstractmethod
    def _exchange(
        self, call: str, what: str, sent: Blocks, got: Blocks, kind: DType, *_: Any, **more: Any
    ) -> Pending | None:
        """Send blocks to some ranks, and receive blocks of some. Of this rank's own there are both or none."""

    # ---- collectives that the Spanning has ----------------------------------------------------------

    def all_reduce(
        self, source: int, out: int, count: int, dtype: Any, op: Any, *, scale: float = 1.0, **more: Any
    ) -> Pending | None:
        return self._start_reduce("all_reduce", source, out, count, dtype, op, scale, more)

    def reduce(
        self, source: int, out: int | None, count: int, dtype: Any, op: Any, _: int, *, scale: float = 1.0, **more: Any
    ) -> Pending | None:
        return self._start_reduce("reduce", source, out, count, dtype, op, scale, more)

    def _start_reduce(
        self,
        what: str,
        source: int,
        out: int | None,
        count: int,
        dtype: Any,
        op: Any,
        scale: float,
        more: dict[str, Any],
    ) -> Pending | None:
        kind, owner = as_dtype(dtype), more.get("owner")
        reduction = Reduction(what, kind, as_op(op), scale)
        given = self._at(source, count, kind, owner)
        result = None if out is None else self._at(out, count, kind, owner)
        return self._run(what, lambda: self._reduce([(given, result)], reduction), **more)

    def all_gather(self, source: int, out: int, count: int, dtype: Any, **more: Any) -> Pending | None:
        kind, owner = as_dtype(dtype), more.get("owner")
        pair = self._at(source, count, kind, owner), self._at(out, count * self._size, kind, owner)
        return self._run("all_gather", lambda: self._gather([pair]), **more)

    def all_gather_v(self, source: int, out: int, counts: Sequence[int], dtype: Any, **more: Any) -> Pending | None:
        kind, owner = as_dtype(dtype), more.get("owner")
        mine = self._at(source, counts[self._position], kind, owner)
        parts = torch.split(self._at(out, sum(counts), kind, owner), list(counts))

        def run() -> None:  # all as long as the longest
            padded = mine.new_zeros(max(counts))
            padded[: len(mine)] = mine
            rows = padded.new_empty(self._size * len(padded))
            self._gather([(padded, rows)])
            for part, row in zip(parts, rows.view(self._size, len(padded)), strict=True):
                part.copy_(row[: len(part)])

        return self._run("all_gather", run, **more)

    def reduce_scatter(
        self, source: int, out: int, count: int, dtype: Any, op: Any, *, scale: float = 1.0, **more: Any
    ) -> Pending | None:
        kind, owner = as_dtype(dtype), more.get("owner")
        reduction = Reduction("reduce_scatter", kind, as_op(op), scale)
        pair = self._at(source, count * self._size, kind, owner), self._at(out, count, kind, owner)
        return self._run("reduce_scatter", lambda: self._scatter([pair], reduction), **more)

    def reduce_scatter_v(
        self, source: int, out: int, counts: Sequence[int], dtype: Any, op: Any, *, scale: float = 1.0, **more: Any
    ) -> Pending | None:
        kind, owner = as_dtype(dtype), more.get("owner")
        reduction = Reduction("reduce_scatter", kind, as_op(op), scale)
        parts = torch.split(self._at(source, sum(counts), kind, owner), list(counts))
        mine = self._at(out, counts[self._position], kind, owner)

        def run() -> None:  # all as long as the longest
            rows = mine.new_zeros(self._size, max(counts))
            for row, part in zip(rows, parts, strict=True):
                row[: len(part)] = part
            padded = rows.new_empty(max(counts))
            self._scatter([(rows.view(-1), padded)], reduction)
            mine.copy_(padded[: len(mine)])

        return self._run("reduce_scatter", run, **more)

    def broadcast(self, data: int, count: int, dtype: Any, root: int, **more: Any) -> Pending | None:
        tensor = self._at(data, count, as_dtype(dtype), more.get("owner"))

        def run() -> None:
            done = self._spanning.run("broadcast", tensor, root)
            assert done is not None
            if root != self._position:
                tensor.copy_(done)

        return self._run("broadcast", run, **more)

    def coalesced(self, calls: Iterable[Call], *, scale: float = 1.0, **more: Any) -> Pending | None:
        """Small calls of one form and dtype are one, in a buffer of their own."""
        owner = more.get("owner")
        joined: dict[tuple[str, DType, ReduceOp | None, int], list[_Pair]] = {}
        for call in calls:
            form, count = call.form.name, call.count or 0
            kind, op = as_dtype(call.dtype or 0), None if call.op is None else as_op(call.op)
            taken = count * (self._size if form == "reduce_scatter" else 1)
            made = count * (self._size if form == "all_gather" else 1)
            pair = self._at(call.source, taken, kind, owner), self._at(call.out, made, kind, owner)
            alone = len(joined) if pair[0].nbytes > _JOINED_BYTES else -1
            joined.setdefault((form, kind, op, alone), []).append(pair)
        runs: list[Callable[[], None]] = []
        for (form, kind, op, _), pairs in joined.items():
            if form not in ("all_reduce", "all_gather", "reduce_scatter"):
                raise UnsupportedError(f"coalesced: {form} is not there for groups on several hosts")
            runs.append(self._prepared(form, kind, op, pairs, scale))

        def run() -> None:
            for each in runs:
                each()

        return self._run("coalesced", run, **more)

    def _prepared(
        self, form: str, kind: DType, op: ReduceOp | None, pairs: list[_Pair], scale: float
    ) -> Callable[[], None]:
        if op is None:
            return lambda: self._gather(pairs)
        reduction = Reduction(form, kind, op, scale)
        if form == "all_reduce":
            return lambda: self._reduce(pairs, reduction)
        return lambda: self._scatter(pairs, reduction)

    # ---- run in the thread --------------------------------------------------------------------------

    def _reduce(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]], reduction: Reduction) -> None:
        given = [reduction.given(source) for source, _ in pairs]
        done = self._spanning.run("all_reduce", given[0] if len(given) == 1 else torch.cat(given), reduction.name)
        assert done is not None
        for (_, out), part in zip(pairs, torch.split(done, [len(each) for each in given]), strict=True):
            if out is not None:
                reduction.take(part, out)

    def _gather(self, pairs: Sequence[_Pair]) -> None:
        given = pairs[0][0] if len(pairs) == 1 else torch.cat([source for source, _ in pairs])
        done = self._spanning.run("all_gather_into_tensor", given, self._size)
        assert done is not None
        rows = done.view(self._size, len(given))
        for (source, out), part in zip(pairs, torch.split(rows, [len(source) for source, _ in pairs], 1), strict=True):
            out.view(self._size, len(source)).copy_(part)

    def _scatter(self, pairs: Sequence[_Pair], reduction: Reduction) -> None:
        given = [reduction.given(source).view(self._size, len(out)) for source, out in pairs]
        whole = given[0] if len(given) == 1 else torch.cat(given, 1)
        if whole.numel() == 0:
            return
        done = self._spanning.run("reduce_scatter_tensor", whole.view(-1), reduction.name, self._size)
        assert done is not None
        for (_, out), part in zip(pairs, torch.split(done, [len(out) for _, out in pairs]), strict=True):
            reduction.take(part, out)

    # ---- collectives that are exchanges -------------------------------------------------------------

    def gather(self, source: int, out: int | None, count: int, dtype: Any, root: int, **more: Any) -> Pending | None:
        kind, owner = as_dtype(dtype), more.get("owner")
        got: Blocks = {}
        if root == self._position:
            assert out is not None
            got = self._blocks(out, [count] * self._size, kind, owner)
        sent = {root: self._at(source, count, kind, owner)}
        return self._exchange(f"gather to {root}", "gather", sent, got, kind, **more)

    def scatter(self, source: int | None, out: int, count: int, dtype: Any, root: int, **more: Any) -> Pending | None:
        kind, owner = as_dtype(dtype), more.get("owner")
        sent: Blocks = {}
        if root == self._position:
            assert source is not None
            sent = self._blocks(source, [count] * self._size, kind, owner)
        got = {root: self._at(out, count, kind, owner)}
        return self._exchange(f"scatter from {root}", "scatter", sent, got, kind, **more)

    def all_to_all_v(
        self, source: int, in_counts: Sequence[int], out: int, out_counts: Sequence[int], dtype: Any, **more: Any
    ) -> Pending | None:
        kind, owner = as_dtype(dtype), more.get("owner")
        sent = self._blocks(source, in_counts, kind, owner)
        got = self._blocks(out, out_counts, kind, owner)
        return self._exchange("all_to_all", "all_to_all", sent, got, kind, **more)

    def _blocks(self, address: int, counts: Sequence[int], kind: DType, owner: Any) -> Blocks:
        """The block of each rank, by rank. They lie one after another from `address` on."""
        return dict(enumerate(torch.split(self._at(address, sum(counts), kind, owner), list(counts))))
