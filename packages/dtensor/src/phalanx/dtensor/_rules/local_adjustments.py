"""Differences between a rank and one process: sizes among the arguments, shares of means, results of empty parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from phalanx.dtensor import _layout
from phalanx.dtensor._rules.constraints import OpSizes, nested_chunk
from phalanx.dtensor._rules.engine import Strategy
from phalanx.dtensor._rules.parser import Rule
from phalanx.dtensor._torch_compat import surely_equal


def neutral(op: str, dtype: torch.dtype) -> float | int | bool:
    """The element that a maximum or a minimum of others does not notice."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf" if op == "max" else "inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


@dataclass(frozen=True)
class LocalWork:
    """How one rank runs the op."""

    sizes: tuple[tuple[int, Any], ...]  # (argument, new value): shapes and counts that are smaller here
    scales: tuple[tuple[int, float], ...]  # (output, share): what comes out is multiplied by this
    fills: str | None  # None to run the op; else the reduction whose neutral element fills the outputs
    shapes: tuple[tuple[int, ...], ...]  # the local shape of each output

    def finish(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of the op, scaled by the share of the rank."""
        done = list(outputs)
        for index, share in self.scales:
            # A rank with a share of nothing may have got NaN, a mean of nothing: it adds nothing, not NaN.
            done[index] = done[index] * share if share else torch.zeros_like(done[index])
        return done

    def filled(self, dtypes: Sequence[torch.dtype], device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """The results of a rank on which the op cannot run."""
        op = self.fills or "max"
        return [
            torch.full(shape, neutral(op, dtype), dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes, dtypes, strict=True)
        ]


def results_of(op: Any, args: Sequence[Any], result: Any) -> list[torch.Tensor]:
    """The tensors that an op returned, as its rule counts them: those that its output_mask leaves out are left out."""
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    for argument, value in zip(op._schema.arguments, args, strict=True):
        if argument.name == "output_mask":
            # Some kernels return what was not asked for.
            results = [one for one, wanted in zip(results, value, strict=True) if wanted]
    return [one for one in results if one is not None]


def local_work(
    rule: Rule,
    strategies: Sequence[Strategy],
    facts: OpSizes,
    output_shapes: Sequence[Sequence[int]],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> LocalWork:
    """How the rank at `coordinate` runs the op, given a strategy for each mesh dim and the whole shapes of outputs."""
    cuts: dict[str, list[tuple[int, int]]] = {}
    for strategy, count, index in zip(strategies, mesh_shape, coordinate, strict=True):
        if strategy.factor is not None:
            cuts.setdefault(strategy.factor, []).append((count, index))
    placements: list[list[Any]] = [[one.outputs[index] for one in strategies] for index in range(len(output_shapes))]
    shapes: tuple[Any, ...] = tuple(
        _layout.local_shape(shape, mesh_shape, placed, coordinate)
        for shape, placed in zip(output_shapes, placements, strict=True)
    )
    sizes: list[tuple[int, Any]] = [(argument, list(shapes[output])) for argument, output in rule.size_args]
    for argument, factor in rule.count_args:
        if factor in cuts:
            sizes.append((argument, nested_chunk(facts.of_factors[factor], cuts[factor])))
    shares: dict[int, float] = {}
    fills = None
    for factor, own in cuts.items():
        strategy = next(one for one in strategies if one.factor == factor)
        have = nested_chunk(facts.of_factors[factor], own)
        for output in strategy.scale:
            whole = facts.of_factors[factor]
            parts = prod(count for count, _ in own)
            # A SymInt that is cut evenly gives a number, too.
            share = 1 / parts if type(whole) is not int and surely_equal(have * parts, whole) else have / whole
            shares[output] = shares.get(output, 1.0) * share
        if strategy.fill and not have:
            fills = strategy.fill
    return LocalWork(tuple(sizes), tuple(shares.items()), fills, shapes)
