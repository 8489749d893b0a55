"""Rules of linear algebra and Fourier transforms: the dims that the op works on are whole, the batch dims free."""

from phalanx.dtensor._rules.registry import Call, RuleFunction, RuleSpec, register_rules, rule
from phalanx.dtensor._rules.rule_builder import dims, same_dims

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
    }
)


@rule("aten._linalg_eigh.default")
def _eigh(call: Call) -> RuleSpec:
    # (A, UPLO, compute_v): without vectors they come out with no elements.
    return "... a! b! -> ... a, ... v! w!" if call[2] else "... a! b! -> ... a, v!"


@rule("aten.linalg_cross.default")
def _cross(call: Call) -> RuleSpec:
    left, right = call.tensors
    return same_dims(left.ndim, {call.dim(2)}, 2) + " ; lin 0|1" if left.ndim == right.ndim else None


@rule("aten._cdist_backward.default")
def _cdist_backward(call: Call) -> RuleSpec:
    # (grad, x1, x2, p, cdist): the gradient of x1 sums over the points of x2.
    return "... m n, ... m k!, ... n k!, ... m n -> ... m k ; n:sum ; lin 0 ; full ... m n"


def _transform(call: Call) -> RuleSpec:
    rank, over = call.tensors[0].ndim, call.dims(1)
    right = dims(rank, changed={index: f"o{index}!" for index in over})
    free = "".join(f" d{index}" for index in range(rank) if index not in over)
    # MKL refuses a batch of none.
    return f"{dims(rank, over)} -> {right} ; lin 0{f' ; full{free}' if free else ''}"


_TRANSFORMS: dict[str, RuleFunction] = {
    "aten._fft_r2c.default": _transform,
    "aten._fft_c2c.default": _transform,
    "aten._fft_c2r.default": _transform,
}
register_rules(_TRANSFORMS)


@rule("aten.renorm.default")
def _renorm(call: Call) -> RuleSpec:
    # (self, p, dim, maxnorm): each slice of dim has a norm of its own.
    rank = call.tensors[0].ndim
    return same_dims(rank, set(range(rank)) - {call.dim(2)}, 1)
