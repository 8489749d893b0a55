"""Rules of reductions: what a dim that goes away leaves when it was cut, and which dims must be whole."""

import math

import torch

from phalanx.dtensor._rules.registry import Call, RuleFunction, RuleSpec, register_rules, rule
from phalanx.dtensor._rules.rule_builder import along, reduced


def _over(
    op: str | None,
    passes: str = "",
    *,
    dim: int | None = 1,
    keepdim: int | None = 2,
    outputs: int = 1,
    of_bools: str = "",
) -> RuleFunction:
    """A reduction by an op that leaves Partials, or (None) with its dims whole.

    Args:
        op: What cutting a dim that goes away leaves.
        passes: The clauses of the Partials that pass; `of_bools` are more of them, for tensors of bools.
        dim: The argument that names the dims; None: all go away.
        keepdim: The argument that says whether they stay with size 1; None: they do not.
        outputs: How many tensors come out.
    """

    def write(call: Call) -> RuleSpec:
        rank = call.tensors[0].ndim
        over = range(rank) if dim is None else call.dims(dim)
        keep = dim is not None and keepdim is not None and bool(call[keepdim])
        clauses = passes + (of_bools if call.tensors[0].dtype == torch.bool else "")
        return reduced(rank, over, keep, op, outputs) + clauses

    return write


register_rules(
    {
        "aten.amax.default": _over("max", " ; max 0"),
        "aten.amin.default": _over("min", " ; min 0"),
        "aten.nansum.default": _over("sum"),
        "aten.sum.default": _over("sum", " ; lin 0", dim=None),
        "aten.sum.dim_IntList": _over("sum", " ; lin 0"),
        "aten.mean.default": _over("mean", " ; lin 0", dim=None),
        "aten.mean.dim": _over("mean", " ; lin 0"),
        "aten.prod.default": _over("prod", " ; prod 0", dim=None),
        "aten.prod.dim_int": _over("prod", " ; prod 0"),
        "aten.count_nonzero.dim_IntList": _over("sum", keepdim=None),
        "aten.count_nonzero.default": _over("sum", keepdim=None),
        "aten.max.default": _over("max", " ; max 0", dim=None),
        "aten.min.default": _over("min", " ; min 0", dim=None),
    }
)
for _name, _op in (("any", "max"), ("all", "min")):
    # For other dtypes than bool a maximum above 0 is not what `any` looks for.
    register_rules({f"aten.{_name}.default": _over(_op, dim=None, of_bools=f" ; {_op} 0")})
    register_rules({f"aten.{_name}.{overload}": _over(_op, of_bools=f" ; {_op} 0") for overload in ("dim", "dims")})

_NORMS = {math.inf: "max", -math.inf: "min", 0.0: "sum", 1.0: "sum"}


@rule("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype", "aten.norm.Scalar")
def _norm(call: Call) -> RuleSpec:
    # Other orders need a root after the sum: their dims stay whole, or an algorithm takes the call.
    order = 2 if call[1] is None else call[1]
    op = _NORMS.get(float(order)) if isinstance(order, (int, float)) else None
    return _over(op, dim=None if len(call.args) == 2 else 2, keepdim=3)(call)


# ---- dims that must be whole ----------------------------------------------------------------------------------------

register_rules(
    {
        "aten.var.correction": _over(None, keepdim=3),
        "aten.std.correction": _over(None, keepdim=3),
        "aten.var_mean.correction": _over(None, keepdim=3, outputs=2),
        "aten.std_mean.correction": _over(None, keepdim=3, outputs=2),
        "aten.logsumexp.default": _over(None),
        "aten.argmax.default": _over(None),
        "aten.argmin.default": _over(None),
        "aten.max.dim": _over(None, outputs=2),
        "aten.min.dim": _over(None, outputs=2),
        "aten.median.dim": _over(None, outputs=2),
        "aten.nanmedian.dim": _over(None, outputs=2),
        "aten.mode.default": _over(None, outputs=2),
        "aten.kthvalue.default": _over(None, dim=2, keepdim=3, outputs=2),
        "aten.aminmax.default": _over(None, outputs=2),
        "aten.cumsum.default": along(1, "[x!] -> [x] ; lin 0"),
        "aten.cumprod.default": along(1, "[x!] -> [x]"),
        "aten.cummax.default": along(1, "[x!] -> [x], [x]"),
        "aten.cummin.default": along(1, "[x!] -> [x], [x]"),
        "aten.logcumsumexp.default": along(1, "[x!] -> [x]"),
        "aten.sort.default": along(1, "[x!] -> [x], [x]"),
        "aten.sort.stable": along(2, "[x!] -> [x], [x]"),
        "aten.argsort.stable": along(2, "[x!] -> [x]"),
        "aten.topk.default": along(2, "[x!] -> [k!], [k!]"),
    }
)
