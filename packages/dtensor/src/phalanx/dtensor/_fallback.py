"""Ops without a rule: they are decomposed into ops that have one, or every rank works on the whole tensors.

The second is always correct but expensive: all inputs are gathered on every rank. So it warns, once for each op, and in
strict mode it is an error. Results are replicated; tensors that the op writes into keep their placements.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor import _mode, _op_plan
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._op_plan import check_writable as check_writable
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import decomposition, lazy_changes_made
from phalanx.dtensor.placement_types import Replicate

_warned: set[Any] = set()
# Ops whose decomposition did not do for DTensors.
_undecomposed: set[Any] = set()


class ReplicatedFallback(UserWarning):
    """An op has no sharding rule, and every rank works on the whole."""


def plan(op: Any) -> _op_plan.OpPlan:
    """The OpPlan of an op without a rule."""
    if op not in _undecomposed and not _op_plan.written_arguments(op) and decomposition(op) is not None:
        return _op_plan.OpPlan(decomposed, text="decomposed into other ops")
    functional = functional_of(op)
    if functional is not None:
        return _op_plan.OpPlan(write_back, text=f"{functional}, written back")
    return _op_plan.OpPlan(replicated, text="no rule: every rank works on the whole")


def decomposed(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run the decomposition of an op on DTensors; if it cannot be, the fallback."""
    if op not in _undecomposed:
        function = decomposition(op)
        if function is not None:
            try:
                # Tensors that a decomposition makes from shapes are the same on every rank.
                with _mode.implicit_replication(), lazy_changes_made():
                    result = function(*args, **kwargs)
                if result is not NotImplemented and _is_distributed(result):
                    return result
            except _mode.StrictError:
                raise
            except Exception:  # whatever it was: the fallback raises what is to be raised
                pass
        _undecomposed.add(op)
    return plan(op).run(op, args, kwargs)


def _is_distributed(result: Any) -> bool:
    values = result if isinstance(result, (list, tuple)) else [result]
    return all(isinstance(one, DTensor) or not isinstance(one, torch.Tensor) for one in values)


def functional_of(op: Any) -> Any:
    """The op that returns what `op` writes into its first argument or into `out`; None if there is none."""
    arguments = op._schema.arguments
    written = _op_plan.written_arguments(op)
    base = op._schema.name.split("::")[1]
    if written == (0,) and base.endswith("_") and not base.startswith("_foreach"):
        packet = getattr(torch.ops.aten, base[:-1], None)
        found, count = _overload_like(packet, op), len(arguments)
    elif len(written) == 1 and arguments[written[0]].is_out:
        packet = getattr(torch.ops.aten, base, None)
        found, count = _overload_like(packet, op, without_last=True), len(arguments) - 1
    else:
        return None
    if found is None or len(found._schema.arguments) != count or len(found._schema.returns) != 1:
        return None
    return found if not _op_plan.written_arguments(found) else None


def _overload_like(packet: Any, op: Any, without_last: bool = False) -> Any:
    """The overload of a packet that takes what `op` takes: the one of the same name, if there are several."""
    if packet is None:
        return None
    arguments = op._schema.arguments[:-1] if without_last else op._schema.arguments
    kinds = [str(one.type) for one in arguments]
    names = packet.overloads()
    for name in sorted(names, key=lambda name: (name or "default") != op._overloadname):
        found = getattr(packet, name or "default")
        if [str(one.type) for one in found._schema.arguments] == kinds:
            return found
    return None


def write_back(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run the op that returns a new tensor, redistribute the result as the written tensor is, and copy it there."""
    functional = functional_of(op)
    if functional is None:
        return replicated(op, args, kwargs)
    values = _op_plan.bound(op, args, kwargs)
    index = _op_plan.written_arguments(op)[0]
    into = values[index]
    if not isinstance(into, DTensor):
        raise _op_plan.mixed(
            op, into, "the op writes into a plain tensor; make that a DTensor, or call the op that returns a new tensor"
        )
    check_writable(op, into)
    kept = values[:index] + values[index + 1 :] if op._schema.arguments[index].is_out else values
    result = _op_plan.call_bound(functional, kept)
    if result.shape != into.shape:
        raise RuntimeError(
            f"{op}: the result has shape {tuple(result.shape)}, and the tensor that it is written into "
            f"{tuple(into.shape)}: a DTensor cannot be resized; call the op that returns a new tensor"
        )
    write_local(into, result._spec, result._local_tensor)
    return into


# ---- on every rank --------------------------------------------------------------------------------------------------


def whole_spec(spec: DTensorSpec) -> DTensorSpec:
    """The spec of the tensor on every rank."""
    return spec.replace(placements=(Replicate(),) * spec.mesh.ndim)


def replicate_arg(value: Any) -> Any:
    """An argument with whole local tensors in the place of DTensors. Collective where they are not whole."""
    if isinstance(value, DTensor):
        return plan_redistribute(value._spec, whole_spec(value._spec)).run(value._local_tensor)
    if _op_plan.is_list(value):
        return [replicate_arg(one) for one in value]
    return value


def replicated(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op with every input whole on every rank."""
    values = _op_plan.bound(op, args, kwargs)
    distributed = [one for one in _op_plan.flat(values) if isinstance(one, DTensor)]
    moved = [one for one in distributed if not one._spec.is_replicated]
    if moved:
        if _mode.is_strict():
            raise _mode.StrictError(
                f"strict mode: {op} has no sharding rule and would replicate its inputs on every rank: redistribute "
                "them to Replicate first, or register a rule (phalanx.dtensor.experimental.register_sharding)"
            )
        if op not in _warned:
            _warned.add(op)
            warnings.warn(
                f"{op} has no sharding rule, so every rank works on the whole tensor; "
                "phalanx.dtensor.experimental.register_sharding adds a rule",
                ReplicatedFallback,
                stacklevel=2,
            )
    mesh = distributed[0]._spec.mesh
    written = _op_plan.written_arguments(op)
    locals_ = [replicate_arg(value) for value in values]
    for index in written:
        for one in [values[index]] if isinstance(values[index], torch.Tensor) else values[index] or ():
            check_writable(op, one)
        locals_[index] = _own(values[index], locals_[index])
    result = _op_plan.call_bound(op, locals_)
    for index in written:
        _bring_back(op, values[index], locals_[index])
    if not isinstance(result, (list, tuple)):
        return _wrapped_one(op, result, 0, values, mesh, bool(moved))
    done = [_wrapped_one(op, one, index, values, mesh, bool(moved)) for index, one in enumerate(result)]
    return done if isinstance(result, list) else tuple(done)


def _own(value: Any, local: Any) -> Any:
    """What is written into: where it was a copy anyway, that; a replicated tensor as it is."""
    if _op_plan.is_list(value):
        return [_own(one, part) for one, part in zip(value, local, strict=True)]
    return local.clone() if isinstance(value, DTensor) and not value._spec.is_replicated else local


def _bring_back(op: Any, value: Any, whole: Any) -> None:
    if _op_plan.is_list(value):
        for one, part in zip(value, whole, strict=True):
            _bring_back(op, one, part)
    elif isinstance(value, DTensor) and not value._spec.is_replicated:
        if whole.shape != value.shape:
            raise RuntimeError(f"{op}: a DTensor cannot be resized in place: redistribute it to Replicate first")
        write_local(value, whole_spec(value._spec), whole)


def write_local(into: DTensor, spec: DTensorSpec, local: torch.Tensor) -> None:
    """Write a local tensor of another spec into a DTensor. Collective where their placements differ.

    The spec may have another dtype than the local tensor.
    """
    plan = plan_redistribute(spec.replace(dtype=local.dtype), into._spec.replace(dtype=local.dtype))
    into._local_tensor.copy_(plan.run(local))


def _wrapped_one(op: Any, result: Any, index: int, values: list[Any], mesh: Any, is_copy: bool) -> Any:
    argument = _op_plan.returned_argument(op, index)
    if argument is not None:
        return values[argument]
    if isinstance(result, list):
        return [_wrapped_one(op, one, index, values, mesh, is_copy) for one in result]
    if not isinstance(result, torch.Tensor) or isinstance(result, DTensor):
        return result
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, result.shape, result.stride(), result.dtype)
    made = DTensor._wrap(result, spec)
    returns = op._schema.returns
    if is_copy and index < len(returns) and returns[index].alias_info is not None:
        made._is_view_of_copy = True  # type: ignore[attr-defined]
    return made
