"""Rules of elementwise ops: all dims are batch dims that broadcast; the table says which Partials pass.

Inputs are counted as the op's schema counts its arguments (`add(self, other)`: 0 and 1). Where an argument is a number
instead of a tensor, what needs it as a tensor is left out: `x + 1` is not linear in x, `x * 2` is.

Rising functions that are NaN below some bound (sqrt, log) pass no Partial(max): a term of it may lie below. Nor do
those that make a number of NaN (sign, fmax, nan_to_num): the other terms would come out instead.
"""

import math
from typing import Any

import torch

from phalanx.dtensor._rules.constraints import is_inexact
from phalanx.dtensor._rules.registry import (
    ArgMeta,
    Call,
    RuleFunction,
    RuleSpec,
    family,
    register_default_rule,
    register_rules,
)


def _elementwise(call: Call, passes: str = "") -> str:
    """The rule of an elementwise call, with the clauses of `passes` whose arguments are all tensors in this call."""
    present = [index for index, value in enumerate(call.args) if isinstance(value, ArgMeta)]
    outputs = ", ".join(["..."] * len(call.op._schema.returns))
    text = f"{', '.join(['...'] * len(present))} -> {outputs}"
    for clause in filter(None, map(str.strip, passes.split(";"))):
        kind, _, groups = clause.partition(" ")
        for group in groups.strip().split("|"):
            arguments = [int(one) for one in group.split("+")]
            if all(one in present for one in arguments):
                text += f" ; {kind} {'+'.join(str(present.index(one)) for one in arguments)}"
    return text


@family
def _written(call: Call, passes: str) -> RuleSpec:
    return _elementwise(call, passes) if call.tensors else None


def _division(call: Call) -> RuleSpec:
    # Rounded, a quotient is not linear; div.Tensor_mode has the mode as argument 2.
    rounded = len(call.args) > 2 and call[2] is not None
    return _elementwise(call, "" if rounded else "lin 0")


@family
def _sum(call: Call, order: str) -> RuleSpec:
    """add, sub and rsub: (self, other, alpha).

    A Partial maximum is kept only if the other argument is a finite number: a term of the maximum may be -inf, that of
    an empty shard, and another tensor may have an inf at that place.
    """
    number = isinstance(call[1], (int, float)) and math.isfinite(call[1])
    if order == "down" and call[2] < 0:
        number = False  # rsub: alpha is the factor of self
    return _elementwise(call, f"lin 0+1 ; {order} 0" if number else "lin 0+1")


@family
def _of_bools(call: Call, passes: str) -> RuleSpec:
    """Logical ops: of other dtypes a maximum is 0 where a term, below it, is not."""
    return _elementwise(call, passes if all(one.dtype == torch.bool for one in call.tensors) else "")


def _leaky_relu(call: Call) -> RuleSpec:
    return _elementwise(call, "up 0" if call[1] >= 0 else "")


def _masked_fill(call: Call) -> RuleSpec:
    # Zeros may be filled into every term of a sum; other values may not.
    zero = not isinstance(call[2], ArgMeta) and call[2] == 0
    return _elementwise(call, "lin 0 ; up 0" if zero else "up 0")


# The rules of ops that torch tags as elementwise, by the names of ops without namespace and overload.
_TAGGED = {
    name: function
    for function, names in {
        # grad_output is argument 0 of the ops that end with _backward, and the result is linear in it.
        _written("lin 0"): "conj_physical deg2rad rad2deg native_dropout_backward gelu_backward logit_backward "
        "sigmoid_backward silu_backward tanh_backward threshold_backward",
        _written("lin 0 ; down 0"): "neg",
        _written("lin 0|1 ; prod 0+1"): "mul",
        _written("lin 1+2 ; up 1|2"): "where",
        _written("lin 0+1"): "lerp addcdiv",
        _written("lin 0+1|0+2"): "addcmul",
        _written("pass 0"): "positive",
        _written("up 0"): "ceil floor trunc round relu relu6 hardtanh hardsigmoid sigmoid tanh sinh asinh atan erf exp "
        "exp2 expm1",
        _written("up 0|1 ; max 0+1"): "maximum",
        _written("up 0|1 ; min 0+1"): "minimum",
        _written("up 0|1|2"): "clamp",
        _written("up 0|1"): "clamp_min clamp_max",
        _division: "div",
        _leaky_relu: "leaky_relu",
        _masked_fill: "masked_fill",
        _of_bools("up 0|1 ; min 0+1"): "logical_and",
        _of_bools("up 0|1 ; max 0+1"): "logical_or",
        _of_bools("down 0"): "logical_not",
        _sum("up"): "add sub",
        _sum("down"): "rsub",
    }.items()
    for name in names.split()
}


def tagged_pointwise(op: Any) -> RuleFunction | None:
    """The rule of an op that torch tags as pointwise, or None."""
    if torch.Tag.pointwise not in op.tags or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    schema = op._schema
    if any("[]" in str(one.type) and "Tensor" in str(one.type) for one in schema.arguments):
        return None
    if not schema.returns or any(str(one.type) != "Tensor" for one in schema.returns):
        return None
    name = schema.name.split("::")[1]
    if name.endswith("_") and not name.startswith("__"):
        name = name[:-1]
    return _TAGGED.get(name) or _written("")


register_default_rule(tagged_pointwise)


def _cast(call: Call) -> RuleSpec:
    """_to_copy(self, *, dtype, ...): a sum passes where nothing but precision can be lost."""
    old, new = call.tensors[0].dtype, call[1]
    if new is None or new == old:
        return "... -> ... ; pass 0"
    # A sum of rounded terms: within floats the rounding is that of the new dtype; from float to int it is not linear.
    # A term may be larger than the sum: the range must not shrink.
    floats = is_inexact(old) and is_inexact(new) and not (old.is_complex and not new.is_complex)
    floats = floats and torch.finfo(new).max >= 0.9 * torch.finfo(old).max
    widens = not is_inexact(old) and torch.bool not in (old, new) and torch.promote_types(old, new) == new
    if floats or widens:
        return "... -> ... ; lin 0"
    return "... -> ..."


register_rules(
    {
        _cast: "_to_copy.default",
        # The values of self are overwritten, but its placement stays.
        "..., ... -> ... ; pass 0+1": "copy_.default copy.default",
        "... -> ... ; lin 0": "zero_.default",
        "... -> ... ; lin 0 ; drop 0": "zeros_like.default",
        "... -> ... c! ; lin 0": "view_as_real.default",
        "... c! -> ... ; lin 0": "view_as_complex.default",
        # Elementwise, but torch does not tag them so.
        _written(""): "floor_divide.default floor_divide.Scalar hardswish.default log_sigmoid_backward.default "
        "log_sigmoid_forward.default _prelu_kernel.default",
        _written("lin 0+1"): "complex.default",
        _written("lin 0"): "elu_backward.default hardshrink_backward.default hardsigmoid_backward.default "
        "polar.default hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default "
        "mish_backward.default softplus_backward.default softshrink_backward.default _prelu_kernel_backward.default "
        "_conj.default _neg_view.default resolve_conj.default resolve_neg.default",
        _written("pass 0"): "alias.default clone.default detach.default lift_fresh.default positive.default",
        # The old values are not read, so these are replicated even if the tensor is a Partial (as a loss's first
        # gradient).
        _written("drop 0"): "empty_like.default fill.Scalar fill_.Scalar full_like.default ones_like.default",
    }
)
