"""Rules of indexing: the dim that is looked up must be whole, the index itself may be cut."""

import torch

from phalanx.dtensor._rules.registry import Call, RuleSpec, rule
from phalanx.dtensor._rules.rule_builder import dims, tied


@rule("aten.index_select.default")
def _index_select(call: Call) -> RuleSpec:
    rank, dim = call.tensors[0].ndim, call.dim(1)
    if not rank:
        return None
    if not call.tensors[1].ndim:
        return f"{dims(rank, {dim})},  -> {dims(rank, changed={dim: '1'})} ; pass 0"
    return f"{dims(rank, {dim})}, i -> {dims(rank, changed={dim: 'i'})} ; pass 0"


@rule("aten.gather.default")
def _gather(call: Call) -> RuleSpec:
    rank, dim = call.tensors[0].ndim, call.dim(1)
    if call.tensors[1].ndim != rank or not rank:
        return None
    index = dims(rank, changed={dim: "i"})
    # In the other dims the index may be smaller than the input: then neither can be cut there (SameSize).
    return f"{dims(rank, {dim})}, {index} -> {index} ; pass 0"


def _scattered(call: Call, sources: int) -> tuple[int, str, str] | None:
    """(rank, dims of self, dims of index and source) of scatter(self, dim, index, source)."""
    rank = call.tensors[0].ndim
    if not rank or any(one.ndim != rank for one in call.tensors[: 2 + sources]):
        return None
    dim = call.dim(1)
    return rank, dims(rank, {dim}), dims(rank, changed={dim: "i"})


@rule("aten.scatter.src")
def _scatter(call: Call) -> RuleSpec:
    found = _scattered(call, 1)
    if found is None:
        return None
    rank, own, index = found
    whole = index.replace("i", "i!")
    return f"{own}, {whole}, {whole.replace('i!', 'j!')} -> {dims(rank)} ; pass 0+2"


@rule("aten.scatter.value")
def _scatter_value(call: Call) -> RuleSpec:
    found = _scattered(call, 0)
    if found is None:
        return None
    rank, own, index = found
    passes = " ; up 0" + (" ; lin 0" if call[3] == 0 else "")
    return f"{own}, {index.replace('i', 'i!')} -> {dims(rank)}{passes}"


@rule("aten.scatter_add.default")
def _scatter_add(call: Call) -> RuleSpec:
    found = _scattered(call, 1)
    if found is None:
        return None
    rank, own, index = found
    return f"{own}, {index}, {index} -> {dims(rank)} ; i:sum+0 ; lin 0+2"


@rule("aten.scatter_reduce.two")
def _scatter_reduce(call: Call) -> RuleSpec:
    found = _scattered(call, 1)
    if found is None:
        return None
    rank, own, index = found
    whole = index.replace("i", "i!")
    return f"{own}, {whole}, {whole.replace('i!', 'j!')} -> {dims(rank)}"


def _along(call: Call) -> tuple[int, int] | None:
    """(rank, dim) of index_add(self, dim, index, ...)."""
    rank = call.tensors[0].ndim
    if not rank or call.tensors[1].ndim != 1 or any(one.ndim != rank for one in call.tensors[2:]):
        return None
    return rank, call.dim(1)


@rule("aten.index_add.default")
def _index_add(call: Call) -> RuleSpec:
    found = _along(call)
    if found is None:
        return None
    rank, dim = found
    source = dims(rank, changed={dim: "i"})
    return f"{dims(rank, {dim})}, i, {source} -> {dims(rank)} ; i:sum+0 ; lin 0+2"


@rule("aten.index_copy.default")
def _index_copy(call: Call) -> RuleSpec:
    found = _along(call)
    if found is None:
        return None
    rank, dim = found
    source = dims(rank, changed={dim: "i"})
    return f"{dims(rank, {dim})}, i!, {source} -> {dims(rank)} ; pass 0+2"


@rule("aten.index_fill.int_Scalar")
def _index_fill(call: Call) -> RuleSpec:
    rank, dim = call.tensors[0].ndim, call.dim(1)
    if not rank or call.tensors[1].ndim != 1:
        return None
    passes = " ; up 0" + (" ; lin 0" if call[3] == 0 else "")
    return f"{dims(rank, {dim})}, i! -> {dims(rank)}{passes}"


@rule("aten.take.default")
def _take(call: Call) -> RuleSpec:
    return "*, ... -> ... ; pass 0"


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(call: Call) -> RuleSpec:
    rank, indices = call.tensors[0].ndim, call[1]
    used = [index for index, one in enumerate(indices) if one is not None]
    if not used or any(indices[one].dtype in (torch.bool, torch.uint8) for one in used):
        return None  # a mask: how much comes out depends on its values
    own = dims(rank, used)
    left = [f"d{index}" for index in range(rank)]
    # Indices side by side: their dims stand in their place, else in front.
    side_by_side = used == list(range(used[0], used[-1] + 1))
    at = used[0] if side_by_side else 0
    kept = [one for index, one in enumerate(left) if index not in used]
    right = [*kept[:at], "...", *kept[at:]]
    return f"{own}, {', '.join(['...'] * len(used))} -> {' '.join(right)} ; pass 0"


@rule("aten.embedding.default")
def _embedding(call: Call) -> RuleSpec:
    return "v! e, ... -> ... e ; pass 0"


@rule("aten.embedding_dense_backward.default")
def _embedding_backward(call: Call) -> RuleSpec:
    # (grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
    if call[4]:  # how often an index occurs is known only where all of them are
        batch = " ".join(f"i{index}!" for index in range(call.tensors[1].ndim))
        return f"{batch} e, {batch} -> v! e ; lin 0"
    return "... e, ... -> v! e ; ...:sum ; lin 0"


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(call: Call) -> RuleSpec:
    # (self, indices, values, accumulate)
    rank, indices, values = call.tensors[0].ndim, call[1], call[2]
    used = [index for index, one in enumerate(indices) if one is not None]
    if not used or any(indices[one].dtype in (torch.bool, torch.uint8) for one in used):
        return None
    picked = [f"i{index}!" for index in range(max(indices[one].ndim for one in used))]
    at = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    kept = [f"d{index}" for index in range(rank) if index not in used]
    names = [*kept[:at], *picked, *kept[at:]]
    if values.ndim > len(names):
        return None
    whole = ", ".join(["*"] * len(used))
    last = len(used) + 1
    passes = "lin" if call[3] else "pass"
    return f"{dims(rank, used)}, {whole}, {tied(values.shape, names)} -> {dims(rank)} ; {passes} 0+{last}"


@rule("aten.bucketize.Tensor")
def _bucketize(call: Call) -> RuleSpec:
    return "..., * -> ..."


@rule("aten.searchsorted.Tensor")
def _searchsorted(call: Call) -> RuleSpec:
    # (sorted_sequence, self, out_int32, right, side, sorter)
    sorter = call[5] is not None
    if call[0].ndim == 1:
        return f"*, ...{', *' if sorter else ''} -> ..."
    own = dims(call[0].ndim, changed={call[0].ndim - 1: "i!"})
    return f"{own}, {dims(call[1].ndim)}{f', {own}' if sorter else ''} -> {dims(call[1].ndim)}"


@rule("aten.isin.Tensor_Tensor")
def _isin(call: Call) -> RuleSpec:
    return "..., * -> ..."


@rule("aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default", "aten.new_empty.default")
def _new(call: Call) -> RuleSpec:
    # (self, size, ...): of self's own shape it is cut as self is; of another, whole.
    if list(call.tensors[0].shape) == list(call[1]):
        return "... -> ... ; drop 0 ; size 1"
    return "? -> *"
