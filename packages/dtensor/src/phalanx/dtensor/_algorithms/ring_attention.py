"""Ring attention: attention over a sequence of which each rank has a part, in which keys and values go round.

In each of n steps a rank attends with its queries to the keys and values that it holds, and passes these on to the next
rank; what it gets is on its way while it computes. Parts of the result are put together by their log-sum-exp. In the
backward the gradients of keys and values travel with them and come home after n steps. Memory and messages: one part of
the keys and values each, (n-1) and, backward, 2n-1 times a step.

A part is given by runs (first position, length) in the order in which they lie: one for a plain shard; two, from the
head and from the tail of the sequence, where causal attention is to cost every rank the same. Runs need not be equal.

Sources: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers" (arXiv 2310.01889); the balance by head
and tail: Llama 3 (arXiv 2407.21783), section 3.3.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx.dtensor._layout import Runs

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Messages of the ring do not meet those of a user's own send and recv.
_TAG = 0x72696E67
SEQUENCE = 2  # the dim of the sequence in (batch, heads, sequence, features)


@dataclass(frozen=True)
class Ring:
    """The ranks that have parts of one sequence."""

    ranks: tuple[int, ...]  # global ranks, in the order in which keys and values go round
    place: int  # where this rank is among them
    group: dist.ProcessGroup | None  # a group with all of them; None for one rank alone
    queries: tuple[Runs, ...]  # for each rank the runs of its queries
    keys: tuple[Runs, ...]  # and those of its keys and values

    def length(self, step: int) -> int:
        """The number of keys that this rank holds in a step."""
        return sum(int(length) for _, length in self.keys[(self.place - step) % len(self.ranks)])

    def steps(self, held: torch.Tensor, causal: bool) -> "Iterator[tuple[int, torch.Tensor, Iterator[Piece]]]":
        """(number, keys and values that this rank holds, pieces of attention) of each step; the next are coming."""
        count = len(self.ranks)
        for step in range(count):
            coming, works = _pass_on(self, held, self.length(step + 1), _TAG) if step + 1 < count else (held, [])
            yield step, held, pieces(self.queries[self.place], self.keys[(self.place - step) % count], causal)
            for work in works:
                work.wait()
            held = coming


# ---- which queries see which keys ------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Queries [q, q_end) and keys [k, k_end), as places in local tensors; `causal`: only those up to the diagonal."""

    q: int
    q_end: int
    k: int
    k_end: int
    causal: bool

    def queries(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(SEQUENCE, self.q, self.q_end - self.q)

    def keys(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(SEQUENCE, self.k, self.k_end - self.k)


def pieces(queries: Runs, keys: Runs, causal: bool) -> Iterator[Piece]:
    """The pairs of queries and keys that attention needs, as rectangles and as squares on the diagonal."""
    q_at = 0
    for q, q_length in _ints(queries):
        k_at = 0
        for k, k_length in _ints(keys):
            for one in _pieces_of_runs(q, q + q_length, k, k + k_length, causal):
                yield Piece(one.q - q + q_at, one.q_end - q + q_at, one.k - k + k_at, one.k_end - k + k_at, one.causal)
            k_at += k_length
        q_at += q_length


def _ints(runs: Runs) -> list[tuple[int, int]]:
    return [(int(begin), int(length)) for begin, length in runs]


def _pieces_of_runs(q: int, q_end: int, k: int, k_end: int, causal: bool) -> Iterator[Piece]:
    """The same of two runs, in positions of the sequence."""
    if q == q_end or k == k_end:
        return
    if not causal:
        yield Piece(q, q_end, k, k_end, False)
        return
    low, high = max(q, k), min(q_end, k_end)
    if low < high:
        yield Piece(low, high, low, high, True)
        if k < low:
            yield Piece(low, high, k, low, False)
    after = max(q, k_end)  # queries that come after all keys
    if after < q_end:
        yield Piece(after, q_end, k, k_end, False)


# ---- round the ring --------------------------------------------------------------------------------------------------


def _pass_on(ring: Ring, tensor: torch.Tensor, lengths: int, tag: int) -> tuple[torch.Tensor, list[dist.Work]]:
    """Send a tensor to the next rank, and get one with `lengths` keys from the one before: (it, what to wait for)."""
    count = len(ring.ranks)
    shape = list(tensor.shape)
    shape[SEQUENCE + 1] = lengths
    received = tensor.new_empty(shape)
    after, before = ring.ranks[(ring.place + 1) % count], ring.ranks[(ring.place - 1) % count]
    ops = []
    if received.numel():
        ops.append(pc.P2POp(pc.irecv, received, before, ring.group, tag))
    if tensor.numel():
        ops.append(pc.P2POp(pc.isend, tensor, after, ring.group, tag))
    return received, list(pc.batch_isend_irecv(ops)) if ops else []


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys and values of all. Collective over the ring.

    This rank's parts are (batch, heads, sequence, features), of one floating dtype, on the CPU. Returns the output, as
    the query, and the log-sum-exp of the scores, (batch, heads, sequence), which the backward needs.
    """
    wide = wide_dtype(query.dtype)
    result = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
    total = query.new_full(query.shape[:-1], -torch.inf, dtype=wide)
    for _, held, parts in ring.steps(torch.stack((key, value)), causal):
        for one in parts:
            keys, values = map(one.keys, held)
            part, sums = _forward(one.queries(query), keys, values, 0.0, one.causal, scale=scale)
            _merge(one.queries(result), one.queries(total), part, sums)
    return result.to(query.dtype), total


def _merge(result: torch.Tensor, total: torch.Tensor, part: torch.Tensor, sums: torch.Tensor) -> None:
    """Put a part of the keys to what was found for others, in place."""
    both = torch.logaddexp(total, sums)
    result.mul_((total - both).exp_().unsqueeze(-1)).add_(part * (sums - both).exp_().unsqueeze(-1))
    total.copy_(both)


def ring_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    total: torch.Tensor,
    ring: Ring,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, from that of the output of `ring_attention`. Collective over the ring."""
    wide = wide_dtype(query.dtype)
    grad_query = torch.zeros_like(query, dtype=wide, memory_format=torch.contiguous_format)
    both = torch.stack((key, value))
    grads = torch.zeros_like(both, dtype=wide)
    for step, held, needed in ring.steps(both, causal):
        for one in needed:
            # With the sums of all keys the parts of the gradient are those of the whole, and add up.
            inputs = one.queries(query), *map(one.keys, held), one.queries(output), one.queries(total)
            parts = _backward(one.queries(grad).contiguous(), *inputs, 0.0, one.causal, scale=scale)
            one.queries(grad_query).add_(parts[0])
            one.keys(grads[0]).add_(parts[1])
            one.keys(grads[1]).add_(parts[2])
        if len(ring.ranks) > 1:
            # They go on to the rank that works on these keys next, and last to the one whose they are.
            grads, works = _pass_on(ring, grads, ring.length(step + 1), _TAG + 1)
            for work in works:
                work.wait()
    return grad_query.to(query.dtype), grads[0].to(key.dtype), grads[1].to(value.dtype)
