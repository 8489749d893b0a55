"""One call against one process: every strategy that its rule derives, on every mesh."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from phalanx.dtensor._rules.engine import Strategy, combine
from phalanx.dtensor._rules.local_adjustments import local_work, results_of
from phalanx.dtensor._rules.registry import Match, find
from phalanx.dtensor.placement_types import Partial, Placement, Replicate, Shard
from phalanx.tools.verify.simulate import Mismatch, compare, coordinates, cut, put_together

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (4,), (2, 2))

# Pairs of strategies tried on a mesh of two dims, spread evenly over all that hold.
_MOST_PAIRS = 24

# What comes out of these has no defined values: only shapes and dtypes are compared.
_UNDEFINED = ("aten.empty_like.default", "aten.new_empty.default")


@dataclass
class Outcome:
    """What the check of one or more calls found.

    Attributes:
        right: Strategies, counted once for each mesh, that gave what one process gives.
        wrong: Those that did not.
        cut: Of the right ones, those that leave some tensor cut or Partial.
        failures: What went wrong, one text for each.
    """

    right: int = 0
    wrong: int = 0
    cut: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        """Count what another check found."""
        self.right += other.right
        self.wrong += other.wrong
        self.cut += other.cut
        self.failures += other.failures


def bound(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Every argument of the op's schema, in order."""
    values = []
    for index, argument in enumerate(op._schema.arguments):
        given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        values.append(given)
    return values


def invoke(op: Any, values: Sequence[Any]) -> list[torch.Tensor]:
    """Run an op on all its arguments; its results as a list, absent ones left out."""
    arguments = op._schema.arguments
    positional = [value for value, one in zip(values, arguments, strict=True) if not one.kwarg_only]
    keyword = {one.name: value for value, one in zip(values, arguments, strict=True) if one.kwarg_only}
    results = results_of(op, values, op(*positional, **keyword))
    return [torch.zeros_like(one) for one in results] if str(op) in _UNDEFINED else results


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among arguments, those of lists one by one."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, torch.Tensor)]
    return found


def replaced(values: Sequence[Any], tensors: Iterator[torch.Tensor]) -> list[Any]:
    """The arguments with other tensors in the place of their tensors."""
    done: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            done.append(next(tensors))
        elif isinstance(value, (list, tuple)):
            done.append([next(tensors) if isinstance(one, torch.Tensor) else one for one in value])
        else:
            done.append(value)
    return done


def _copies(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    # clone() keeps strides where it can: a view that one process may take it takes here too.
    return iter([one.clone() for one in tensors])


def _unread(tensor: torch.Tensor) -> Placement:
    """Where a tensor may be that is not read: not whole, if it can be."""
    return Shard(tensor.ndim - 1) if tensor.ndim else Partial("sum")


class _Checker:
    def __init__(self, op: Any, match: Match, values: list[Any]) -> None:
        self.op = op
        self.match = match
        self.values = values
        self.tensors = tensors_in(values)
        self.want = invoke(op, replaced(values, _copies(self.tensors)))
        inexact = [one.dtype for one in self.tensors if one.is_floating_point() or one.is_complex()]
        self.coarsest = max((torch.finfo(one).eps for one in inexact), default=0.0)
        self.random = torch.Generator().manual_seed(7)

    def combinations(self, mesh: tuple[int, ...]) -> list[tuple[Strategy, ...]]:
        found = [
            one for one in product(self.match.strategies, repeat=len(mesh)) if combine(one, self.match.facts, mesh)
        ]
        if len(mesh) > 1 and len(found) > _MOST_PAIRS:
            found = [found[index * len(found) // _MOST_PAIRS] for index in range(_MOST_PAIRS)]
        return found

    def check(self, strategies: tuple[Strategy, ...], mesh: tuple[int, ...]) -> None:
        inputs = [
            cut(tensor, [one.inputs[index] or _unread(tensor) for one in strategies], mesh, self.random)
            for index, tensor in enumerate(self.tensors)
        ]
        shapes = [tuple(one.shape) for one in self.want]
        outputs: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for rank in coordinates(mesh):
            work = local_work(self.match.rule, strategies, self.match.facts, shapes, mesh, rank)
            if work.fills:
                outputs[rank] = work.filled([one.dtype for one in self.want])
                continue
            values = replaced(self.values, iter([one[rank] for one in inputs]))
            for argument, value in work.sizes:
                values[argument] = value
            outputs[rank] = work.finish(invoke(self.op, values))
        for index, want in enumerate(self.want):
            placements = [one.outputs[index] for one in strategies]
            pieces = {rank: local[index] for rank, local in outputs.items()}
            got = put_together(pieces, placements, mesh, want.shape, self.coarsest)
            compare(got, want, f"output {index}", self.coarsest)


def _shown(values: Sequence[Any]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype)[6:]}{list(value.shape)}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(show, value))}]"
        return str(value)

    return ", ".join(map(show, values))


def _placed(strategies: Sequence[Strategy], mesh: Sequence[int]) -> str:
    def show(side: str) -> str:
        tensors = zip(*(getattr(one, side) for one in strategies), strict=True)
        return ", ".join("".join(str(placement or "?") for placement in one) for one in tensors)

    return f"on {'x'.join(map(str, mesh))}: {show('inputs')} -> {show('outputs')}"


def check_call(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    text: str | None = None,
) -> Outcome | None:
    """Check every strategy of a call on simulated ranks. Not collective: one process does it all.

    Args:
        op: An OpOverload.
        args: Its positional arguments, with CPU tensors.
        kwargs: Its keyword arguments.
        meshes: The meshes to try.
        text: A rule to check instead of the table's.

    Returns:
        What was found, or None if the op has no rule for these arguments, or torch refuses the call.
    """
    outcome = Outcome()
    values = bound(op, args, kwargs or {})
    with torch.no_grad():
        try:
            match = find(op, args, kwargs, text)
        except (LookupError, TypeError, ValueError) as error:  # a rule function that did not foresee the call
            shown = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return Outcome(0, 1, 0, [f"{op}({_shown(values)}): {shown}"])
        if match is None:
            return None
        try:
            checker = _Checker(op, match, values)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None  # one process refuses the call too
        results = len(match.strategies[0].outputs)
        if len(checker.want) != results or not all(isinstance(one, torch.Tensor) for one in checker.want):
            return Outcome(0, 1, 0, [f"{op}({_shown(values)}): the rule has {results} outputs: {match.rule.text}"])
        for mesh in meshes:
            for strategies in checker.combinations(mesh):
                try:
                    checker.check(strategies, mesh)
                except (Mismatch, RuntimeError, ValueError, TypeError, IndexError) as error:
                    outcome.wrong += 1
                    text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    outcome.failures.append(f"{op}({_shown(values)}) {_placed(strategies, mesh)}: {text}")
                else:
                    outcome.right += 1
                    outcome.cut += any(set(one.inputs + one.outputs) - {Replicate(), None} for one in strategies)
    return outcome
