"""Every op on a DTensor comes here, below autograd: find its OpPlan and run it.

An OpPlan is found by op, specs and other arguments. Specs are interned, so a key is made of identities and small
values, and nothing is computed for a call whose kind was seen before. A new call goes to `_sharding_prop`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.dtensor import _mode, _sharding_prop
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._op_plan import OpPlan, check_writable
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import make_wrapper

# A program that passes other numbers all the time (a learning rate) must not fill memory.
_MOST_KEPT = 16384
_plans: dict[tuple[Any, ...], OpPlan] = {}

# Arguments that are what they show: equal ones of one type give the same plan.
_ATOMS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def dispatch(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Run an op on DTensors. Collective where the op is."""
    # The hot path: everything in it is paid by every op.
    dtensor = DTensor
    key: list[Any] = [func]
    values: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is dtensor:
            key.append(value._spec)
            values.append(value._local_tensor)
        elif kind in _ATOMS:
            key += (kind, value)
            values.append(value)
        elif kind is list:
            local = _add_list(key, value)
            if local is None:
                return _other(func, args, kwargs or {}, None)
            values.append(local)
        else:
            return _other(func, args, kwargs or {}, None)
    if kwargs:
        return _other(func, args, kwargs, None)
    found = tuple(key)
    plan = _plans.get(found)
    if plan is None:
        return _other(func, args, {}, found)
    if plan.call is None:
        return plan.run(func, args, {})
    if plan.in_place:
        check_writable(func, args[0])
    for argument, value in plan.sizes:
        if argument >= len(values):  # left out
            return plan.run(func, args, {})
        values[argument] = value
    result = plan.call(*values)
    if plan.direct is not None:
        return make_wrapper(dtensor, result, plan.direct, False)
    return args[0] if plan.in_place else _several(plan.several, result)


def _add_list(key: list[Any], given: list[Any]) -> list[Any] | None:
    """Add a list of ints or of DTensors to a key, and give it with local tensors; None: it is another."""
    values: list[Any] = []
    key.append(list)
    for value in given:
        kind = type(value)
        if kind is int:
            key.append(value)
            values.append(value)
        elif kind is DTensor:
            key.append(value._spec)
            values.append(value._local_tensor)
        else:
            return None
    key.append(list)  # the end
    return values


def _several(form: Any, results: Sequence[Any]) -> Any:
    """The results of an op that has several."""
    kind, specs = form
    dtensor = DTensor
    return kind(
        [
            None if spec is None else make_wrapper(dtensor, one, spec, False)
            for one, spec in zip(results, specs, strict=True)
        ]
    )


def _other(func: Any, args: Sequence[Any], kwargs: dict[str, Any], key: tuple[Any, ...] | None) -> Any:
    """A call with arguments of other kinds, or a new one."""
    plan = None
    if key is None:
        key = _key(func, args, kwargs)
        plan = _plans.get(key) if key is not None else None
    if plan is None:
        plan = _sharding_prop.plan(func, args, kwargs)
        # A plan of symbolic sizes is of use only while they are traced.
        if key is not None and not any(isinstance(part, DTensorSpec) and type(part) is not DTensorSpec for part in key):
            if len(_plans) >= _MOST_KEPT:
                _plans.clear()
            _plans[key] = plan
    return plan.run(func, args, kwargs)


def _key(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The key of a call that the hot path has none for; None: it is planned every time."""
    try:
        named = [part for name, value in kwargs.items() for part in (name, _part(value))]
        key = (func, _mode.replicates(), *map(_part, args), *named)
        hash(key)
    except (TypeError, _NoKey):
        return None
    return key


class _NoKey(Exception):
    """A call that is planned every time."""


def _part(value: Any) -> Any:
    """The part of a key for an argument."""
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    if isinstance(value, DTensor):
        if type(value._spec) is not DTensorSpec:
            raise _NoKey
        return value._spec
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.shape, value.stride(), value.dtype
    if kind is list or kind is tuple or kind is torch.Size:
        return (list, *map(_part, value))
    raise _NoKey


def known_plan(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> OpPlan | None:
    """The OpPlan of a call that was done before, if it was kept; the arguments are as `dispatch` gets them."""
    key = None if kwargs else _hot_key(func, args)
    key = _key(func, args, kwargs) if key is None else key
    return None if key is None else _plans.get(key)


def _hot_key(func: Any, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """The key that the hot path makes of a call; None: it makes none."""
    key: list[Any] = [func]
    for value in args:
        if type(value) is DTensor:
            key.append(value._spec)
        elif type(value) in _ATOMS:
            key += (type(value), value)
        elif type(value) is not list or _add_list(key, value) is None:
            return None
    return tuple(key)


forget_native: Callable[[], object] = lambda: None  # noqa: E731  (what native code has made of plans)


def forget_plans() -> None:
    """Plan everything anew: for when rules have changed."""
    _plans.clear()
    forget_native()
