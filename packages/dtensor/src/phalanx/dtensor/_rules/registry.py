"""The table from an op to its rule, and what a rule may know of a call.

An entry is a rule's text, or a function that writes one from the static arguments of a call (dims, flags, which
optional tensors are there) and the ranks and dtypes of its tensors. Functions of views read sizes too: there the text
says how the dims are tied, so that equal patterns share one derivation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from phalanx.dtensor._rules.constraints import OpSizes
from phalanx.dtensor._rules.engine import Expanded, Strategy, derive
from phalanx.dtensor._rules.parser import Rule, parse


@dataclass(frozen=True)
class StrategyList:
    """Strategies that are written out one by one, in the place of a rule from which they are derived."""

    text: str  # a rule for tensors of any rank, all whole: `*, * -> *`
    strategies: tuple[Strategy, ...]  # of one mesh dim
    sizes: Mapping[str, int]  # of each factor that they name


RuleSpec = str | tuple[str, Mapping[str, int]] | StrategyList | None
"""What a rule function returns: a text, a text and the sizes of factors that no dim shows alone, strategies written
out, or None: no rule."""
RuleFunction = Callable[["Call"], RuleSpec]

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
        self.args: list[Any] = []
        self.tensors: list[ArgMeta] = []
        for index, argument in enumerate(op._schema.arguments):
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            self.args.append(self._seen(given))

    def _seen(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, ArgMeta)):
            meta = value if isinstance(value, ArgMeta) else ArgMeta(tuple(value.shape), value.dtype)
            self.tensors.append(meta)
            return meta
        if isinstance(value, (list, tuple)):
            return [self._seen(one) for one in value]
        return value

    def __getitem__(self, index: int) -> Any:
        return self.args[index]

    def dim(self, index: int, tensor: int = 0) -> int:
        """Argument `index`, a dim of a tensor, counted from the front."""
        rank = max(1, self.tensors[tensor].ndim)
        return int(self.args[index]) % rank

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


def rule(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function that writes the rule of the ops `names` (`aten.add.Tensor`)."""

    def register(function: RuleFunction) -> RuleFunction:
        register_rules(dict.fromkeys(names, function))
        return function

    return register


def register_rules(rules: Mapping[str, str | RuleFunction]) -> None:
    """Register rules by the names of their ops.

    Raises:
        ValueError: An op has a rule already.
    """
    for name, entry in rules.items():
        if name in _rules:
            raise ValueError(f"{name} has two sharding rules")
        _rules[name] = entry


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
        if written[0] and not any(written[1:]) and base.endswith("_") and f"{base[:-1]}.{overload}" in _rules:
            return _rules[f"{base[:-1]}.{overload}"], True
        if not written[0] or any(written[1:]):
            return None, in_place
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

    Raises:
        RuleError: The text is malformed, or not for tensors of these ranks.
    """
    entry, in_place = _entry(op)
    if entry is None and text is None:
        return None
    call = Call(op, args, kwargs or {})
    written = text or (entry(call) if callable(entry) else entry)
    if written is None:
        return None
    listed = written if isinstance(written, StrategyList) else None
    if listed is not None:
        written = listed.text, listed.sizes
    rule_text, given = (written, {}) if isinstance(written, str) else written  # type: ignore[misc]
    expanded = derive(rule_text, tuple(one.ndim for one in call.tensors))
    facts = OpSizes(expanded.inputs, [one.shape for one in call.tensors], [one.dtype for one in call.tensors], given)
    strategies = expanded.strategies if listed is None else listed.strategies
    if in_place:
        # A tensor that is written into keeps its placement.
        strategies = tuple(one for one in strategies if one.outputs[0] == one.inputs[0] and not one.scale)
    return Match(call, parse(rule_text), expanded, facts, strategies, in_place)
