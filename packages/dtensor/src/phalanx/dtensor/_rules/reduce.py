"""Rules of reductions: what a dim that goes away leaves when it was cut, and which dims must be whole."""

import math

import torch

from phalanx.dtensor._rules.registry import Call, RuleSpec, family, register_rules, rule
from phalanx.dtensor._rules.rule_builder import along, dims


@family
def _over(
    call: Call,
    op: str | None,
    passes: str = "",
    *,
    dim: int | None = 1,
    keepdim: int | None = 2,
    outputs: int = 1,
    of_bools: str = "",
) -> RuleSpec:
    """A reduction by an op that leaves Partials, or (None) with its dims whole.

    `passes` are the clauses of the Partials that pass, `of_bools` more of them for tensors of bools. Argument `dim`
    names the dims (None: all), and argument `keepdim` says whether they stay with size 1 (None: they do not).
    """
    rank = call.tensors[0].ndim
    # torch counts a tensor without dims as if it had dim 0.
    over = [one for one in (range(rank) if dim is None else call.dims(dim)) if one < rank]
    keep = dim is not None and keepdim is not None and bool(call[keepdim])
    right = dims(rank, changed=dict.fromkeys(over, "1" if keep else ""))
    reductions = "" if op is None else "".join(f" ; d{index}:{op}" for index in sorted(over))
    clauses = passes + (of_bools if call.tensors[0].dtype == torch.bool else "")
    return f"{dims(rank, over if op is None else ())} -> {', '.join([right] * outputs)}{reductions}{clauses}"


register_rules(
    {
        _over("max", " ; max 0"): "amax.default",
        _over("min", " ; min 0"): "amin.default",
        _over("sum"): "nansum.default",
        _over("sum", " ; lin 0", dim=None): "sum.default",
        _over("sum", " ; lin 0"): "sum.dim_IntList",
        _over("mean", " ; lin 0", dim=None): "mean.default",
        _over("mean", " ; lin 0"): "mean.dim",
        _over("prod", " ; prod 0", dim=None): "prod.default",
        _over("prod", " ; prod 0"): "prod.dim_int",
        _over("sum", keepdim=None): "count_nonzero.dim_IntList count_nonzero.default",
        _over("max", " ; max 0", dim=None): "max.default",
        _over("min", " ; min 0", dim=None): "min.default",
        # For other dtypes than bool a maximum above 0 is not what `any` looks for.
        _over("max", dim=None, of_bools=" ; max 0"): "any.default",
        _over("min", dim=None, of_bools=" ; min 0"): "all.default",
        _over("max", of_bools=" ; max 0"): "any.dim any.dims",
        _over("min", of_bools=" ; min 0"): "all.dim all.dims",
    }
)
_NORMS = {math.inf: "max", -math.inf: "min", 0.0: "sum", 1.0: "sum"}


@rule("linalg_vector_norm.default norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.Scalar")
def _norm(call: Call) -> RuleSpec:
    # Other orders need a root after the sum: their dims stay whole, or an algorithm takes the call.
    order = 2 if call[1] is None else call[1]
    op = _NORMS.get(float(order)) if isinstance(order, (int, float)) else None
    return _over(op, dim=None if len(call.args) == 2 else 2, keepdim=3)(call)


# ---- dims that must be whole ----------------------------------------------------------------------------------------

register_rules(
    {
        _over(None, keepdim=3): "var.correction std.correction",
        _over(None, keepdim=3, outputs=2): "var_mean.correction std_mean.correction",
        _over(None): "logsumexp.default argmax.default argmin.default",
        _over(None, outputs=2): "max.dim min.dim median.dim nanmedian.dim mode.default aminmax.default",
        _over(None, dim=2, keepdim=3, outputs=2): "kthvalue.default",
        along(1, "[x!] -> [x] ; lin 0"): "cumsum.default",
        along(1, "[x!] -> [x]"): "cumprod.default logcumsumexp.default",
        along(1, "[x!] -> [x], [x]"): "cummax.default cummin.default sort.default",
        along(2, "[x!] -> [x], [x]"): "sort.stable",
        along(2, "[x!] -> [x]"): "argsort.stable",
        along(2, "[x!] -> [k!], [k!]"): "topk.default",
    }
)
