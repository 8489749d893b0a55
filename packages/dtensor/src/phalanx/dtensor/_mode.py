"""Modes that the user may turn on around calls: strict mode and implicit replication. State of the thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.dtensor._torch_compat import in_backward


class _State(threading.local):
    strict: bool = False
    replicates: int = 0


_state = _State()


class StrictError(RuntimeError):
    """In strict mode: an op needs communication that the program did not ask for."""


@contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Within it, an op that would communicate by itself, or has no sharding rule, raises a StrictError. Not collective.

    Communication that the program asks for (redistribute, full_tensor) is not affected.

    Args:
        enabled: False turns it off within a `with strict():`.

    Example:
        >>> x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        >>> with strict():
        ...     x.cumsum(0)  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        StrictError: strict mode: aten.cumsum.default along a sharded dim would communicate by itself
    """
    before, _state.strict = _state.strict, enabled
    try:
        yield
    finally:
        _state.strict = before


def is_strict() -> bool:
    """Whether strict mode is on."""
    return _state.strict


def strict_error(op: Any, plan: Any) -> StrictError:
    """The error of an op whose plan moves inputs."""
    moves = "; ".join(
        f"argument {move.argument}{'' if move.place is None else f'[{move.place}]'} from "
        f"{list(map(str, move.plan.source.placements))} to {list(map(str, move.plan.target.placements))}"
        for move in plan.moves
    )
    return StrictError(
        f"strict mode: {op} would communicate by itself ({moves}; rule '{plan.text}'): redistribute these inputs "
        "first, or leave strict mode"
    )


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Within it, plain tensors among the arguments of ops count as replicated: every rank must have the same values.

    Not collective. Source: torch.distributed.tensor.experimental.implicit_replication.

    Example:
        >>> with implicit_replication():
        ...     x = distribute_tensor(torch.ones(2), mesh) + torch.arange(2)
        >>> x.full_tensor()
        tensor([1., 2.])
    """
    _state.replicates += 1
    try:
        yield
    finally:
        _state.replicates -= 1


def replicates() -> bool:
    """Whether plain tensors count as replicated: where the user says so, and in torch's own formulas of gradients,
    which make zeros and masks of shapes alone.
    """
    return _state.replicates > 0 or in_backward()
