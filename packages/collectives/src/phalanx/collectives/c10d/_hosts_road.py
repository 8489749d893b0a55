"""What a process group on several hosts has in the place of the core's group: the same calls, with addresses.

Reductions, gathers to all and broadcasts run on a Spanning (the core within each host, lanes between them), one after
another in a thread. The others are made of messages.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from phalanx.collectives.c10d._hosts_base import BaseRoad, Blocks
from phalanx.collectives.c10d._hosts_pending import Pending
from phalanx.collectives.c10d._hosts_tensors import Reduction, as_dtype, as_op, memory_at, name_of, tensor_at
from phalanx.core import Call, DType, ReduceOp, UnsupportedError

_JOINED_BYTES = 1 << 20  # larger calls gain nothing from a buffer with others
_Pair = tuple[torch.Tensor, torch.Tensor]  # source and output


class Road(BaseRoad):
    """A group on several hosts, with the calls of the core's group that the group in Python makes."""

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
        given = tensor_at(source, count, kind, owner)
        result = None if out is None else tensor_at(out, count, kind, owner)
        return self._run(what, lambda: self._reduce([(given, result)], reduction), **more)

    def all_gather(self, source: int, out: int, count: int, dtype: Any, **more: Any) -> Pending | None:
        kind, owner = as_dtype(dtype), more.get("owner")
        pair = tensor_at(source, count, kind, owner), tensor_at(out, count * self._size, kind, owner)
        return self._run("all_gather", lambda: self._gather([pair]), **more)

    def all_gather_v(self, source: int, out: int, counts: Sequence[int], dtype: Any, **more: Any) -> Pending | None:
        kind, owner = as_dtype(dtype), more.get("owner")
        mine = tensor_at(source, counts[self._position], kind, owner)
        parts = torch.split(tensor_at(out, sum(counts), kind, owner), list(counts))

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
        pair = tensor_at(source, count * self._size, kind, owner), tensor_at(out, count, kind, owner)
        return self._run("reduce_scatter", lambda: self._scatter([pair], reduction), **more)

    def reduce_scatter_v(
        self, source: int, out: int, counts: Sequence[int], dtype: Any, op: Any, *, scale: float = 1.0, **more: Any
    ) -> Pending | None:
        kind, owner = as_dtype(dtype), more.get("owner")
        reduction = Reduction("reduce_scatter", kind, as_op(op), scale)
        parts = torch.split(tensor_at(source, sum(counts), kind, owner), list(counts))
        mine = tensor_at(out, counts[self._position], kind, owner)

        def run() -> None:  # all as long as the longest
            rows = mine.new_zeros(self._size, max(counts))
            for row, part in zip(rows, parts, strict=True):
                row[: len(part)] = part
            padded = rows.new_empty(max(counts))
            self._scatter([(rows.view(-1), padded)], reduction)
            mine.copy_(padded[: len(mine)])

        return self._run("reduce_scatter", run, **more)

    def broadcast(self, data: int, count: int, dtype: Any, root: int, **more: Any) -> Pending | None:
        tensor = tensor_at(data, count, as_dtype(dtype), more.get("owner"))

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
            pair = tensor_at(call.source, taken, kind, owner), tensor_at(call.out, made, kind, owner)
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

    # ---- collectives that are made of messages ------------------------------------------------------

    def gather(self, source: int, out: int | None, count: int, dtype: Any, root: int, **more: Any) -> Pending | None:
        kind = as_dtype(dtype)
        others = [each for each in range(self._size) if each != self._position]
        sent: Blocks = {root: (source, count)}
        got: Blocks = {}
        if root == self._position:
            assert out is not None
            nbytes = count * kind.itemsize
            ctypes.memmove(out + self._position * nbytes, source, nbytes)
            sent, got = {}, {each: (out + each * nbytes, count) for each in others}
        return self._exchange(f"gather to {root}", "gather", sent, got, kind, **more)

    def scatter(self, source: int | None, out: int, count: int, dtype: Any, root: int, **more: Any) -> Pending | None:
        kind = as_dtype(dtype)
        others = [each for each in range(self._size) if each != self._position]
        sent: Blocks = {}
        got: Blocks = {root: (out, count)}
        if root == self._position:
            assert source is not None
            nbytes = count * kind.itemsize
            ctypes.memmove(out, source + self._position * nbytes, nbytes)
            sent, got = {each: (source + each * nbytes, count) for each in others}, {}
        return self._exchange(f"scatter from {root}", "scatter", sent, got, kind, **more)

    def all_to_all_v(
        self, source: int, in_counts: Sequence[int], out: int, out_counts: Sequence[int], dtype: Any, **more: Any
    ) -> Pending | None:
        kind = as_dtype(dtype)
        if source == out:  # in place: what comes must not overwrite what is still to go
            whole = tensor_at(source, sum(in_counts), kind, None).clone()
            source, more["owner"] = whole.data_ptr(), (whole, more.get("owner"))
        sent, got = _blocks(source, in_counts, kind), _blocks(out, out_counts, kind)
        (own, count), (to, _) = sent.pop(self._position), got.pop(self._position)
        ctypes.memmove(to, own, count * kind.itemsize)
        return self._exchange("all_to_all", "all_to_all", sent, got, kind, **more)

    # ---- messages -----------------------------------------------------------------------------------

    def send(
        self, data: int, peer: int, count: int, dtype: Any, *, tag: int, timeout_ms: int, owner: Any = None, **_: Any
    ) -> Pending:
        self._check("send")
        kind = as_dtype(dtype)
        memory = memory_at(data, count * kind.itemsize, owner)
        return self._mail.send("send", peer, tag, f"{name_of(kind)}, {count}", memory, owner, timeout_ms)

    def recv(
        self, data: int, peer: int, count: int, dtype: Any, *, tag: int, timeout_ms: int, owner: Any = None, **_: Any
    ) -> Pending:
        self._check("recv")
        kind = as_dtype(dtype)
        memory = memory_at(data, count * kind.itemsize, owner)
        return self._mail.receive("recv", peer, tag, f"{name_of(kind)}, {count}", memory, owner, timeout_ms)


def _blocks(address: int, counts: Sequence[int], kind: DType) -> Blocks:
    """Those of all ranks, one after another."""
    made = {}
    for rank, count in enumerate(counts):
        made[rank] = address, count
        address += count * kind.itemsize
    return made
