"""Ops on lists of tensors: foreach ops do one op for each element, fused optimizers work where parameters are."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from phalanx.dtensor import _fallback, _mode
from phalanx.dtensor._algorithms.common import Handler, check_strict, reduced
from phalanx.dtensor._mesh import coordinate_of, mesh_id
from phalanx.dtensor._op_plan import bound, call_bound, is_list, local_of, mixed, written_arguments
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.placement_types import Partial

# Ops that do more than the same op for each element of the lists.
_NOT_BY_ELEMENT = ("norm", "max", "powsum")


@cache
def find(op: Any) -> Handler | None:
    """The handler of an op on lists, or None."""
    base = op._schema.name.split("::")[1]
    if base.startswith("_foreach_"):
        return foreach
    if base.startswith("_fused_") and base.rstrip("_").removeprefix("_fused_") in ("adam", "adamw", "sgd", "adagrad"):
        return fused_optimizer
    if base == "_amp_foreach_non_finite_check_and_unscale_":
        return unscale
    return None


def foreach(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A foreach op: at once where all local tensors can be taken as they are, else one element after the other."""
    values = bound(op, args, kwargs)
    if _is_aligned(op, values):
        for index in written_arguments(op):
            for one in values[index]:
                _fallback.check_writable(op, one)
        result = call_bound(op, [local_of(value) for value in values])
        if result is None:
            return None
        specs = [one._spec for one in values[0]]
        return [
            DTensor._wrap(local, spec if local.dtype == spec.dtype else spec.replace(dtype=local.dtype))
            for local, spec in zip(result, specs, strict=True)
        ]
    return _by_element(op, values)


def _is_aligned(op: Any, values: Sequence[Any]) -> bool:
    """Whether each list has DTensors of the placements and shape of the first one, and none is Partial."""
    base = op._schema.name.split("::")[1].removeprefix("_foreach_").rstrip("_")
    if base in _NOT_BY_ELEMENT or not values or not is_list(values[0]):
        return False
    if not all(isinstance(one, DTensor) and not one._spec.is_partial for one in values[0]):
        return False
    for value in values[1:]:
        if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.ndim):
            return False
        if not is_list(value) or not any(isinstance(one, torch.Tensor) for one in value):
            continue
        if len(value) != len(values[0]):
            return False
        for one, first in zip(value, values[0], strict=True):
            if not isinstance(one, DTensor):
                return False
            own, model = one._spec, first._spec
            if own.mesh is not model.mesh or own.placements != model.placements or own.shape != model.shape:
                return False
    return True


def _by_element(op: Any, values: Sequence[Any]) -> Any:
    name = op._schema.name.split("::")[1].removeprefix("_foreach_")
    in_place = name.endswith("_")
    packet = getattr(torch.ops.aten, {"norm": "linalg_vector_norm", "zero_": "zero_"}.get(name, name))
    arguments = op._schema.arguments
    count = next(len(value) for value in values if is_list(value))
    results = []
    for index in range(count):
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for value, argument in zip(values, arguments, strict=True):
            is_many = is_list(value) and str(argument.type) in ("List[Tensor]", "List[number]")
            one = value[index] if is_many else value
            if argument.kwarg_only or argument.name in ("alpha", "value", "dtype"):
                named[argument.name] = one
            else:
                positional.append(one)
        if name in ("addcmul", "addcdiv", "addcmul_", "addcdiv_") and len(positional) > 3:
            named["value"] = positional.pop()
        if name == "norm":
            named.pop("ord", None)
        if isinstance(named.get("value"), torch.Tensor):
            named["value"] = named["value"].item()
        given = {key: one for key, one in named.items() if one is not None and not (key == "alpha" and one == 1)}
        results.append(packet(*positional, **given))
    return None if in_place else results


def unscale(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Multiply gradients, and note on every rank whether any rank has one that is not finite. For GradScaler."""
    gradients, found, factor = bound(op, args, kwargs)
    if not all(isinstance(one, DTensor) and not one._spec.is_partial for one in gradients):
        return _fallback.replicated(op, args, kwargs)
    check_strict(op)
    for one in gradients:
        _fallback.check_writable(op, one)
    own = local_of(found).clone()
    call_bound(op, [[one._local_tensor for one in gradients], own, local_of(factor)])
    # Not only over mesh dims that shard a gradient: ranks must agree on whether they take a step.
    meshes: dict[int, Any] = {mesh_id(one._spec.mesh): one._spec.mesh for one in gradients}
    for mesh in meshes.values():
        if coordinate_of(mesh) is not None:
            own = reduced(own, "max", mesh, range(mesh.ndim))
    local_of(found).copy_(own)
    return None


def fused_optimizer(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A fused step on local tensors: states and gradients are redistributed to the placements of their parameter."""
    values = bound(op, args, kwargs)
    parameters = values[0]
    written = set(written_arguments(op))
    for one in parameters:
        if not isinstance(one, DTensor):
            raise mixed(op, one, "some parameters are DTensors and some are not; make all of them DTensors")
        if any(type(placement) is Partial for placement in one._spec.placements):
            raise RuntimeError(
                f"{op}: a parameter has placements {list(one._spec.placements)}, and an optimizer cannot change a "
                "Partial one: redistribute it to Replicate() or Shard(dim) first"
            )
    locals_: list[Any] = []
    for value in values:
        if is_list(value) and len(value) == len(parameters):
            locals_.append([_as_parameter(op, one, to) for one, to in zip(value, parameters, strict=True)])
        else:
            locals_.append(local_of(value))
    result = call_bound(op, locals_)
    for index, argument in enumerate(op._schema.arguments):
        # Gradients are only scratch space to the op.
        if index in written and argument.name not in ("self", "grads"):
            for value, parameter, local in zip(values[index], parameters, locals_[index], strict=False):
                if isinstance(value, DTensor) and local is not value._local_tensor and value.shape == parameter.shape:
                    _fallback.write_local(value, parameter._spec, local)
    return result


def _as_parameter(op: Any, value: Any, parameter: Any) -> Any:
    if not isinstance(value, DTensor) or value.shape != parameter.shape:
        return local_of(value)
    spec = parameter._spec
    if value._spec.placements == spec.placements:
        return value._local_tensor
    if _mode.is_strict():
        raise _mode.StrictError(
            f"strict mode: {op} would redistribute a gradient or a state to the placements of its parameter; "
            "redistribute it first, or leave strict mode"
        )
    return plan_redistribute(value._spec, spec.replace(dtype=value.dtype)).run(value._local_tensor)
