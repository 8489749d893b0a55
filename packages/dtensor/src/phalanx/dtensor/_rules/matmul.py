"""Rules of the matmul family. A bias is added once: where the contracted factor is cut it must be a Partial."""

from phalanx.dtensor._rules.constraints import is_inexact
from phalanx.dtensor._rules.registry import Call, RuleFunction, RuleSpec, register_rules, rule
from phalanx.dtensor._rules.rule_builder import tied

register_rules(
    {
        "aten.mm.default": "m k, k n -> m n ; k:sum ; lin 0|1",
        "aten.bmm.default": "b m k, b k n -> b m n ; k:sum ; lin 0|1",
        "aten.mv.default": "m k, k -> m ; k:sum ; lin 0|1",
        "aten.dot.default": "k, k -> ; k:sum ; lin 0|1",
        "aten.vdot.default": "k, k -> ; k:sum ; lin 0|1",
        "aten._cdist_forward.default": "... m k!, ... n k! -> ... m n",
    }
)


def _biased(left: str, right: str, out: str, summed: str) -> RuleFunction:
    """beta * self + alpha * left @ right: (self, left, right, beta, alpha)."""
    names = out.split()

    def write(call: Call) -> RuleSpec:
        bias = tied(call.tensors[0].shape, names)
        text = f"{bias}, {left}, {right} -> {out}"
        if not (is_inexact(call.tensors[0].dtype) or (float(call[3]).is_integer() and float(call[4]).is_integer())):
            return None  # fractions of whole numbers: what torch makes of them is not linear
        if bias != out:
            # On empty matrices torch's kernels return the bias as it is, not broadcast.
            text += f" ; full {out}"
        if call[3] == 0:  # torch does not read self then, not even a NaN in it
            return text + "".join(f" ; {one}:sum" for one in summed) + " ; lin 1|2"
        return text + "".join(f" ; {one}:sum+0" for one in summed) + " ; lin 0+1|0+2"

    return write


register_rules(
    {
        "aten.addmm.default": _biased("m k", "k n", "m n", "k"),
        "aten.baddbmm.default": _biased("b m k", "b k n", "b m n", "k"),
        "aten.addbmm.default": _biased("b m k", "b k n", "m n", "bk"),
        "aten.addmv.default": _biased("m k", "k", "m", "k"),
        "aten.addr.default": _biased("m", "n", "m n", ""),
    }
)


@rule("aten.linear.default")
def _linear(call: Call) -> RuleSpec:
    weight = "n k" if call.tensors[1].ndim == 2 else "k"
    right = "... n" if call.tensors[1].ndim == 2 else "..."
    if len(call.tensors) == 2:
        return f"... k, {weight} -> {right} ; k:sum ; lin 0|1"
    bias = "n" if call.tensors[2].ndim and call.tensors[1].ndim == 2 else ""
    return f"... k, {weight}, {bias} -> {right} ; k:sum+2 ; lin 0+2|1+2"
