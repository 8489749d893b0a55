"""Rules of softmax, norms and losses. Means in losses and in their gradients are sums scaled by each rank's share."""

from collections.abc import Sequence

from phalanx.dtensor._rules.registry import ArgMeta, Call, RuleSpec, family, register_rules, rule
from phalanx.dtensor._rules.rule_builder import along, numbered, tied

_MEAN, _SUM = 1, 2  # torch's codes of the reduction of a loss; 0 is none


register_rules(
    {
        along(1, "[x!] -> [x]"): "_safe_softmax.default _softmax.default _log_softmax.default",
        # (grad_output, output, dim, input_dtype)
        along(2, "[x!], [x!] -> [x] ; lin 0"): "_softmax_backward_data.default _log_softmax_backward_data.default",
    }
)


# ---- norms ----------------------------------------------------------------------------------------------------------


@family
def _norm(call: Call, statistics: int) -> RuleSpec:
    """(input, normalized_shape, [weight], [bias], eps) -> (output, the statistics) of a norm over the last dims."""
    inner, ones = numbered("n", len(call[1])), " ".join(["1"] * len(call[1]))
    inputs = ", ".join([f"... {inner}"] + [inner] * (len(call.tensors) - 1))
    return f"{inputs} -> ... {inner}{f', ... {ones}' * statistics}"


@family
def _norm_backward(call: Call, statistics: int, mask: int) -> RuleSpec:
    """(grad_out, input, normalized_shape, the statistics, [weight], [bias], output_mask)."""
    inner, ones = numbered("n", len(call[2])), " ".join(["1"] * len(call[2]))
    weights = [inner] * (len(call.tensors) - 2 - statistics)
    inputs = ", ".join([f"... {inner}"] * 2 + [f"... {ones}"] * statistics + weights)
    outputs = [f"... {inner}", inner, inner]
    return f"{inputs} -> {_masked(outputs[: len(call[mask])], call[mask], '...:sum')} ; lin 0"


register_rules(
    {
        _norm(2): "native_layer_norm.default",
        _norm_backward(2, 7): "native_layer_norm_backward.default",
        _norm(1): "_fused_rms_norm.default",
        _norm_backward(1, 5): "_fused_rms_norm_backward.default",
    }
)


def _masked(outputs: Sequence[str], mask: Sequence[bool], reduction: str) -> str:
    """The outputs that a mask keeps, with the reduction for all but the first."""
    kept = [one for one, wanted in zip(outputs, mask, strict=True) if wanted]
    return ", ".join(kept) + (f" ; {reduction}" if any(mask[1:]) else "")


@rule("native_group_norm.default")
def _group_norm(call: Call) -> RuleSpec:
    # (input, weight, bias, N, C, HxW, group, eps)
    inner = numbered("s", call.tensors[0].ndim - 2)
    weights = ["c"] * (len(call.tensors) - 1)
    return f"{', '.join([f'n c! {inner}', *weights])} -> n c {inner}, n g!, n g ; count 3=n"


@rule("native_group_norm_backward.default")
def _group_norm_backward(call: Call) -> RuleSpec:
    # (grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask)
    inner = numbered("s", call.tensors[0].ndim - 2)
    weights = ["c!"] * (len(call.tensors) - 4)
    inputs = ", ".join([f"n c! {inner}"] * 2 + ["n g!"] * 2 + weights)
    return f"{inputs} -> {_masked((f'n c {inner}', 'c', 'c'), call[9], 'n:sum')} ; count 5=n ; lin 0 ; full n"


@rule("native_batch_norm.default")
def _batch_norm(call: Call) -> RuleSpec:
    # (input, weight, bias, running_mean, running_var, training, momentum, eps); in training it writes the running ones.
    batch, mark = ("n!", "!") if call[5] else ("n", "")
    inner = numbered("s", call.tensors[0].ndim - 2, mark)
    inputs = ", ".join([f"{batch} c {inner}"] + ["c"] * (len(call.tensors) - 1))
    return f"{inputs} -> n c {inner}, {'c, c ; full c' if call[5] else 'e!, f!'}"


# ---- elementwise losses ---------------------------------------------------------------------------------------------


@family
def _loss(call: Call, reduction: int) -> RuleSpec:
    """(self, target, [weight], reduction at argument `reduction`)."""
    inputs = ", ".join(["..."] * len(call.tensors))
    if call[reduction] == _MEAN:
        return f"{inputs} -> ; ...:mean"
    return f"{inputs} -> ; ...:sum" if call[reduction] == _SUM else f"{inputs} -> ..."


@family
def _loss_backward(call: Call, reduction: int) -> RuleSpec:
    """(grad_output, self, target, [weight], reduction at argument `reduction`)."""
    # A mean's gradient divides by the elements that it sees: a rank sees its share of them.
    scale = " ; scale ..." if call[reduction] == _MEAN else ""
    return f"{', '.join(['...'] * len(call.tensors))} -> ... ; lin 0{scale}"


register_rules(
    {
        _loss(2): "mse_loss.default smooth_l1_loss.default huber_loss.default soft_margin_loss.default",
        _loss_backward(3): "mse_loss_backward.default smooth_l1_loss_backward.default huber_loss_backward.default "
        "soft_margin_loss_backward.default",
        _loss(3): "binary_cross_entropy.default",
        _loss_backward(4): "binary_cross_entropy_backward.default",
        _loss(4): "binary_cross_entropy_with_logits.default",
    }
)


# ---- losses over classes --------------------------------------------------------------------------------------------


def _class_dims(scores: ArgMeta) -> tuple[str, str]:
    """(dims of the scores, dims of the target)."""
    space = numbered("s", scores.ndim - 2, "")
    return f"n c! {space}", f"n {space}"


@rule("nll_loss_forward.default nll_loss2d_forward.default")
def _nll_loss(call: Call) -> RuleSpec:
    # (self, target, weight, reduction, ignore_index) -> (output, total_weight)
    if call[0].ndim < 2:
        return None
    scores, target = _class_dims(call[0])
    weight = ", c!" if call[2] is not None else ""
    factors = target.split()
    if call[3] == _MEAN:
        # The mean is weighted by what the targets pick: shares are known only when the weights are summed.
        whole = " ".join(f"{one}!" for one in factors)
        return f"{scores}, {whole}{weight} -> , "
    sums = "".join(f" ; {one}:sum" for one in factors)
    output = "" if call[3] == _SUM else target
    return f"{scores}, {target}{weight} -> {output}, {sums}"


@rule("nll_loss_backward.default nll_loss2d_backward.default")
def _nll_loss_backward(call: Call) -> RuleSpec:
    # (grad_output, self, target, weight, reduction, ignore_index, total_weight): the total is that of all ranks.
    if call[1].ndim < 2:
        return None
    scores, target = _class_dims(call[1])
    weight = ", c!" if call[3] is not None else ""
    gradient = target if call[0].ndim else ""
    return f"{gradient}, {scores}, {target}{weight},  -> {scores} ; lin 0"


@rule("multi_margin_loss.default")
def _multi_margin(call: Call) -> RuleSpec:
    # (self, target, p, margin, weight, reduction)
    if call[0].ndim != 2:
        return None
    weight = ", c!" if call[4] is not None else ""
    tail = {_MEAN: " ; n:mean", _SUM: " ; n:sum"}.get(call[5])
    return f"n c!, n{weight} -> {'' if tail else 'n'}{tail or ''}"


# ---- attention ------------------------------------------------------------------------------------------------------


def _attention_mask(mask: ArgMeta | None, queries: str) -> str:
    return "" if mask is None else f", {tied(mask.shape, ('b', 'h', queries, 't!'))}"


@rule("_scaled_dot_product_flash_attention_for_cpu.default")
def _attention(call: Call) -> RuleSpec:
    # (query, key, value, dropout_p, is_causal, attn_mask, scale) -> (output, logsumexp)
    if call[3] != 0:
        return None
    # A causal mask counts queries from the first: they may be cut without one only.
    queries = "s!" if call[4] else "s"
    inputs = f"b h {queries} e!, b h t! e!, b h t! v!{_attention_mask(call[5], queries)}"
    return f"{inputs} -> b h s v, b h s ; full b h s"


@rule("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def _attention_backward(call: Call) -> RuleSpec:
    # (grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale)
    if call[6] != 0:
        return None
    queries = "s!" if call[7] else "s"
    out = f"b h {queries} v!"
    inputs = f"{out}, b h {queries} e!, b h t! e!, b h t! v!, {out}, b h {queries}{_attention_mask(call[8], queries)}"
    summed = "" if call[7] else " ; s:sum"
    return f"{inputs} -> b h s e, b h t e, b h t v{summed} ; full b h s"
