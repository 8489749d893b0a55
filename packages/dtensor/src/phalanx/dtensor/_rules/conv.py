"""Rules of convolution, pooling and resampling: batch and channels may be cut, the dims in space are whole.

Cut in space an op needs its neighbours' borders: that is an algorithm, not a rule. Many kernels here refuse empty
tensors: most factors are cut only where every rank gets a part.
"""

from itertools import product

from phalanx.dtensor._rules.registry import Call, RuleFunction, RuleSpec, register_rules, rule
from phalanx.dtensor._rules.rule_builder import numbered


def _weight(call: Call, weight: int, transposed: int, groups: int) -> tuple[str, str, str]:
    """(channels in, channels out, dims of the weight)."""
    kernel = numbered("k", call[weight].ndim - 2)
    if call[groups] != 1:
        # A group ties channels in to channels out: cut, their sizes would have to agree with the groups.
        return "c!", "o!", f"v! w! {kernel}"
    return ("c", "o", f"c o {kernel}") if call[transposed] else ("c", "o", f"o c {kernel}")


@rule("aten.convolution.default")
def _convolution(call: Call) -> RuleSpec:
    # (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    count = call[1].ndim - 2
    if call[0].ndim != count + 2:
        return None
    into, out, weight = _weight(call, 1, 6, 8)
    text = f"n {into} {numbered('s', count)}, {weight}{f', {out}' if call[2] is not None else ''}"
    text += f" -> n {out.rstrip('!')} {numbered('t', count)}"
    plus = "+2" if call[2] is not None else ""
    passes = f" ; lin 0{plus}|1{plus} ; full n"
    return text + (passes if "!" in into else f" ; c:sum{plus}{passes} c o")


@rule("aten.convolution_backward.default")
def _convolution_backward(call: Call) -> RuleSpec:
    # (grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
    #  output_mask)
    count = call[2].ndim - 2
    if call[1].ndim != count + 2:
        return None
    into, out, weight = _weight(call, 2, 7, 9)
    data = f"n {into} {numbered('s', count)}"
    every = (data, weight, out)
    outputs = [one for one, wanted in zip(every, call[10], strict=True) if wanted]
    text = f"n {out} {numbered('t', count)}, {data}, {weight} -> {', '.join(outputs)} ; lin 0 ; full n"
    if "!" not in into:
        text += " c o"
    clauses = []
    if call[10][1] or call[10][2]:
        clauses.append("n:sum")
    if "!" not in into:
        if call[10][2]:
            clauses.append("c:same")
        if call[10][0]:
            clauses.append("o:sum")
    if call[10][2] and call[3] is not None:
        clauses.append(f"size 3={len(outputs) - 1}")
    return text + "".join(f" ; {one}" for one in clauses)


# ---- one tensor in, its last dims in space --------------------------------------------------------------------------


def _forward(count: int, outputs: int, passes: str) -> RuleFunction:
    out = ", ".join([f"... {numbered('t', count)}"] * outputs)
    text = f"... {numbered('s', count)} -> {out} ; full ..."
    # A mean of ints is rounded: not linear.
    return lambda call: text + (passes if call.tensors[0].dtype.is_floating_point else "")


def _backward(count: int, size: int | None) -> RuleFunction:
    """(grad_output, self, ..., [indices]); with `size`, that argument is the shape of self instead."""

    def write(call: Call) -> RuleSpec:
        small, large = f"... {numbered('t', count)}", f"... {numbered('s', count)}"
        inputs = [small] + ([large] if size is None else []) + [small] * (len(call.tensors) - 2)
        tail = "" if size is None else f" ; size {size}"
        return f"{', '.join(inputs)} -> {large} ; lin 0 ; full ...{tail}"

    return write


_LINEAR = " ; lin 0"
# (ops, each with a backward, dims in space, results, what passes, the argument of the backward that is a shape)
_FAMILIES: tuple[tuple[str, tuple[int, ...], int, str, int | None], ...] = (
    ("avg_pool{}d _adaptive_avg_pool{}d", (2, 3), 1, _LINEAR, None),
    ("max_pool{}d_with_indices adaptive_max_pool{}d", (2, 3), 2, "", None),
    ("reflection_pad{}d replication_pad{}d", (1, 2, 3), 1, " ; pass 0", None),
    ("upsample_nearest{}d _upsample_nearest_exact{}d", (1, 2, 3), 1, _LINEAR, 2),
    ("upsample_linear{}d", (1,), 1, _LINEAR, 2),
    ("upsample_bilinear{}d upsample_bicubic{}d", (2,), 1, _LINEAR, 2),
    ("_upsample_bilinear{}d_aa _upsample_bicubic{}d_aa", (2,), 1, _LINEAR, 2),
    ("upsample_trilinear{}d", (3,), 1, _LINEAR, 2),
)
for _names, _counts, _results, _passes, _size in _FAMILIES:
    for _name, _count in product(_names.split(), _counts):
        _op = f"aten.{_name.format(_count)}"
        register_rules({f"{_op}.default": _forward(_count, _results, _passes)})
        register_rules({f"{_op}_backward.default": _backward(_count, _size)})


# ---- resampling and moving between channels and space ---------------------------------------------------------------

register_rules(
    {
        "aten.grid_sampler_2d.default": "n c h! w!, n p q t! -> n c p q ; lin 0 ; full n c p q",
        "aten.grid_sampler_3d.default": "n c d! h! w!, n o p q t! -> n c o p q ; lin 0 ; full n c o p q",
        "aten.im2col.default": "... c! h! w! -> ... o! l! ; lin 0 ; full ...",
        "aten.col2im.default": "... o! l! -> ... c! h! w! ; lin 0 ; full ...",
    }
)


@rule("aten.pixel_shuffle.default")
def _pixel_shuffle(call: Call) -> RuleSpec:
    factor, shape = call[1], call.tensors[0].shape
    sizes = {"c": shape[-3] // factor**2, "p": factor, "q": factor}
    return "... (c p! q!) h w -> ... c (h p) (w q) ; pass 0 ; full ... c h w", sizes


@rule("aten.pixel_unshuffle.default")
def _pixel_unshuffle(call: Call) -> RuleSpec:
    factor, shape = call[1], call.tensors[0].shape
    sizes = {"h": shape[-2] // factor, "w": shape[-1] // factor, "p": factor, "q": factor}
    return "... c (h p!) (w q!) -> ... (c p q) h w ; pass 0 ; full ... c h w", sizes
