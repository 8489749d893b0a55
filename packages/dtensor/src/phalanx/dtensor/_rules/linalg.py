"""Rules of matmuls, linear algebra and Fourier transforms.

A bias of a matmul is added once: where the contracted factor is cut it must be a Partial. In the other ops the dims
that the op works on are whole, and the batch dims free.
"""

from phalanx.dtensor._rules.constraints import is_inexact
from phalanx.dtensor._rules.registry import Call, RuleSpec, family, register_rules, rule
from phalanx.dtensor._rules.rule_builder import along, dims, tied

register_rules(
    {
        "m k, k n -> m n ; k:sum ; lin 0|1": "mm.default",
        "b m k, b k n -> b m n ; k:sum ; lin 0|1": "bmm.default",
        "m k, k -> m ; k:sum ; lin 0|1": "mv.default",
        "k, k -> ; k:sum ; lin 0|1": "dot.default vdot.default",
        "... m k!, ... n k! -> ... m n": "_cdist_forward.default _euclidean_dist.default",
        # (grad, x1, x2, p, cdist): the gradient of x1 sums over the points of x2.
        "... m n, ... m k!, ... n k!, ... m n -> ... m k ; n:sum ; lin 0 ; full ... m n": "_cdist_backward.default",
    }
)


@family
def _biased(call: Call, left: str, right: str, out: str, summed: str) -> RuleSpec:
    """beta * self + alpha * left @ right: (self, left, right, beta, alpha)."""
    bias = tied(call.tensors[0].shape, out.split())
    text = f"{bias}, {left}, {right} -> {out}"
    if not (is_inexact(call.tensors[0].dtype) or (float(call[3]).is_integer() and float(call[4]).is_integer())):
        return None  # fractions of whole numbers: what torch makes of them is not linear
    if bias != out:
        # On empty matrices torch's kernels return the bias as it is, not broadcast.
        text += f" ; full {out}"
    if call[3] == 0:  # torch does not read self then, not even a NaN in it
        return text + "".join(f" ; {one}:sum" for one in summed) + " ; lin 1|2"
    return text + "".join(f" ; {one}:sum+0" for one in summed) + " ; lin 0+1|0+2"


register_rules(
    {
        _biased("m k", "k n", "m n", "k"): "addmm.default",
        _biased("b m k", "b k n", "b m n", "k"): "baddbmm.default",
        _biased("b m k", "b k n", "m n", "bk"): "addbmm.default",
        _biased("m k", "k", "m", "k"): "addmv.default",
        _biased("m", "n", "m n", ""): "addr.default",
    }
)


@rule("linear.default")
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
        "... a! b! -> ... a b": "cholesky.default cholesky_inverse.default linalg_matrix_exp.default",
        "... a! b! -> ... a b, ...": "linalg_cholesky_ex.default linalg_inv_ex.default",
        "... a! b! -> ..., ... a b, ... b": "_linalg_det.default",
        "... a! b! -> ..., ..., ... a b, ... b": "_linalg_slogdet.default",
        "... a! b! -> ... a b, ... p!, ...": "linalg_lu_factor_ex.default",
        "... a! b! -> ... q! r!, ... s! t!": "linalg_qr.default",
        "... a! b! -> ... u! v!, ... s!, ... w! x!": "_linalg_svd.default",
        "... a! b!, ... b! c! -> ... b c": "linalg_solve_triangular.default",
        "... a! b!, ... c! -> ... a b": "linalg_householder_product.default",
        "a! b! -> ; lin 0": "trace.default",
        along(2, "[x!], [x!] -> [x] ; lin 0|1"): "linalg_cross.default",
    }
)


@rule("_linalg_eigh.default")
def _eigh(call: Call) -> RuleSpec:
    # (A, UPLO, compute_v): without vectors they come out with no elements.
    return "... a! b! -> ... a, ... v! w!" if call[2] else "... a! b! -> ... a, v!"


@rule("_fft_r2c.default _fft_c2c.default _fft_c2r.default")
def _transform(call: Call) -> RuleSpec:
    rank, over = call.tensors[0].ndim, call.dims(1)
    right = dims(rank, changed={index: f"o{index}!" for index in over})
    free = "".join(f" d{index}" for index in range(rank) if index not in over)
    # MKL refuses a batch of none.
    return f"{dims(rank, over)} -> {right} ; lin 0{f' ; full{free}' if free else ''}"


@rule("renorm.default")
def _renorm(call: Call) -> RuleSpec:
    # (self, p, dim, maxnorm): each slice of dim has a norm of its own.
    rank = call.tensors[0].ndim
    return f"{dims(rank, set(range(rank)) - {call.dim(2)})} -> {dims(rank)}"
