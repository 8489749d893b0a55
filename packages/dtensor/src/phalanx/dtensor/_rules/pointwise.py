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
from phalanx.dtensor._rules.registry import Call, RuleFunction, RuleSpec, register_default_rule, register_rules


def _by_name(passes: dict[str, str]) -> dict[str, str]:
    """What passes for each op, of a table from what passes to the names of ops."""
    return {name: clauses for clauses, names in passes.items() for name in names.split()}


# Which Partials pass, by the name of the op without namespace and overload.
_PASSES = _by_name(
    {
        "lin 0": "conj_physical deg2rad rad2deg native_dropout_backward "
        # grad_output is argument 0, and the result is linear in it.
        "gelu_backward logit_backward sigmoid_backward silu_backward tanh_backward threshold_backward",
        "lin 0 ; down 0": "neg",
        "lin 0|1 ; prod 0+1": "mul",
        "lin 1+2 ; up 1|2": "where",
        "lin 0+1": "lerp addcdiv",
        "lin 0+1|0+2": "addcmul",
        "pass 0": "positive",
        "up 0": "ceil floor trunc round relu relu6 hardtanh hardsigmoid sigmoid tanh sinh asinh atan erf exp exp2 "
        "expm1",
        "up 0|1 ; max 0+1": "maximum",
        "up 0|1 ; min 0+1": "minimum",
        "up 0|1|2": "clamp",
        "up 0|1": "clamp_min clamp_max",
    }
)


def _tensor_arguments(call: Call) -> list[int]:
    """The arguments that are tensors, in order."""
    return [index for index, value in enumerate(call.args) if hasattr(value, "shape")]


def clauses(passes: str, present: list[int]) -> str:
    """The clauses of a table, counted by argument, for the tensors that a call has: counted by tensor."""
    kept: list[str] = []
    for clause in filter(None, map(str.strip, passes.split(";"))):
        kind, _, groups = clause.partition(" ")
        for group in groups.strip().split("|"):
            arguments = [int(one) for one in group.split("+")]
            if all(one in present for one in arguments):
                kept.append(f"{kind} {'+'.join(str(present.index(one)) for one in arguments)}")
    return "".join(f" ; {one}" for one in kept)


def elementwise(call: Call, passes: str = "") -> str:
    """The rule of an elementwise call."""
    present = _tensor_arguments(call)
    outputs = ", ".join(["..."] * len(call.op._schema.returns))
    return f"{', '.join(['...'] * len(present))} -> {outputs}{clauses(passes, present)}"


def _written(passes: str) -> RuleFunction:
    def write(call: Call) -> RuleSpec:
        return elementwise(call, passes) if call.tensors else None

    return write


# The rule functions by what passes: one object each.
_FUNCTIONS = {passes: _written(passes) for passes in {"", *_PASSES.values()}}


def _division(call: Call) -> RuleSpec:
    # Rounded, a quotient is not linear; div.Tensor_mode has the mode as argument 2.
    rounded = len(call.args) > 2 and call[2] is not None
    return elementwise(call, "" if rounded else "lin 0")


def _sum(order: str) -> RuleFunction:
    """add, sub and rsub: (self, other, alpha).

    A Partial maximum is kept only if the other argument is a finite number: a term of the maximum may be -inf, that of
    an empty shard, and another tensor may have an inf at that place.
    """

    def write(call: Call) -> RuleSpec:
        number = isinstance(call[1], (int, float)) and math.isfinite(call[1])
        if order == "down" and call[2] < 0:
            number = False  # rsub: alpha is the factor of self
        return elementwise(call, f"lin 0+1 ; {order} 0" if number else "lin 0+1")

    return write


def _of_bools(passes: str) -> RuleFunction:
    """Logical ops: of other dtypes a maximum is 0 where a term, below it, is not."""

    def write(call: Call) -> RuleSpec:
        return elementwise(call, passes if all(one.dtype == torch.bool for one in call.tensors) else "")

    return write


def _leaky_relu(call: Call) -> RuleSpec:
    return elementwise(call, "up 0" if call[1] >= 0 else "")


def _masked_fill(call: Call) -> RuleSpec:
    # Zeros may be filled into every term of a sum; other values may not.
    zero = not hasattr(call[2], "shape") and call[2] == 0
    return elementwise(call, "lin 0 ; up 0" if zero else "up 0")


_WRITERS: dict[str, RuleFunction] = {
    "div": _division,
    "leaky_relu": _leaky_relu,
    "masked_fill": _masked_fill,
    "logical_and": _of_bools("up 0|1 ; min 0+1"),
    "logical_not": _of_bools("down 0"),
    "logical_or": _of_bools("up 0|1 ; max 0+1"),
    "add": _sum("up"),
    "sub": _sum("up"),
    "rsub": _sum("down"),
}

# Elementwise, but torch does not tag them so: what passes, by the full name of the op without "aten.".
_UNTAGGED = _by_name(
    {
        "": "floor_divide.default floor_divide.Scalar hardswish.default log_sigmoid_backward.default "
        "log_sigmoid_forward.default _prelu_kernel.default",
        "lin 0+1": "complex.default",
        "lin 0": "elu_backward.default hardshrink_backward.default hardsigmoid_backward.default polar.default "
        "hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default mish_backward.default "
        "softplus_backward.default softshrink_backward.default _prelu_kernel_backward.default _conj.default "
        "_neg_view.default resolve_conj.default resolve_neg.default",
        "pass 0": "alias.default clone.default detach.default lift_fresh.default positive.default",
        # The old values are not read, so these are replicated even if the tensor is a Partial (as a loss's first
        # gradient).
        "drop 0": "empty_like.default fill.Scalar fill_.Scalar full_like.default ones_like.default",
    }
)


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
    return _WRITERS.get(name) or _FUNCTIONS[_PASSES.get(name, "")]


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


register_rules({f"aten.{name}": _written(passes) for name, passes in _UNTAGGED.items()})
register_rules(
    {
        "aten._to_copy.default": _cast,
        # The values of self are overwritten, but its placement stays.
        "aten.copy_.default": "..., ... -> ... ; pass 0+1",
        "aten.zero_.default": "... -> ... ; lin 0",
        "aten.zeros_like.default": "... -> ... ; lin 0 ; drop 0",
        "aten.copy.default": "..., ... -> ... ; pass 0+1",
        "aten.view_as_real.default": "... -> ... c! ; lin 0",
        "aten.view_as_complex.default": "... c! -> ... ; lin 0",
    }
)
