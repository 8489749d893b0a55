"""Every op on a DTensor comes here, below autograd: find its Plan and run it.

A Plan is found by op, specs and other arguments. Specs are interned, so a key is made of identities and small values,
and nothing is worked out for a call whose kind was seen before. What is new goes to `planner`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor import api, mode, planner
from phalanx.dtensor._torch_compat import make_wrapper
from phalanx.dtensor.plan import Plan
from phalanx.dtensor.spec import Spec

# A program that passes other numbers all the time (a learning rate) must not fill memory.
_MOST_KEPT = 16384
_plans: dict[tuple[Any, ...], Plan] = {}

# Arguments that are what they show: equal ones of one type give the same plan.
_ATOMS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def dispatch(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Run an op on DTensors. Collective where the op is."""
    # The hot path: everything in it is paid by every op.
    dtensor = api.DTensor
    key: list[Any] | None = [func]
    for value in args:
        kind = type(value)
        if kind is dtensor:
            key.append(value._spec)  # type: ignore[union-attr]
        elif kind in _ATOMS:
            key.append(kind)  # type: ignore[union-attr]
            key.append(value)  # type: ignore[union-attr]
        else:
            key = None
            break
    if key is not None and not kwargs:
        plan = _plans.get(tuple(key))
        if plan is not None:
            if plan.direct is not None:
                local = func(*[one._local_tensor if type(one) is dtensor else one for one in args])
                return make_wrapper(dtensor, local, plan.direct, False)
            return plan.run(func, args, {})
    return _other(func, args, kwargs or {})


def _other(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call with arguments of other kinds, or a new one."""
    key: tuple[Any, ...] | None
    try:
        key = (func, *(_parts(args, kwargs) if kwargs or not _flat(args) else _simple(args)))
        plan = _plans.get(key)
    except (TypeError, _NoKey):
        key, plan = None, None
    if plan is None:
        plan = planner.plan(func, args, kwargs)
        if key is not None:
            if len(_plans) >= _MOST_KEPT:
                _plans.clear()
            _plans[key] = plan
    return plan.run(func, args, kwargs)


class _NoKey(Exception):
    """A call that is planned every time."""


def _flat(args: Sequence[Any]) -> bool:
    return all(type(value) is api.DTensor or type(value) in _ATOMS for value in args)


def _simple(args: Sequence[Any]) -> list[Any]:
    """The key of what the hot path knows, made as it makes it."""
    key: list[Any] = []
    for value in args:
        if type(value) is api.DTensor:
            key.append(value._spec)
        else:
            key += (type(value), value)
    return key


def _parts(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = [mode.replicates()]
    for value in args:
        found.append(_part(value))
    for name, value in kwargs.items():
        found += (name, _part(value))
    return found


def _part(value: Any) -> Any:
    """What a key says of an argument."""
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    if isinstance(value, api.DTensor):
        if type(value._spec) is not Spec:
            raise _NoKey
        return value._spec
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.shape, value.stride(), value.dtype
    if kind is list or kind is tuple or kind is torch.Size:
        return (list, *map(_part, value))
    raise _NoKey


def forget_plans() -> None:
    """Plan everything anew: for when rules have changed."""
    _plans.clear()
