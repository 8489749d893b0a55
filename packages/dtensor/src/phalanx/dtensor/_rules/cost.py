"""The cost of a strategy for given placements, and the choice of the cheapest one: the same on all ranks.

A change of placement moves bytes over one mesh dim of n ranks, where G are the bytes of the tensor that the mesh dim
sees (the other mesh dims may have cut it):

    Shard -> Replicate       all_gather       (n-1)/n G
    Shard(a) -> Shard(b)     all_to_all       (n-1)/n**2 G
    Partial -> Replicate     all_reduce       2(n-1)/n G
    Partial -> Shard         reduce_scatter   (n-1)/n G
    Replicate -> Shard       a copy of G/n, no communication
    Replicate -> Partial     nothing, or a fill of G

A Shard is never made a Partial: it would turn a part into a whole that has to be reduced later. The choice does not
depend on the rank or on a clock, and of equal strategies the first one of the rule wins, so every rank makes the same
choice.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod

from phalanx.dtensor._rules.engine import Strategy, combine
from phalanx.dtensor._rules.registry import Match
from phalanx.dtensor._torch_compat import hint, known_to_divide
from phalanx.dtensor.placement_types import Partial, Placement, Replicate, Shard

# A search over a large mesh gives up after this many combinations and leaves every tensor whole.
_MOST_TRIED = 4096


@dataclass(frozen=True)
class MeshDimCost:
    """The cost of communication over one mesh dim; times are in microseconds."""

    size: int  # how many ranks
    latency_us: float = 3.0  # of one collective
    bytes_per_us: float = 10_000.0  # bytes that a rank can send in a microsecond


@dataclass(frozen=True)
class CostModel:
    """The costs of a mesh."""

    mesh: tuple[MeshDimCost, ...]  # one entry for each mesh dim
    copy_bytes_per_us: float = 8_000.0  # bytes that a rank copies in a microsecond
    partial_us: float = 0.5  # for each output that becomes Partial where no input was: it is to be reduced later

    def change_us(self, source: Placement, target: Placement | None, count_bytes: float, mesh_dim: int) -> float:
        """The microseconds of redistributing a tensor, of which the mesh dim sees so many bytes; inf if no way leads
        there. The target is None if any placement will do.
        """
        if target is None or source == target:
            return 0.0
        dim = self.mesh[mesh_dim]
        if type(source) is Replicate:
            if type(target) is Partial:
                return count_bytes / self.copy_bytes_per_us
            return count_bytes / dim.size / self.copy_bytes_per_us
        if type(target) is Partial:
            return inf
        moved = (dim.size - 1) / dim.size * count_bytes
        if type(source) is Partial:
            moved *= 2 if type(target) is Replicate else 1
        elif type(target) is not Replicate:
            moved /= dim.size
        return dim.latency_us + moved / dim.bytes_per_us


@lru_cache(maxsize=256)
def default_model(mesh_shape: tuple[int, ...]) -> CostModel:
    """The costs of a mesh of which nothing was measured."""
    return CostModel(tuple(MeshDimCost(size) for size in mesh_shape))


@dataclass(frozen=True)
class Choice:
    """The cheapest strategies, one for each mesh dim, and what the changes of placements before them cost."""

    strategies: tuple[Strategy, ...]  # one for each mesh dim
    cost_us: float  # the estimate
    inputs: tuple[tuple[Placement | None, ...], ...]  # where each input is redistributed to; None where it stays
    outputs: tuple[tuple[Placement, ...], ...]  # the placements of each output


def _seen_bytes(match: Match, placements: Sequence[Sequence[Placement]], model: CostModel) -> list[list[float]]:
    """The bytes of each input that each mesh dim sees: the others have cut it."""
    found: list[list[float]] = []
    for meta, own in zip(match.call.tensors, placements, strict=True):
        whole = prod(map(hint, meta.shape)) * meta.dtype.itemsize
        shares = [1 / one.size if type(p) is Shard else 1.0 for p, one in zip(own, model.mesh, strict=True)]
        found.append([whole * prod(shares[:at] + shares[at + 1 :]) for at in range(len(shares))])
    return found


def strategy_us(
    strategy: Strategy, placements: Sequence[Placement], count_bytes: Sequence[float], model: CostModel, mesh_dim: int
) -> float:
    """The cost of redistributing the inputs, as they are on one mesh dim now, to the placements of a strategy.

    `count_bytes` are the bytes of each input that the mesh dim sees.
    """
    total = 0.0
    partial = any(type(one) is Partial for one in placements)
    if not partial and strategy.factor is None and any(type(one) is Partial for one in strategy.inputs):
        return inf  # no input is a Partial: only a bias has to become one, if a factor is split
    for source, target, count in zip(placements, strategy.inputs, count_bytes, strict=True):
        total += model.change_us(source, target, count, mesh_dim)
    # A sum would be scattered, and a replicated input split: the activations would have to be gathered again later.
    changes = {(type(source), type(target)) for source, target in zip(placements, strategy.inputs, strict=True)}
    if (Partial, Shard) in changes and (Replicate, Shard) in changes:
        total += max(
            model.change_us(target, source, count, mesh_dim)
            for source, target, count in zip(placements, strategy.inputs, count_bytes, strict=True)
            if type(source) is Replicate and type(target) is Shard
        )
    if not partial and any(type(one) is Partial for one in strategy.outputs):
        total += model.partial_us
    return total


def _uneven_dims(match: Match, model: CostModel) -> list[set[tuple[int, int]]]:
    """For each mesh dim the (input, dim) that it may not divide, if a size of the call is a symbol; else none.

    A graph that is traced with a batch of 8 is to serve one of 7, and uneven pieces need the size itself.
    """
    if all(type(size) is int for meta in match.call.tensors for size in meta.shape):
        return [set()] * len(model.mesh)
    return [
        {
            (index, dim)
            for index, meta in enumerate(match.call.tensors)
            for dim, size in enumerate(meta.shape)
            if not known_to_divide(size, one.size)
        }
        for one in model.mesh
    ]


def _cuts(strategy: Strategy, placements: Sequence[Placement], uneven: set[tuple[int, int]]) -> bool:
    """Whether an input would be redistributed to a Shard of one of these dims."""
    return bool(uneven) and any(
        isinstance(target, Shard) and source != target and (index, target.dim) in uneven
        for index, (source, target) in enumerate(zip(placements, strategy.inputs, strict=True))
    )


def choose(match: Match, placements: Sequence[Sequence[Placement]], model: CostModel) -> Choice:
    """The cheapest strategies for a call, given for each input its placements, one for each mesh dim.

    The choice is the same on every rank that passes the same arguments.

    Raises:
        ValueError: The op writes into an input, and no strategy leaves that input's placement as it is.
    """
    mesh_shape = [one.size for one in model.mesh]
    seen = _seen_bytes(match, placements, model)
    uneven = _uneven_dims(match, model)
    lists: list[list[tuple[float, int]]] = []
    for mesh_dim in range(len(model.mesh)):
        now = [own[mesh_dim] for own in placements]
        count_bytes = [own[mesh_dim] for own in seen]
        costs = [
            (strategy_us(strategy, now, count_bytes, model, mesh_dim), index)
            for index, strategy in enumerate(match.strategies)
            if not match.in_place or strategy.inputs[0] == now[0]
            if not _cuts(strategy, now, uneven[mesh_dim])
        ]
        lists.append(sorted(one for one in costs if one[0] < inf))
    # The cheapest first, one step at a time in one mesh dim: conditions may forbid combinations.
    start = (0,) * len(lists)
    heap = [(sum(one[0][0] for one in lists), start)] if all(lists) else []
    known = {start}
    for _ in range(_MOST_TRIED):
        if not heap:
            break
        cost, places = heapq.heappop(heap)
        strategies = tuple(match.strategies[own[place][1]] for own, place in zip(lists, places, strict=True))
        if combine(strategies, match.facts, mesh_shape):
            inputs = tuple(zip(*(one.inputs for one in strategies), strict=True))
            outputs = tuple(zip(*(one.outputs for one in strategies), strict=True))
            return Choice(strategies, cost, inputs, outputs)
        for mesh_dim, own in enumerate(lists):
            after = (*places[:mesh_dim], places[mesh_dim] + 1, *places[mesh_dim + 1 :])
            if after[mesh_dim] < len(own) and after not in known:
                known.add(after)
                heapq.heappush(heap, (sum(one[place][0] for one, place in zip(lists, after, strict=True)), after))
    raise ValueError(
        f"{match.call.op}: the op writes into a tensor of placements {list(map(str, placements[0]))}, and no strategy "
        f"of its rule '{match.rule.text}' keeps them: redistribute it first, or use the op that returns a new tensor"
    )
