"""Rules of convolution, pooling and resampling: batch and channels may be cut, the dims in space are whole.

Cut in space an op needs its neighbours' borders: that is an algorithm, not a rule. Many kernels here refuse empty
tensors: most factors are cut only where every rank gets a part.
"""

from phalanx.dtensor._rules.registry import Call, RuleSpec, SizedRule, family, register_rules, rule
from phalanx.dtensor._rules.rule_builder import numbered


def _weight(call: Call, weight: int, transposed: int, groups: int) -> tuple[str, str, str]:
    """(channels in, channels out, dims of the weight)."""
    kernel = numbered("k", call[weight].ndim - 2)
    if call[groups] != 1:
        # A group ties channels in to channels out: cut, their sizes would have to agree with the groups.
        return "c!", "o!", f"v! w! {kernel}"
    return ("c", "o", f"c o {kernel}") if call[transposed] else ("c", "o", f"o c {kernel}")


@rule("convolution.default")
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


@rule("convolution_backward.default")
def _convolution_backward(call: Call) -> RuleSpec:
    # (grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
    #  output_mask)
    count, mask = call[2].ndim - 2, call[10]
    if call[1].ndim != count + 2:
        return None
    into, out, weight = _weight(call, 2, 7, 9)
    data = f"n {into} {numbered('s', count)}"
    outputs = [one for one, wanted in zip((data, weight, out), mask, strict=True) if wanted]
    text = f"n {out} {numbered('t', count)}, {data}, {weight} -> {', '.join(outputs)} ; lin 0 ; full n"
    is_free = "!" not in into
    text += " c o" if is_free else ""
    text += " ; n:sum" if mask[1] or mask[2] else ""
    text += " ; c:same" if is_free and mask[2] else ""
    text += " ; o:sum" if is_free and mask[0] else ""
    return text + (f" ; size 3={len(outputs) - 1}" if mask[2] and call[3] is not None else "")


# ---- one tensor in, its last dims in space --------------------------------------------------------------------------


@family
def _forward(call: Call, count: int, outputs: int, passes: str) -> RuleSpec:
    out = ", ".join([f"... {numbered('t', count)}"] * outputs)
    # A mean of ints is rounded: not linear.
    return f"... {numbered('s', count)} -> {out} ; full ...{passes if call.tensors[0].dtype.is_floating_point else ''}"


@family
def _backward(call: Call, count: int, size: int | None) -> RuleSpec:
    """(grad_output, self, ..., [indices]); with `size`, that argument is the shape of self instead."""
    small, large = f"... {numbered('t', count)}", f"... {numbered('s', count)}"
    inputs = [small] + ([large] if size is None else []) + [small] * (len(call.tensors) - 2)
    tail = "" if size is None else f" ; size {size}"
    return f"{', '.join(inputs)} -> {large} ; lin 0 ; full ...{tail}"


_LINEAR = " ; lin 0"
# (ops with the number of dims in space in their names, results, what passes, the argument of the backward that is a
# shape); each op has a backward.
_FAMILIES: tuple[tuple[str, int, str, int | None], ...] = (
    ("avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d", 1, _LINEAR, None),
    ("max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d", 2, "", None),
    ("reflection_pad1d reflection_pad2d reflection_pad3d", 1, " ; pass 0", None),
    ("replication_pad1d replication_pad2d replication_pad3d", 1, " ; pass 0", None),
    ("upsample_nearest1d upsample_nearest2d upsample_nearest3d", 1, _LINEAR, 2),
    ("_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d", 1, _LINEAR, 2),
    ("upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d", 1, _LINEAR, 2),
    ("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", 1, _LINEAR, 2),
)
for _names, _results, _passes, _size in _FAMILIES:
    for _name in _names.split():
        (_count,) = map(int, filter(str.isdigit, _name))
        register_rules({_forward(_count, _results, _passes): f"{_name}.default"})
        register_rules({_backward(_count, _size): f"{_name}_backward.default"})


# ---- resampling and moving between channels and space ---------------------------------------------------------------

register_rules(
    {
        "n c h! w!, n p q t! -> n c p q ; lin 0 ; full n c p q": "grid_sampler_2d.default",
        "n c d! h! w!, n o p q t! -> n c o p q ; lin 0 ; full n c o p q": "grid_sampler_3d.default",
        "... c! h! w! -> ... o! l! ; lin 0 ; full ...": "im2col.default",
        "... o! l! -> ... c! h! w! ; lin 0 ; full ...": "col2im.default",
    }
)


@rule("pixel_shuffle.default")
def _pixel_shuffle(call: Call) -> RuleSpec:
    factor, shape = call[1], call.tensors[0].shape
    sizes = {"c": shape[-3] // factor**2, "p": factor, "q": factor}
    return SizedRule("... (c p! q!) h w -> ... c (h p) (w q) ; pass 0 ; full ... c h w", sizes)


@rule("pixel_unshuffle.default")
def _pixel_unshuffle(call: Call) -> RuleSpec:
    factor, shape = call[1], call.tensors[0].shape
    sizes = {"h": shape[-2] // factor, "w": shape[-1] // factor, "p": factor, "q": factor}
    return SizedRule("... c (h p!) (w q!) -> ... (c p q) h w ; pass 0 ; full ... c h w", sizes)
