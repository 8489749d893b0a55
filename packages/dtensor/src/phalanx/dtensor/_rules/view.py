"""Rules of views and of ops that move dims. How a reshape splits and merges dims follows from the sizes."""

from collections.abc import Sequence
from math import gcd, prod

from phalanx.dtensor._rules.registry import Call, RuleSpec, rule
from phalanx.dtensor._rules.rule_builder import dims, same_dims
from phalanx.dtensor._torch_compat import known_equal, known_to_divide, plain, surely_divides

_PASS = " ; pass 0"


# ---- reshape --------------------------------------------------------------------------------------------------------


class _Factors:
    """Names for the factors of a reshape, with their sizes."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def new(self, size: int) -> str:
        name = f"f{len(self.sizes)}"
        self.sizes[name] = size
        return name


def resolved(numel: int, shape: Sequence[int]) -> list[int]:
    """The shape with its -1 worked out."""
    known = prod(one for one in shape if one != -1)
    return [(numel // known if known else 0) if one == -1 else one for one in shape]


def _common(first: int, second: int) -> int:
    """The common factor of two sizes; for a SymInt, as far as its symbols or a guard show it."""
    if type(first) is int and type(second) is int:
        return gcd(first, second)
    if known_equal(first, second) or known_to_divide(first, second):
        return second
    if known_to_divide(second, first) or (type(first) is int and surely_divides(second, first)):
        return first
    return second if type(second) is int and surely_divides(first, second) else 1


def _group(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


def _chain(left: list[int], right: list[int], factors: _Factors) -> tuple[list[str], list[str]]:
    """Dims of two shapes of the same numel, none of size 1: factors from the outermost on, as far as they agree."""
    words: tuple[list[str], list[str]] = ([], [])
    parts: tuple[list[str], list[str]] = ([], [])
    rest = [0, 0]
    queues = (list(left), list(right))
    agree = True
    while any(queues) or any(rest):
        for side in (0, 1):
            if not rest[side] and queues[side]:
                rest[side] = queues[side].pop(0)
        if not agree:
            # The rest of both shapes has no common pieces in order: it is opaque, and never split.
            for side in (0, 1):
                if rest[side]:
                    words[side].append(_group([*parts[side], factors.new(rest[side]) + "!"]))
                    parts[side].clear()
                    rest[side] = 0
            continue
        common = _common(rest[0], rest[1])
        if type(common) is int and common == 1:
            agree = False
            continue
        name = factors.new(common)
        for side in (0, 1):
            parts[side].append(name)
            rest[side] = plain(rest[side] // common)  # type: ignore[assignment]
            if rest[side] == 1:
                words[side].append(_group(parts[side]))
                parts[side].clear()
                rest[side] = 0
        if rest[0] and rest[1]:
            agree = False
    return words


def reshape_rule(before: Sequence[int], after: Sequence[int]) -> tuple[str, dict[str, int]]:
    """How the dims of a reshape are tied: `(f0 f1) -> f0 f1` for [6] -> [2, 3].

    Args:
        before: The shape that goes in.
        after: The shape that comes out, of as many elements.

    Returns:
        The rule without clauses, and the sizes of its factors.
    """
    factors = _Factors()
    if 0 in before:
        # Without elements dims can be tied in many ways: only equal leading ones are.
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        lead = [factors.new(size) for size in before[:same]]
        words = [lead + [factors.new(size) + "!" for size in shape[same:]] for shape in (before, after)]
        return f"{' '.join(words[0])} -> {' '.join(words[1])}", factors.sizes
    inner = _chain([one for one in before if one != 1], [one for one in after if one != 1], factors)
    texts = []
    for shape, found in zip((before, after), inner, strict=True):
        queue = list(found)
        texts.append(" ".join("1" if size == 1 else queue.pop(0) for size in shape))
    return f"{texts[0]} -> {texts[1]}", factors.sizes


@rule("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default")
def _view(call: Call) -> RuleSpec:
    tensor = call.tensors[0]
    text, sizes = reshape_rule(tensor.shape, resolved(prod(tensor.shape), call[1]))
    return f"{text}{_PASS} ; size 1", sizes


@rule("aten.view.dtype")
def _view_dtype(call: Call) -> RuleSpec:
    tensor = call.tensors[0]
    if call[1].itemsize == tensor.dtype.itemsize:
        return "... -> ..."
    return "... d! -> ... e!" if tensor.ndim else None


@rule("aten.expand.default")
def _expand(call: Call) -> RuleSpec:
    sizes, shape = call[1], call.tensors[0].shape
    new = len(sizes) - len(shape)
    left = ["1" if size == 1 else f"d{index}" for index, size in enumerate(shape)]
    right = [f"e{index}!" for index in range(new)]
    for index, size in enumerate(shape):
        grown = size == 1 and sizes[new + index] not in (1, -1)
        right.append(f"g{index}!" if grown else left[index])
    return f"{' '.join(left)} -> {' '.join(right)}{_PASS} ; size 1"


# ---- dims in another order, dims of size 1 --------------------------------------------------------------------------


def _ordered(rank: int, order: Sequence[int]) -> str:
    return f"{dims(rank)} -> {' '.join(f'd{index}' for index in order)}{_PASS}"


@rule("aten.permute.default")
def _permute(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    return _ordered(rank, [one % rank for one in call[1]])


@rule("aten.transpose.int")
def _transpose(call: Call) -> RuleSpec:
    order = list(range(call.tensors[0].ndim))
    if order:
        first, second = call.dim(1), call.dim(2)
        order[first], order[second] = order[second], order[first]
    return _ordered(len(order), order)


@rule("aten.t.default")
def _t(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    return _ordered(rank, list(range(rank))[::-1])


@rule("aten.squeeze.default")
def _squeeze(call: Call) -> RuleSpec:
    # Without dims the op looks at local sizes, which a cut may make 1: every dim that is not 1 would have to stay so.
    shape = call.tensors[0].shape
    ones = {index for index, size in enumerate(shape) if size == 1}
    left = dims(len(shape), whole=range(len(shape)), changed=dict.fromkeys(ones, "1"))
    return f"{left} -> {dims(len(shape), changed=dict.fromkeys(ones, ''))}{_PASS}"


@rule("aten.squeeze.dim", "aten.squeeze.dims")
def _squeeze_dims(call: Call) -> RuleSpec:
    shape = call.tensors[0].shape
    if call[1] == []:
        return f"{dims(len(shape))} -> {dims(len(shape))}{_PASS}"
    asked = call.dims(1)
    # A dim that is not 1 stays, on ranks where a cut makes it 1 too: it must be whole.
    ones = {index for index in asked if index < len(shape) and shape[index] == 1}
    left = dims(len(shape), whole=set(asked) - ones, changed=dict.fromkeys(ones, "1"))
    return f"{left} -> {dims(len(shape), changed=dict.fromkeys(ones, ''))}{_PASS}"


@rule("aten.unsqueeze.default")
def _unsqueeze(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    words = [f"d{index}" for index in range(rank)]
    words.insert(call[1] % (rank + 1), "1")
    return f"{dims(rank)} -> {' '.join(words)}{_PASS}"


# ---- parts of dims --------------------------------------------------------------------------------------------------


@rule("aten.slice.Tensor")
def _slice(call: Call) -> RuleSpec:
    rank, dim = call.tensors[0].ndim, call.dim(1)
    size = call.tensors[0].shape[dim]
    start, end, step = call[2] or 0, call[3], call[4]
    if step == 1 and (start == 0 or start <= -size) and (end is None or end >= size):
        return f"{dims(rank)} -> {dims(rank)}{_PASS}"
    return f"{dims(rank, {dim})} -> {dims(rank, changed={dim: 'o!'})}{_PASS}"


@rule("aten.select.int")
def _select(call: Call) -> RuleSpec:
    rank, dim = call.tensors[0].ndim, call.dim(1)
    return f"{dims(rank, {dim})} -> {dims(rank, changed={dim: ''})}{_PASS}"


@rule("aten.select_backward.default")
def _select_backward(call: Call) -> RuleSpec:
    # (grad_output, input_sizes, dim, index)
    rank = len(call[1])
    dim = call[2] % rank
    return f"{dims(rank, changed={dim: ''})} -> {dims(rank, {dim})} ; lin 0 ; size 1"


@rule("aten.slice_backward.default")
def _slice_backward(call: Call) -> RuleSpec:
    # (grad_output, input_sizes, dim, start, end, step)
    rank = len(call[1])
    dim = call[2] % rank
    return f"{dims(rank, changed={dim: 'i!'})} -> {dims(rank, {dim})} ; lin 0 ; size 1"


@rule("aten.diagonal_backward.default")
def _diagonal_backward(call: Call) -> RuleSpec:
    # (grad_output, input_sizes, offset, dim1, dim2)
    rank = len(call[1])
    pair = {call[3] % rank, call[4] % rank}
    left = f"{dims(rank, changed=dict.fromkeys(pair, ''))} i!"
    return f"{left} -> {dims(rank, pair)} ; lin 0 ; size 1"


@rule("aten.slice_scatter.default")
def _slice_scatter(call: Call) -> RuleSpec:
    rank, dim = call.tensors[0].ndim, call.dim(2)
    return f"{dims(rank, {dim})}, {dims(rank, changed={dim: 'i!'})} -> {dims(rank)} ; pass 0+1"


@rule("aten.select_scatter.default")
def _select_scatter(call: Call) -> RuleSpec:
    rank, dim = call.tensors[0].ndim, call.dim(2)
    return f"{dims(rank, {dim})}, {dims(rank, changed={dim: ''})} -> {dims(rank)} ; pass 0+1"


@rule("aten.diagonal.default")
def _diagonal(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    pair = {call.dim(2), call.dim(3)}
    return f"{dims(rank, pair)} -> {dims(rank, changed=dict.fromkeys(pair, ''))} o!{_PASS}"


@rule("aten.diag_embed.default")
def _diag_embed(call: Call) -> RuleSpec:
    # The last dim becomes the two dims dim1 and dim2 of the output.
    rank = call.tensors[0].ndim
    pair = sorted((call[2] % (rank + 1), call[3] % (rank + 1)))
    words = [f"d{index}" for index in range(rank - 1)]
    for index in pair:
        words.insert(index, f"o{index}!")
    return f"{dims(rank, {rank - 1})} -> {' '.join(words)} ; lin 0"


@rule("aten.unfold.default")
def _unfold(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    if not rank:
        return None
    dim = call.dim(1)
    return f"{dims(rank, {dim})} -> {dims(rank, changed={dim: 'o!'})} w!{_PASS}"


@rule("aten.unfold_backward.default")
def _unfold_backward(call: Call) -> RuleSpec:
    # (grad_in, input_sizes, dim, size, step)
    rank = len(call[1])
    if not rank:
        return None
    dim = call[2] % rank
    return f"{dims(rank, changed={dim: 'o!'})} w! -> {dims(rank, {dim})} ; lin 0 ; size 1"


@rule("aten.roll.default")
def _roll(call: Call) -> RuleSpec:
    # Without dims the tensor is rolled as if it were flat.
    return same_dims(call.tensors[0].ndim, call.dims(2), 1) + _PASS


@rule("aten.flip.default")
def _flip(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    return same_dims(rank, {one % max(1, rank) for one in call[1]}, 1) + _PASS


@rule("aten.rot90.default")
def _rotated(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    first, second = (one % rank for one in call[2])
    if call[1] % 2 == 0:
        return same_dims(rank, {first, second}, 1) + _PASS
    words = [f"d{index}" for index in range(rank)]
    words[first], words[second] = words[second], words[first]
    return f"{dims(rank, {first, second})} -> {' '.join(words)}{_PASS}"


@rule("aten.repeat.default")
def _repeat(call: Call) -> RuleSpec:
    rank, repeats = call.tensors[0].ndim, call[1]
    new = len(repeats) - rank
    repeated = {index for index in range(rank) if repeats[new + index] != 1}
    right = [f"r{index}!" if one != 1 else "1" for index, one in enumerate(repeats[:new])]
    right.append(dims(rank, changed={index: f"o{index}!" for index in repeated}))
    return f"{dims(rank, repeated)} -> {' '.join(right)}{_PASS}"


@rule("aten.tril.default", "aten.triu.default")
def _triangle(call: Call) -> RuleSpec:
    return "... a! b! -> ... a b ; lin 0"


@rule("aten.constant_pad_nd.default")
def _pad(call: Call) -> RuleSpec:
    rank, pad = call.tensors[0].ndim, call[1]
    padded = {rank - 1 - index // 2 for index, one in enumerate(pad) if one != 0}
    right = dims(rank, changed={index: f"o{index}!" for index in padded})
    # Padded with anything but zero, each term of a sum would add it.
    return f"{dims(rank, padded)} -> {right} ; {'lin' if call[2] == 0 else 'up'} 0"
