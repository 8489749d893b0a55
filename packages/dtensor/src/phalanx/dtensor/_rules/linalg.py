"""Rules of matmuls, linear algebra and Fourier transforms.

A bias of a matmul is added once: where the contracted factor is cut it must be a Partial. In the other ops the dims
that the op works on are whole, and the batch dims free.
"""

from phalanx.dtensor._rules.constraints import is_inexact
from phalanx.dtensor._rules.registry import Call, RuleFunction, RuleSpec, register_rules, rule
from phalanx.dtensor._rules.rule_builder import along, dims, tied

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


# ---- linear algebra and transforms ----------------------------------------------------------------------------------

register_rules(
    {
        "aten.linalg_cholesky_ex.default": "... a! b! -> ... a b, ...",
        "aten.cholesky.default": "... a! b! -> ... a b",
        "aten.cholesky_inverse.default": "... a! b! -> ... a b",
        "aten.linalg_inv_ex.default": "... a! b! -> ... a b, ...",
        "aten.linalg_matrix_exp.default": "... a! b! -> ... a b",
        "aten._linalg_det.default": "... a! b! -> ..., ... a b, ... b",
        "aten._linalg_slogdet.default": "... a! b! -> ..., ..., ... a b, ... b",
        "aten.linalg_lu_factor_ex.default": "... a! b! -> ... a b, ... p!, ...",
        "aten.linalg_qr.default": "... a! b! -> ... q! r!, ... s! t!",
        "aten._linalg_svd.default": "... a! b! -> ... u! v!, ... s!, ... w! x!",
        "aten.linalg_solve_triangular.default": "... a! b!, ... b! c! -> ... b c",
        "aten.linalg_householder_product.default": "... a! b!, ... c! -> ... a b",
        "aten._euclidean_dist.default": "... m k!, ... n k! -> ... m n",
        "aten.trace.default": "a! b! -> ; lin 0",
        "aten.linalg_cross.default": along(2, "[x!], [x!] -> [x] ; lin 0|1"),
    }
)
# (grad, x1, x2, p, cdist): the gradient of x1 sums over the points of x2.
_CDIST_BACKWARD = "... m n, ... m k!, ... n k!, ... m n -> ... m k ; n:sum ; lin 0 ; full ... m n"
register_rules({"aten._cdist_backward.default": _CDIST_BACKWARD})


@rule("aten._linalg_eigh.default")
def _eigh(call: Call) -> RuleSpec:
    # (A, UPLO, compute_v): without vectors they come out with no elements.
    return "... a! b! -> ... a, ... v! w!" if call[2] else "... a! b! -> ... a, v!"


@rule("aten._fft_r2c.default", "aten._fft_c2c.default", "aten._fft_c2r.default")
def _transform(call: Call) -> RuleSpec:
    rank, over = call.tensors[0].ndim, call.dims(1)
    right = dims(rank, changed={index: f"o{index}!" for index in over})
    free = "".join(f" d{index}" for index in range(rank) if index not in over)
    # MKL refuses a batch of none.
    return f"{dims(rank, over)} -> {right} ; lin 0{f' ; full{free}' if free else ''}"


@rule("aten.renorm.default")
def _renorm(call: Call) -> RuleSpec:
    # (self, p, dim, maxnorm): each slice of dim has a norm of its own.
    rank = call.tensors[0].ndim
    return f"{dims(rank, set(range(rank)) - {call.dim(2)})} -> {dims(rank)}"
