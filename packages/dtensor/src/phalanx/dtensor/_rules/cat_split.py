"""Rules of ops that take or return lists of tensors: the texts are as long as the lists."""

from phalanx.dtensor._rules.registry import Call, RuleSpec, rule
from phalanx.dtensor._rules.rule_builder import dims, joint


@rule("aten.cat.default")
def _cat(call: Call) -> RuleSpec:
    ranks = {one.ndim for one in call.tensors if one.shape != (0,)}
    if len(ranks) > 1 or not call.tensors:
        return None
    rank = ranks.pop() if ranks else 1
    dim = call[1] % max(1, rank)
    words: list[str] = []
    for index, one in enumerate(call.tensors):
        # torch lets a tensor of shape [0] stand among others of more dims, and leaves it out.
        words.append("e!" if one.ndim != rank else dims(rank, changed={dim: f"c{index}!"}))
    passes = joint("pass", len(words)) if "e!" not in words else ""
    return f"{', '.join(words)} -> {dims(rank, changed={dim: 'o!'})}{passes}"


@rule("aten.stack.default")
def _stack(call: Call) -> RuleSpec:
    rank, count = call.tensors[0].ndim, len(call.tensors)
    words = [f"d{index}" for index in range(rank)]
    words.insert(call[1] % (rank + 1), "o!")
    return f"{', '.join([dims(rank)] * count)} -> {' '.join(words)}{joint('pass', count)}"


def _pieces(call: Call, dim: int, count: int, keepdim: bool) -> str:
    rank = call.tensors[0].ndim
    piece = dims(rank, changed={dim: "o!" if keepdim else ""})
    return f"{dims(rank, {dim})} -> {', '.join([piece] * count)} ; pass 0"


@rule("aten.split.Tensor", "aten.unsafe_split.Tensor")
def _split(call: Call) -> RuleSpec:
    dim = call.dim(2)
    size = call.tensors[0].shape[dim]
    return _pieces(call, dim, max(1, -(-size // call[1])) if call[1] else 1, True)


@rule("aten.split_with_sizes.default", "aten.unsafe_split_with_sizes.default", "aten.split_with_sizes_copy.default")
def _split_with_sizes(call: Call) -> RuleSpec:
    return _pieces(call, call.dim(2), len(call[1]), True) if call[1] else None


@rule("aten.unbind.int")
def _unbind(call: Call) -> RuleSpec:
    dim = call.dim(1)
    count = call.tensors[0].shape[dim]
    return _pieces(call, dim, count, False) if count else None


@rule("aten.chunk.default")
def _chunk(call: Call) -> RuleSpec:
    dim = call.dim(2)
    size = call.tensors[0].shape[dim]
    step = -(-size // call[1])
    return _pieces(call, dim, -(-size // step) if step else call[1], True)
