"""The sizes of a call in the terms of its rule, and the conditions on them that strategies carry."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from phalanx.dtensor import _layout

ExpandedDims = tuple[tuple[str, ...], ...]
"""The dims of a tensor, each with the names of its factors."""
Where = tuple[int, int]
"""(input, dim)."""


# ---- sizes ----------------------------------------------------------------------------------------------------------


def nested_chunk(size: int, cuts: Sequence[Where]) -> int:
    """The size that splits (count, index) leave of `size`, in the order of the splits."""
    for count, index in cuts:
        size = _layout.chunk(size, count, index)[1]  # type: ignore[assignment]
    return size


def _parts(size: int, ways: Sequence[int]) -> list[int]:
    """The sizes of the parts that mesh dims of sizes `ways` cut `size` into, one after the other; each once."""
    parts = [size]
    for count in ways:
        found: list[int] = []
        for part in parts:
            for index in range(count):
                one: int = _layout.chunk(part, count, index)[1]  # type: ignore[assignment]
                if one not in found:  # no set: a SymInt has no hash
                    found.append(one)
        parts = found
    return parts


class OpSizes:
    """Sizes and dtypes of one call, in the terms of its rule.

    `given` has the sizes of factors that no dim shows alone: the split of a view.
    """

    __slots__ = ("dtypes", "of_factors", "shapes")

    def __init__(
        self,
        inputs: Sequence[ExpandedDims | None],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        given: Mapping[str, int] | None = None,
    ) -> None:
        self.shapes = shapes
        self.dtypes = dtypes
        self.of_factors = dict(given or {})
        for dims, shape in zip(inputs, shapes, strict=True):
            for factors, size in zip(dims or (), shape, strict=False):
                # Broadcasting: the size that is not 1 counts.
                if len(factors) == 1 and self.of_factors.get(factors[0], 1) == 1:
                    self.of_factors[factors[0]] = size


# ---- conditions -----------------------------------------------------------------------------------------------------


_WIDE = (torch.int32, torch.int64)


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype are rounded."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True)
class SameSize:
    """Dims of inputs that must have one size: gather allows its index to be smaller than its input."""

    at: tuple[Where, ...]

    def is_satisfied(self, facts: OpSizes, ways: Sequence[int]) -> bool:
        sizes = [facts.shapes[tensor][dim] for tensor, dim in self.at]
        return all(one == sizes[0] for one in sizes)


@dataclass(frozen=True)
class Broadcast:
    """The dims `ones` have size 1 and broadcast against the dims `cut`, whose size is another."""

    ones: tuple[Where, ...]
    cut: tuple[Where, ...]

    def is_satisfied(self, facts: OpSizes, ways: Sequence[int]) -> bool:
        if any(facts.shapes[tensor][dim] != 1 for tensor, dim in self.ones):
            return False
        return all(facts.shapes[tensor][dim] != 1 for tensor, dim in self.cut)


@dataclass(frozen=True)
class AllOne:
    """Factors outside the one that is cut, in one dim with it: the cut is one of the dim only if they have size 1."""

    factors: tuple[str, ...]

    def is_satisfied(self, facts: OpSizes, ways: Sequence[int]) -> bool:
        return all(facts.of_factors.get(one) == 1 for one in self.factors)


@dataclass(frozen=True)
class Aligned:
    """The chunks of a dim of `factor` and, inside it, `inner` must end where chunks of `factor` end."""

    factor: str
    inner: tuple[str, ...]

    def is_satisfied(self, facts: OpSizes, ways: Sequence[int]) -> bool:
        sizes = facts.of_factors
        if not sizes.keys() >= {self.factor, *self.inner}:
            return False
        inner = prod(sizes[one] for one in self.inner)
        for level, count in enumerate(ways):
            parts = _parts(sizes[self.factor], ways[:level])
            if any(-(-part * inner // count) != -(-part // count) * inner for part in parts):
                return False
        return True


@dataclass(frozen=True)
class NotEmpty:
    """The factor has elements: the share of nothing is not a number."""

    factor: str

    def is_satisfied(self, facts: OpSizes, ways: Sequence[int]) -> bool:
        return facts.of_factors[self.factor] != 0


@dataclass(frozen=True)
class EachHas:
    """Every rank gets a part of the factor."""

    factor: str

    def is_satisfied(self, facts: OpSizes, ways: Sequence[int]) -> bool:
        return 0 not in _parts(facts.of_factors[self.factor], ways)


@dataclass(frozen=True)
class Even:
    """Dims of inputs that are cut into equal parts, none of them empty: of others nothing is known of the op."""

    at: tuple[Where, ...]

    def is_satisfied(self, facts: OpSizes, ways: Sequence[int]) -> bool:
        sizes = [facts.shapes[tensor][dim] for tensor, dim in self.at]
        return all(size != 0 and size % prod(ways) == 0 for size in sizes)


# The dtypes in which a Partial means what strategies take it for.
_MEANINGS: dict[str, Callable[[torch.dtype], bool]] = {
    "sum": lambda dtype: dtype != torch.bool,  # bool has no sum
    "linear": lambda dtype: is_inexact(dtype) or dtype in _WIDE,  # narrow ints wrap around, and are then widened
    # Rising functions rise: narrow and unsigned ints wrap around.
    "rising": lambda dtype: dtype.is_floating_point or dtype in (torch.bool, *_WIDE),
    "extreme": lambda dtype: not dtype.is_complex,  # complex numbers have no maximum
}


@dataclass(frozen=True)
class Means:
    """The inputs have a dtype in which a Partial means that (a key of _MEANINGS)."""

    meaning: str
    inputs: tuple[int, ...]

    def is_satisfied(self, facts: OpSizes, ways: Sequence[int]) -> bool:
        return all(_MEANINGS[self.meaning](facts.dtypes[one]) for one in self.inputs)


Condition = SameSize | Broadcast | AllOne | Aligned | NotEmpty | EachHas | Even | Means
