"""Rules of indexing: the dim that is looked up must be whole, the index itself may be cut."""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor._rules.registry import Call, RuleFunction, RuleSpec, family, register_rules, rule
from phalanx.dtensor._rules.rule_builder import along, dims, numbered, tied


@family
def _filling(call: Call, write: RuleFunction) -> RuleSpec:
    """(self, dim, index, value): zeros may be filled into every term of a sum; other values may not."""
    text = write(call)
    return text and f"{text} ; up 0{' ; lin 0' if call[3] == 0 else ''}"


register_rules(
    {
        # In the other dims the index may be smaller than the input: then neither can be cut there (SameSize).
        along(1, "[x!], [i] -> [i] ; pass 0", scalars=False): "gather.default",
        along(1, "[x!], [i!], [j!] -> [x] ; pass 0+2", scalars=False): "scatter.src",
        _filling(along(1, "[x!], [i!] -> [x]", scalars=False)): "scatter.value",
        along(1, "[x!], [i], [i] -> [x] ; i:sum+0 ; lin 0+2", scalars=False): "scatter_add.default",
        along(1, "[x!], [i!], [j!] -> [x]", scalars=False): "scatter_reduce.two",
        along(1, "[x!], i, [i] -> [x] ; i:sum+0 ; lin 0+2", scalars=False): "index_add.default",
        along(1, "[x!], i!, [i] -> [x] ; pass 0+2", scalars=False): "index_copy.default",
        _filling(along(1, "[x!], i! -> [x]", scalars=False)): "index_fill.int_Scalar",
        "*, ... -> ... ; pass 0": "take.default",
        "v! e, ... -> ... e ; pass 0": "embedding.default",
        "..., * -> ...": "bucketize.Tensor isin.Tensor_Tensor",
    }
)


@rule("index_select.default")
def _index_select(call: Call) -> RuleSpec:
    text = "[x!], i -> [i] ; pass 0" if call.tensors[1].ndim else "[x!],  -> [1] ; pass 0"
    return along(1, text, scalars=False)(call)


def _picked(indices: Sequence[Any], rank: int) -> tuple[list[int], list[str], list[str]] | None:
    """(the dims that indices look up, the dims of the result before those of the indices, and those after them).

    Indices of dims side by side stand in their place, others in front. None: there is none, or a mask, of which the
    values decide how much comes out.
    """
    used = [index for index, one in enumerate(indices) if one is not None]
    if not used or any(indices[one].dtype in (torch.bool, torch.uint8) for one in used):
        return None
    kept = [f"d{index}" for index in range(rank) if index not in used]
    at = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    return used, kept[:at], kept[at:]


@rule("index.Tensor _unsafe_index.Tensor")
def _index(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    found = _picked(call[1], rank)
    if found is None:
        return None
    used, before, after = found
    right = " ".join([*before, "...", *after])
    return f"{dims(rank, used)}, {', '.join(['...'] * len(used))} -> {right} ; pass 0"


@rule("index_put.default _unsafe_index_put.default")
def _index_put(call: Call) -> RuleSpec:
    # (self, indices, values, accumulate)
    rank, values = call.tensors[0].ndim, call[2]
    found = _picked(call[1], rank)
    if found is None:
        return None
    used, before, after = found
    names = [*before, *numbered("i", max(call[1][one].ndim for one in used)).split(), *after]
    if values.ndim > len(names):
        return None
    whole = ", ".join(["*"] * len(used))
    passes = "lin" if call[3] else "pass"
    return f"{dims(rank, used)}, {whole}, {tied(values.shape, names)} -> {dims(rank)} ; {passes} 0+{len(used) + 1}"


@rule("embedding_dense_backward.default")
def _embedding_backward(call: Call) -> RuleSpec:
    # (grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
    if call[4]:  # how often an index occurs is known only where all of them are
        batch = numbered("i", call.tensors[1].ndim)
        return f"{batch} e, {batch} -> v! e ; lin 0"
    return "... e, ... -> v! e ; ...:sum ; lin 0"


@rule("searchsorted.Tensor")
def _searchsorted(call: Call) -> RuleSpec:
    # (sorted_sequence, self, out_int32, right, side, sorter)
    own, values = "*", "..."
    if call[0].ndim != 1:
        own, values = dims(call[0].ndim, changed={call[0].ndim - 1: "i!"}), dims(call[1].ndim)
    return f"{own}, {values}{f', {own}' if call[5] is not None else ''} -> {values}"


@rule("new_zeros.default new_ones.default new_full.default new_empty.default")
def _new(call: Call) -> RuleSpec:
    # (self, size, ...): of self's own shape it is cut as self is; of another, whole.
    if list(call.tensors[0].shape) == list(call[1]):
        return "... -> ... ; drop 0 ; size 1"
    return "? -> *"
