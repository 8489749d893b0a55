"""Rules of reductions: what a dim that goes away leaves when it was cut, and which dims must be whole."""

import math

import torch

from phalanx.dtensor._rules.registry import Call, RuleFunction, RuleSpec, register_rules, rule
from phalanx.dtensor._rules.rule_builder import dims, reduced, same_dims

# name: (op, which Partials pass); overloads with a dim have it as argument 1 and keepdim as argument 2.
_REDUCTIONS = {
    "sum": ("sum", "lin 0"),
    "nansum": ("sum", ""),
    "mean": ("mean", "lin 0"),
    "amax": ("max", "max 0"),
    "amin": ("min", "min 0"),
    "prod": ("prod", "prod 0"),
    "any": ("max", ""),
    "all": ("min", ""),
    "count_nonzero": ("sum", ""),
}


def _with_dims(op: str, passes: str, keepdim: int | None) -> RuleFunction:
    tail = f" ; {passes}" if passes else ""

    def write(call: Call) -> RuleSpec:
        keep = bool(call[keepdim]) if keepdim is not None else False
        return reduced(call.tensors[0].ndim, call.dims(1), keep, op) + tail

    return write


def _of_all(op: str, passes: str) -> RuleFunction:
    tail = f" ; {passes}" if passes else ""

    def write(call: Call) -> RuleSpec:
        rank = call.tensors[0].ndim
        return reduced(rank, range(rank), False, op) + tail

    return write


def _of_bools(write: RuleFunction, passes: str) -> RuleFunction:
    def with_passes(call: Call) -> RuleSpec:
        # For other dtypes a maximum above 0 is not what `any` looks for.
        return f"{write(call)}{passes if call.tensors[0].dtype == torch.bool else ''}"

    return with_passes


for _name in ("amax", "amin", "nansum"):
    register_rules({f"aten.{_name}.default": _with_dims(*_REDUCTIONS[_name], 2)})
for _name in ("sum", "mean", "prod"):
    register_rules({f"aten.{_name}.default": _of_all(*_REDUCTIONS[_name])})
register_rules({"aten.sum.dim_IntList": _with_dims(*_REDUCTIONS["sum"], 2)})
register_rules({"aten.mean.dim": _with_dims(*_REDUCTIONS["mean"], 2)})
register_rules({"aten.prod.dim_int": _with_dims(*_REDUCTIONS["prod"], 2)})
register_rules({"aten.count_nonzero.dim_IntList": _with_dims(*_REDUCTIONS["count_nonzero"], None)})
register_rules({"aten.count_nonzero.default": _with_dims(*_REDUCTIONS["count_nonzero"], None)})
register_rules({"aten.max.default": _of_all("max", "max 0"), "aten.min.default": _of_all("min", "min 0")})
for _name in ("any", "all"):
    _op = _REDUCTIONS[_name][0]
    register_rules({f"aten.{_name}.default": _of_bools(_of_all(_op, ""), f" ; {_op} 0")})
    for _overload in ("dim", "dims"):
        register_rules({f"aten.{_name}.{_overload}": _of_bools(_with_dims(_op, "", 2), f" ; {_op} 0")})

_NORMS = {math.inf: "max", -math.inf: "min", 0.0: "sum", 1.0: "sum"}


def _norm_op(order: object) -> str | None:
    return _NORMS.get(float(order)) if isinstance(order, (int, float)) else None


@rule("aten.linalg_vector_norm.default")
def _vector_norm(call: Call) -> RuleSpec:
    # Other orders need a root after the sum: their dims stay whole, or algorithms/norm.py takes the call.
    return reduced(call.tensors[0].ndim, call.dims(2), bool(call[3]), _norm_op(call[1]))


@rule("aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype")
def _norm(call: Call) -> RuleSpec:
    order = 2 if call[1] is None else call[1]
    return reduced(call.tensors[0].ndim, call.dims(2), bool(call[3]), _norm_op(order))


@rule("aten.norm.Scalar")
def _norm_of_all(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    return reduced(rank, range(rank), False, _norm_op(call[1]))


# ---- dims that must be whole ----------------------------------------------------------------------------------------


def _whole(outputs: int, dim: int = 1, keepdim: int | None = 2) -> RuleFunction:
    def write(call: Call) -> RuleSpec:
        keep = keepdim is not None and bool(call[keepdim])
        return reduced(call.tensors[0].ndim, call.dims(dim), keep, None, outputs)

    return write


register_rules(
    {
        "aten.var.correction": _whole(1, keepdim=3),
        "aten.std.correction": _whole(1, keepdim=3),
        "aten.var_mean.correction": _whole(2, keepdim=3),
        "aten.std_mean.correction": _whole(2, keepdim=3),
        "aten.logsumexp.default": _whole(1),
        "aten.argmax.default": _whole(1),
        "aten.argmin.default": _whole(1),
        "aten.max.dim": _whole(2),
        "aten.min.dim": _whole(2),
        "aten.median.dim": _whole(2),
        "aten.nanmedian.dim": _whole(2),
        "aten.mode.default": _whole(2),
        "aten.kthvalue.default": _whole(2, dim=2, keepdim=3),
        "aten.aminmax.default": _whole(2),
    }
)


def _along(inputs: int, outputs: int, dim: int, passes: str = "") -> RuleFunction:
    """Ops along a dim that keep the shape."""

    def write(call: Call) -> RuleSpec:
        rank = call.tensors[0].ndim
        if any(one.ndim != rank for one in call.tensors):
            return None
        return same_dims(rank, {call.dim(dim)}, inputs, outputs) + passes

    return write


register_rules(
    {
        "aten.cumsum.default": _along(1, 1, 1, " ; lin 0"),
        "aten.cumprod.default": _along(1, 1, 1),
        "aten.cummax.default": _along(1, 2, 1),
        "aten.cummin.default": _along(1, 2, 1),
        "aten.logcumsumexp.default": _along(1, 1, 1),
        "aten.sort.default": _along(1, 2, 1),
        "aten.sort.stable": _along(1, 2, 2),
        "aten.argsort.stable": _along(1, 1, 2),
    }
)


@rule("aten.topk.default")
def _topk(call: Call) -> RuleSpec:
    rank, dim = call.tensors[0].ndim, call.dim(2)
    right = dims(rank, changed={dim: "k!"} if rank else {})
    return f"{dims(rank, {dim})} -> {right}, {right}"
