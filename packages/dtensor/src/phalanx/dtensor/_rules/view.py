"""Rules of views, of ops that move dims, cat and split. How a reshape splits and merges dims follows from the sizes."""

from collections.abc import Sequence
from itertools import takewhile, zip_longest
from math import gcd, prod

from phalanx.dtensor._rules.registry import Call, RuleSpec, SizedRule, register_rules, rule
from phalanx.dtensor._rules.rule_builder import along, dims, joint
from phalanx.dtensor._torch_compat import known_equal, known_to_divide, plain, surely_divides

_PASS = " ; pass 0"


# ---- reshape --------------------------------------------------------------------------------------------------------


class _Factors(dict[str, int]):
    """The factors of a reshape: their names, with their sizes."""

    def new(self, size: int) -> str:
        name = f"f{len(self)}"
        self[name] = size
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
    queues = (list(left), list(right))
    rest = [0, 0]
    while any(queues) or any(rest):
        for side in (0, 1):
            if not rest[side] and queues[side]:
                rest[side] = queues[side].pop(0)
        common = _common(rest[0], rest[1])
        if type(common) is int and common == 1:
            break
        name = factors.new(common)
        for side in (0, 1):
            parts[side].append(name)
            rest[side] = plain(rest[side] // common)  # type: ignore[assignment]
            if rest[side] == 1:
                words[side].append(_group(parts[side]))
                parts[side].clear()
                rest[side] = 0
        if rest[0] and rest[1]:
            break
    # The rest of both shapes has no common pieces in order: it is opaque, and never split.
    for sizes in zip_longest(*((one, *queue) if one else queue for one, queue in zip(rest, queues, strict=True))):
        for side, size in enumerate(sizes):
            if size is not None:
                words[side].append(_group([*parts[side], factors.new(size) + "!"]))
                parts[side].clear()
    return words


def reshape_rule(before: Sequence[int], after: Sequence[int]) -> tuple[str, dict[str, int]]:
    """How the dims of a reshape are tied: `(f0 f1) -> f0 f1` for [6] -> [2, 3], and the sizes of the factors."""
    factors = _Factors()
    if 0 in before:
        # Without elements dims can be tied in many ways: only equal leading ones are.
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
        lead = [factors.new(size) for size, _ in same]
        words = [lead + [factors.new(size) + "!" for size in shape[len(lead) :]] for shape in (before, after)]
        return f"{' '.join(words[0])} -> {' '.join(words[1])}", factors
    inner = _chain([one for one in before if one != 1], [one for one in after if one != 1], factors)
    texts = []
    for shape, found in zip((before, after), inner, strict=True):
        queue = list(found)
        texts.append(" ".join("1" if size == 1 else queue.pop(0) for size in shape))
    return f"{texts[0]} -> {texts[1]}", factors


@rule("view.default _unsafe_view.default reshape.default _reshape_alias.default")
def _view(call: Call) -> RuleSpec:
    tensor = call.tensors[0]
    text, sizes = reshape_rule(tensor.shape, resolved(prod(tensor.shape), call[1]))
    return SizedRule(f"{text}{_PASS} ; size 1", sizes)


@rule("view.dtype")
def _view_dtype(call: Call) -> RuleSpec:
    tensor = call.tensors[0]
    if call[1].itemsize == tensor.dtype.itemsize:
        return "... -> ..."
    return "... d! -> ... e!" if tensor.ndim else None


@rule("expand.default")
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


@rule("permute.default transpose.int t.default")
def _reordered(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    order = list(range(rank))
    if len(call.args) == 1:
        order.reverse()
    elif isinstance(call[1], list):
        order = [one % rank for one in call[1]]
    elif rank:
        first, second = call.dim(1), call.dim(2)
        order[first], order[second] = order[second], order[first]
    return f"{dims(rank)} -> {' '.join(f'd{index}' for index in order)}{_PASS}"


@rule("squeeze.default squeeze.dim squeeze.dims")
def _squeeze(call: Call) -> RuleSpec:
    shape = call.tensors[0].shape
    # A dim that is not 1 stays, on ranks where a cut makes it 1 too: it must be whole. Without dims that is any dim.
    asked = range(len(shape)) if len(call.args) == 1 else [] if call[1] == [] else call.dims(1)
    ones = {index for index in asked if index < len(shape) and shape[index] == 1}
    left = dims(len(shape), whole=set(asked) - ones, changed=dict.fromkeys(ones, "1"))
    return f"{left} -> {dims(len(shape), changed=dict.fromkeys(ones, ''))}{_PASS}"


@rule("unsqueeze.default")
def _unsqueeze(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    words = dims(rank).split()
    words.insert(call[1] % (rank + 1), "1")
    return f"{dims(rank)} -> {' '.join(words)}{_PASS}"


# ---- parts of dims --------------------------------------------------------------------------------------------------

register_rules(
    {
        along(1, "[x!] -> [] ; pass 0"): "select.int",
        along(2, "[x!], [i!] -> [x] ; pass 0+1"): "slice_scatter.default",
        along(2, "[x!], [] -> [x] ; pass 0+1"): "select_scatter.default",
        along((2, 3), "[x!] -> [] o! ; pass 0"): "diagonal.default",
        along(1, "[x!] -> [o!] w! ; pass 0", scalars=False): "unfold.default",
        # (grad_output, input_sizes, dim, ...)
        along(2, "[] -> [x!] ; lin 0 ; size 1", sizes=1): "select_backward.default",
        along(2, "[i!] -> [x!] ; lin 0 ; size 1", sizes=1): "slice_backward.default",
        along((3, 4), "[] i! -> [x!] ; lin 0 ; size 1", sizes=1): "diagonal_backward.default",
        along(2, "[o!] w! -> [x!] ; lin 0 ; size 1", sizes=1, scalars=False): "unfold_backward.default",
        # Without dims the tensor is rolled as if it were flat.
        along(2, "[x!] -> [x] ; pass 0"): "roll.default",
        along(1, "[i!] -> [o!]"): "glu.default",
        along(2, "[o!], [i!] -> [i] ; lin 0", tensor=1): "glu_backward.default",
        "... a! b! -> ... a b ; lin 0": "tril.default triu.default",
    }
)


@rule("slice.Tensor")
def _slice(call: Call) -> RuleSpec:
    size = call.tensors[0].shape[call.dim(1)]
    start, end, step = call[2] or 0, call[3], call[4]
    if step == 1 and (start == 0 or start <= -size) and (end is None or end >= size):
        return along(1, "[x] -> [x] ; pass 0")(call)
    return along(1, "[x!] -> [o!] ; pass 0")(call)


@rule("diag_embed.default")
def _diag_embed(call: Call) -> RuleSpec:
    # The last dim becomes the two dims dim1 and dim2 of the output.
    rank = call.tensors[0].ndim
    words = dims(rank - 1).split()
    for index in sorted((call[2] % (rank + 1), call[3] % (rank + 1))):
        words.insert(index, f"o{index}!")
    return f"{dims(rank, {rank - 1})} -> {' '.join(words)} ; lin 0"


@rule("flip.default")
def _flip(call: Call) -> RuleSpec:
    return along(1, "[x!] -> [x] ; pass 0")(call) if call[1] else "... -> ... ; pass 0"


@rule("rot90.default")
def _rotated(call: Call) -> RuleSpec:
    rank = call.tensors[0].ndim
    first, second = (one % rank for one in call[2])
    words = dims(rank).split()
    if call[1] % 2:
        words[first], words[second] = words[second], words[first]
    return f"{dims(rank, {first, second})} -> {' '.join(words)}{_PASS}"


@rule("repeat.default")
def _repeat(call: Call) -> RuleSpec:
    rank, repeats = call.tensors[0].ndim, call[1]
    new = len(repeats) - rank
    repeated = {index for index in range(rank) if repeats[new + index] != 1}
    right = [f"r{index}!" if one != 1 else "1" for index, one in enumerate(repeats[:new])]
    right.append(dims(rank, changed={index: f"o{index}!" for index in repeated}))
    return f"{dims(rank, repeated)} -> {' '.join(right)}{_PASS}"


@rule("constant_pad_nd.default")
def _pad(call: Call) -> RuleSpec:
    rank, pad = call.tensors[0].ndim, call[1]
    padded = {rank - 1 - index // 2 for index, one in enumerate(pad) if one != 0}
    right = dims(rank, changed={index: f"o{index}!" for index in padded})
    # Padded with anything but zero, each term of a sum would add it.
    return f"{dims(rank, padded)} -> {right} ; {'lin' if call[2] == 0 else 'up'} 0"


# ---- lists of tensors: the texts are as long as the lists ------------------------------------------------------------


@rule("cat.default")
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


@rule("stack.default")
def _stack(call: Call) -> RuleSpec:
    rank, count = call.tensors[0].ndim, len(call.tensors)
    words = dims(rank).split()
    words.insert(call[1] % (rank + 1), "o!")
    return f"{', '.join([dims(rank)] * count)} -> {' '.join(words)}{joint('pass', count)}"


def _pieces(call: Call, dim: int, count: int, keepdim: bool) -> str:
    rank = call.tensors[0].ndim
    piece = dims(rank, changed={dim: "o!" if keepdim else ""})
    return f"{dims(rank, {dim})} -> {', '.join([piece] * count)} ; pass 0"


@rule("split.Tensor unsafe_split.Tensor")
def _split(call: Call) -> RuleSpec:
    dim = call.dim(2)
    size = call.tensors[0].shape[dim]
    return _pieces(call, dim, max(1, -(-size // call[1])) if call[1] else 1, True)


@rule("split_with_sizes.default unsafe_split_with_sizes.default split_with_sizes_copy.default")
def _split_with_sizes(call: Call) -> RuleSpec:
    return _pieces(call, call.dim(2), len(call[1]), True) if call[1] else None


@rule("unbind.int")
def _unbind(call: Call) -> RuleSpec:
    dim = call.dim(1)
    count = call.tensors[0].shape[dim]
    return _pieces(call, dim, count, False) if count else None


@rule("chunk.default")
def _chunk(call: Call) -> RuleSpec:
    dim = call.dim(2)
    size = call.tensors[0].shape[dim]
    step = -(-size // call[1])
    return _pieces(call, dim, -(-size // step) if step else call[1], True)
