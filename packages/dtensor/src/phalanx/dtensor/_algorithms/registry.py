"""The table from an op to the algorithms that serve calls of it.

An algorithm is a handler: called with (op, args, kwargs), DTensors in and out, below autograd. `algorithm` registers
one, with a test of whether it takes a call.
"""

from collections.abc import Callable, Sequence
from typing import Any

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
Takes = Callable[[Sequence[Any], Any, Sequence[Any]], bool]
"""Called with (every argument of the schema, the choice of the rule, the moves that it needs)."""

_algorithms: dict[str, list[tuple[Takes, Handler]]] = {}


def algorithm(*names: str, takes: Takes) -> Callable[[Handler], Handler]:
    """Register an algorithm for the ops `names` (`aten.sort.default`); of several the first that takes a call is it."""

    def register(function: Handler) -> Handler:
        for name in names:
            _algorithms.setdefault(name, []).append((takes, function))
        return function

    return register


def find(op: Any, choice: Any, moves: Sequence[Any], values: Sequence[Any]) -> Handler | None:
    """The algorithm of a call, or None.

    Args:
        op: An OpOverload.
        choice: What its rule chose; None if it has no rule.
        moves: The moves that this needs.
        values: Every argument of its schema; the tensors must all be DTensors.
    """
    for takes, function in _algorithms.get(str(op), ()):
        if takes(values, choice, moves):
            return function
    return None
