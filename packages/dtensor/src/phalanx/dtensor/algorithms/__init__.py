"""Algorithms of our own for calls whose rule would have to bring inputs together: one file for each family.

An algorithm is a handler: called with (op, args, kwargs), DTensors in and out, below autograd. `algorithm` registers
one, with a test of whether it takes a call.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from phalanx.dtensor._torch_compat import untraced

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
Takes = Callable[[Sequence[Any], Any, Sequence[Any]], bool]
"""Called with (every argument of the schema, the choice of the rule, the moves that it needs)."""

_FILES = (
    "attention",
    "batch_norm",
    "classes",
    "extreme",
    "halo",
    "lookup",
    "moments",
    "norm",
    "scan",
    "top",
    "weighted",
)
_algorithms: dict[str, list[tuple[Takes, Handler]]] = {}


def algorithm(*names: str, takes: Takes) -> Callable[[Handler], Handler]:
    """Register an algorithm for the ops `names` (`aten.sort.default`); of several the first that takes a call is it."""

    def register(function: Handler) -> Handler:
        for name in names:
            _algorithms.setdefault(name, []).append((takes, function))
        return function

    return register


@cache
def _loaded() -> dict[str, list[tuple[Takes, Handler]]]:
    with untraced():  # a compiled function may be the first that needs them
        for name in _FILES:
            import_module(f"phalanx.dtensor.algorithms.{name}")
    return _algorithms


def find(op: Any, choice: Any, moves: Sequence[Any], values: Sequence[Any]) -> Handler | None:
    """The algorithm of a call, or None.

    Args:
        op: An OpOverload.
        choice: What its rule chose; None if it has no rule.
        moves: The moves that this needs.
        values: Every argument of its schema; the tensors must all be DTensors.
    """
    for takes, function in _loaded().get(str(op), ()):
        if takes(values, choice, moves):
            return function
    return None
