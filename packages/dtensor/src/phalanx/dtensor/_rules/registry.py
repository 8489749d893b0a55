"""The table from an op to its rule, and what a rule may know of a call.

An entry is a rule's text, or a function that writes one from the static arguments of a call (dims, flags, which
optional tensors are there) and the ranks and dtypes of its tensors. Functions of views read sizes too: there the text
says how the dims are tied, so that equal patterns share one derivation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch

from phalanx.dtensor._rules.constraints import OpSizes
from phalanx.dtensor._rules.engine import Expanded, Strategy, derive
from phalanx.dtensor._rules.parser import Rule, parse


class SizedRule(NamedTuple):
    """A rule with what does not follow from its text."""

    text: str
    sizes: Mapping[str, int]  # of factors that no dim shows alone
    strategies: tuple[Strategy, ...] | None = None  # of one mesh dim, in the place of those that the text gives


RuleSpec = str | SizedRule | None
"""What a rule function returns; None: no rule."""
RuleFunction = Callable[["Call"], RuleSpec]

_P = ParamSpec("_P")
_rules: dict[str, str | RuleFunction] = {}
_default: Callable[[Any], str | RuleFunction | None] = lambda op: None  # noqa: E731


@dataclass(frozen=True)
class ArgMeta:
    """The facts of a tensor that a rule may use."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Call:
    """One call of an op: every argument of its schema in order, defaults filled in, tensors as `ArgMeta`.

    Attributes:
        op: The op.
        args: The arguments; `call[i]` is argument i.
        tensors: The tensors among them, those of lists one by one, absent ones left out.
    """

    __slots__ = ("args", "op", "tensors")

    def __init__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.op = op
        self.tensors: list[ArgMeta] = []
        self.args: list[Any] = [
            self._seen(args[index] if index < len(args) else kwargs.get(one.name, one.default_value))
            for index, one in enumerate(op._schema.arguments)
        ]

    def _seen(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = ArgMeta(tuple(value.shape), value.dtype)
        if isinstance(value, ArgMeta):
            self.tensors.append(value)
            return value
        return [self._seen(one) for one in value] if isinstance(value, (list, tuple)) else value

    def __getitem__(self, index: int) -> Any:
        return self.args[index]

    def dim(self, index: int) -> int:
        """Argument `index`, a dim of the first tensor, counted from the front."""
        return int(self.args[index]) % max(1, self.tensors[0].ndim)

    def dims(self, index: int, rank: int | None = None) -> list[int]:
        """Argument `index`, dims of the first tensor or of one of that rank; all of them if it is None or empty."""
        rank = self.tensors[0].ndim if rank is None else rank
        value = self.args[index]
        if value is None or value == []:
            return list(range(rank))
        return [int(one) % max(1, rank) for one in (value if isinstance(value, list) else [value])]


@dataclass(frozen=True)
class Match:
    """The rule of a call."""

    call: Call
    rule: Rule  # as written
    expanded: Expanded  # the rule for the ranks of the call
    facts: OpSizes  # sizes and dtypes
    strategies: tuple[Strategy, ...]  # of one mesh dim, whatever the sizes (`engine.combine` looks at those)
    in_place: bool  # whether the op writes into its first argument, which then keeps its placement


def rule(names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function that writes the rule of ops of aten: `add.Tensor sub.Tensor`."""

    def register(function: RuleFunction) -> RuleFunction:
        register_rules({function: names})
        return function

    return register


def family(function: Callable[Concatenate[Call, _P], RuleSpec]) -> Callable[_P, RuleFunction]:
    """A family of rules: from a function of a call and of what tells the members apart to one that makes a member."""
    return lambda *args, **kwargs: lambda call: function(call, *args, **kwargs)


def register_rules(rules: Mapping[str | RuleFunction, str]) -> None:
    """Register rules, each with the names of the ops of aten that have it: `add.Tensor sub.Tensor`."""
    for entry, names in rules.items():
        for name in names.split():
            if f"aten.{name}" in _rules:
                raise ValueError(f"aten.{name} has two sharding rules")
            _rules[f"aten.{name}"] = entry


def replace(name: str, entry: str | RuleFunction) -> None:
    """Register a rule of an op, in the place of the one that it has."""
    _rules[name] = entry
    _entry.cache_clear()


def register_default_rule(function: Callable[[Any], str | RuleFunction | None]) -> None:
    """Register what gives the rule of an op that the tables do not name, or None."""
    global _default
    _default = function


@cache
def _entry(op: Any) -> tuple[str | RuleFunction | None, bool]:
    """(entry of an op, whether it writes into its first argument)."""
    name = str(op)
    written = [one.alias_info is not None and one.alias_info.is_write for one in op._schema.arguments]
    in_place = any(written)
    if name in _rules:
        return _rules[name], in_place
    base, _, overload = name.rpartition(".")
    if in_place:
        if not written[0] or any(written[1:]):
            return None, in_place
        if base.endswith("_") and f"{base[:-1]}.{overload}" in _rules:
            return _rules[f"{base[:-1]}.{overload}"], in_place
        functional = getattr(getattr(torch.ops.aten, base.removeprefix("aten.")[:-1], None), overload, None)
        if torch.Tag.pointwise not in op.tags and functional is not None:
            return _default(functional), in_place
    elif base.endswith("_copy") and f"{base.removesuffix('_copy')}.{overload}" in _rules:
        return _rules[f"{base.removesuffix('_copy')}.{overload}"], False  # a view, copied
    return _default(op), in_place


def has_rule(op: Any) -> bool:
    """Whether an op has a rule for some of its calls."""
    return _entry(op)[0] is not None


def find(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, text: str | None = None
) -> Match | None:
    """The rule of a call with its strategies, or None: the op has none for these arguments.

    Tensors are given as they are or as `ArgMeta`; a text is a rule to take instead of the table's.
    """
    entry, in_place = _entry(op)
    if entry is None and text is None:
        return None
    call = Call(op, args, kwargs or {})
    written = text or (entry(call) if callable(entry) else entry)
    if written is None:
        return None
    text, sizes, listed = (written, None, None) if isinstance(written, str) else written
    expanded = derive(text, tuple(one.ndim for one in call.tensors))
    facts = OpSizes(expanded.inputs, [one.shape for one in call.tensors], [one.dtype for one in call.tensors], sizes)
    strategies = expanded.strategies if listed is None else listed
    if in_place:
        # A tensor that is written into keeps its placement.
        strategies = tuple(one for one in strategies if one.outputs[0] == one.inputs[0] and not one.scale)
    return Match(call, parse(text), expanded, facts, strategies, in_place)
