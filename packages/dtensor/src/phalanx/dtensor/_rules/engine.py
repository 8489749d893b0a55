"""From a rule and the ranks of its tensors: every way to cut an op over one mesh dim, and which of them combine.

A strategy is for one mesh dim: a placement for each tensor that goes in and comes out. It follows from the rule's text
and the ranks alone; what depends on sizes is kept as a condition, arithmetic on the sizes of the factors, so that a new
shape costs no new derivation. Over a mesh of several dims each takes a strategy of its own (`combine`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations

from phalanx.dtensor._rules import constraints
from phalanx.dtensor._rules.parser import BATCH, RuleError, TensorDims, parse
from phalanx.dtensor.placement_types import Partial, Placement, Replicate, Shard

PARTIAL_OPS: dict[str, str] = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "product"}
"""The op of the Partial that a reduction of a rule leaves."""

# For each clause the Partials that it lets pass, and what comes out; None: it is whole. Others pass as they are.
_KINDS: dict[str, tuple[tuple[str, str | None], ...]] = {
    "lin": (("sum", "sum"),),
    "up": (("max", "max"), ("min", "min")),
    "down": (("max", "min"), ("min", "max")),
    "drop": tuple((kind, None) for kind in ("sum", "max", "min", "product")),
    "pass": tuple((kind, kind) for kind in ("sum", "max", "min", "product")),
}
# What a Partial must mean in the dtype of the inputs; for other clauses, that it is a sum, or an extreme.
_NEEDED = {"lin": "linear", "up": "rising", "down": "rising"}

# More inputs than this broadcast in one way only, with the same split of all: 2**n - 1 ways would be too many.
_MOST_BROADCAST = 4


@dataclass(frozen=True)
class Strategy:
    """One way to run an op over one mesh dim."""

    inputs: tuple[Placement | None, ...]  # None for a tensor that is not read and stays as it is
    outputs: tuple[Placement, ...]  # the placement of each
    factor: str | None = None  # the factor that is cut, if one is
    conditions: tuple[constraints.Condition, ...] = ()  # on sizes and dtypes
    scale: tuple[int, ...] = ()  # the outputs that are multiplied by the rank's share of the factor
    fill: str | None = None  # the reduction whose neutral element stands for the result of a rank that has no part


@dataclass(frozen=True)
class Expanded:
    """A rule for tensors of known ranks: batch dims have names of their own, `..0` the last one."""

    inputs: tuple[constraints.ExpandedDims | None, ...]
    outputs: tuple[constraints.ExpandedDims | None, ...]
    strategies: tuple[Strategy, ...]  # for one mesh dim


def _expand(tensor: TensorDims, batch_count: int) -> constraints.ExpandedDims | None:
    if tensor.dims is None:
        return None
    dims: list[tuple[str, ...]] = []
    for factors in tensor.dims:
        dims += [(f"..{place}",) for place in reversed(range(batch_count))] if factors == (BATCH,) else [factors]
    return tuple(dims)


def _placed(dims: constraints.ExpandedDims | None, factor: str) -> tuple[int | None, list[constraints.Condition]]:
    """(the dim with a factor or None, what must hold where the dim has other factors too)."""
    for index, factors in enumerate(dims or ()):
        if factor in factors:
            at = factors.index(factor)
            conditions: list[constraints.Condition] = [constraints.AllOne(factors[:at])] if at else []
            if factors[at + 1 :]:
                conditions.append(constraints.Aligned(factor, factors[at + 1 :]))
            return index, conditions
    return None, []


class _Deriver:
    """Derives the strategies of one rule for one choice of ranks."""

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        self.rule = rule = parse(text)
        if len(ranks) != len(rule.inputs):
            raise RuleError(
                f"the sharding rule '{text}' is for {len(rule.inputs)} tensors, and the call has {len(ranks)}"
            )
        counts: list[int] = []
        for index, (tensor, rank) in enumerate(zip(rule.inputs, ranks, strict=True)):
            left = rank - tensor.explicit_count
            if tensor.dims is not None and (left < 0 or (left and not tensor.batched)):
                least = "at least " if tensor.batched else ""
                raise RuleError(
                    f"the sharding rule '{text}' needs {least}{tensor.explicit_count} dims in input {index}, "
                    f"and the call has {rank}"
                )
            counts.append(left if tensor.batched else 0)
        self.inputs = tuple(_expand(one, count) for one, count in zip(rule.inputs, counts, strict=True))
        self.outputs = tuple(_expand(one, max(counts)) for one in rule.outputs)
        self.whole: list[Placement | None] = [None if one.unread else Replicate() for one in rule.inputs]
        self.reductions = {one.factor: one for one in rule.reductions}

    def factors(self) -> list[str]:
        """The factors that may be cut, in the order in which the inputs show them."""
        names = (name for dims in self.inputs for factors in dims or () for name in factors)
        whole = self.rule.whole
        return [one for one in dict.fromkeys(names) if one not in whole and not (one[0] == "." and BATCH in whole)]

    def all(self) -> Iterator[Strategy]:
        whole = self.whole
        yield Strategy(tuple(whole), (Replicate(),) * len(self.outputs))
        for factor in self.factors():
            yield from self.cut(factor)
        for one in self.rule.passes:
            for kind_in, kind_out in _KINDS.get(one.kind, ((PARTIAL_OPS.get(one.kind, ""),) * 2,)):
                inputs = whole.copy()
                for index in one.inputs:
                    inputs[index] = Partial(kind_in)
                meaning = _NEEDED.get(one.kind, {"sum": "sum", "max": "extreme", "min": "extreme"}.get(kind_in))
                output = Replicate() if kind_out is None else Partial(kind_out)
                conditions = () if meaning is None else (constraints.Means(meaning, one.inputs),)
                yield Strategy(tuple(inputs), (output,) * len(self.outputs), None, conditions)

    def cut(self, factor: str) -> Iterator[Strategy]:
        """Strategies that cut a factor: one, or one for each way in which inputs broadcast in it."""
        conditions: list[constraints.Condition] = []
        inputs = self.whole.copy()
        at: list[constraints.Where] = []
        for index, dims in enumerate(self.inputs):
            dim, needed = _placed(dims, factor)
            if dim is not None:
                inputs[index] = Shard(dim)
                conditions += needed
                if not needed:
                    at.append((index, dim))
        named = BATCH if factor[0] == "." else factor  # how clauses call it
        reduction = self.reductions.get(named)
        outputs: list[Placement] = []
        lacking: list[int] = []
        for index, dims in enumerate(self.outputs):
            dim, needed = _placed(dims, factor)
            conditions += needed
            if dim is not None:
                outputs.append(Shard(dim))
            elif reduction is None:
                return  # what comes out would need the whole factor
            else:
                outputs.append(Replicate() if reduction.op == "same" else Partial(PARTIAL_OPS[reduction.op]))
                lacking.append(index)
        scale: tuple[int, ...] = ()
        if named in self.rule.scaled:
            scale = tuple(range(len(self.outputs)))
        elif reduction is not None and reduction.op == "mean":
            scale = tuple(lacking)
        fill = reduction.op if reduction is not None and reduction.op in ("max", "min") and not scale else None
        if named in self.rule.full:
            conditions.append(constraints.EachHas(factor))
        if scale or fill:
            conditions.append(constraints.NotEmpty(factor))
        for index in reduction.with_inputs if reduction else ():
            inputs[index] = Partial("sum")
        # In a batch dim some of the inputs may have size 1, and broadcast.
        most = len(at) if factor[0] == "." and len(at) <= _MOST_BROADCAST else 1
        for ones in chain.from_iterable(combinations(at, count) for count in range(max(1, most))):
            cut = tuple(one for one in at if one not in ones)
            placements = inputs.copy()
            own = list(conditions)
            if len(cut) > 1:
                own.append(constraints.SameSize(cut))
            if ones:
                own.append(constraints.Broadcast(ones, cut))
                for index, _ in ones:
                    placements[index] = Replicate()
            yield Strategy(tuple(placements), tuple(outputs), factor, tuple(dict.fromkeys(own)), scale, fill)


@cache
def derive(text: str, ranks: tuple[int, ...]) -> Expanded:
    """A rule (see `parser`) for inputs of so many dims, with its strategies; the first leaves every tensor whole."""
    deriver = _Deriver(text, ranks)
    return Expanded(deriver.inputs, deriver.outputs, tuple(deriver.all()))


def combine(strategies: Sequence[Strategy], facts: constraints.OpSizes, mesh_shape: Sequence[int]) -> bool:
    """Whether the strategies, one of the same rule for each mesh dim, are right together for these sizes."""
    ways: dict[str, list[int]] = {}
    for strategy, count in zip(strategies, mesh_shape, strict=True):
        own: list[int] = []
        if strategy.factor is not None:
            own = ways.setdefault(strategy.factor, [])
            own.append(count)
        if not all(one.is_satisfied(facts, own) for one in strategy.conditions):
            return False
    if len(strategies) == 1:
        return True
    for side in ("inputs", "outputs"):
        for placements in zip(*(getattr(one, side) for one in strategies), strict=True):
            cut: dict[int, str | None] = {}
            kinds = set()
            for placement, strategy in zip(placements, strategies, strict=True):
                if isinstance(placement, Shard):
                    # One dim cut by two factors: the chunks of one would not be chunks of the other.
                    if cut.setdefault(placement.dim, strategy.factor) != strategy.factor:
                        return False
                elif isinstance(placement, Partial):
                    kinds.add(placement.reduce_op)
            if len(kinds) > 1:
                return False  # a sum of maxima is not a maximum of sums
    return True
