"""Pieces from which rule functions write their texts: dims named d0, d1, ... by their place in the input."""

import re
from collections.abc import Collection, Sequence

from phalanx.dtensor._rules.registry import Call, RuleSpec, family

_BRACKETS = re.compile(r"\[(.*?)(!?)\]")


def dims(rank: int, whole: Collection[int] = (), changed: dict[int, str] | None = None) -> str:
    """The dims of a tensor of `rank`: those in `whole` with '!', those in `changed` as it says ("" leaves one out)."""
    words: list[str] = []
    for index in range(rank):
        word = f"d{index}" + ("!" if index in whole else "")
        words.append((changed or {}).get(index, word))
    return " ".join(filter(None, words))


@family
def along(
    call: Call,
    arguments: int | tuple[int, ...],
    text: str,
    *,
    tensor: int = 0,
    sizes: int | None = None,
    scalars: bool = True,
) -> RuleSpec:
    """The rule of an op that treats some dims in another way than the rest: `[x!], i -> [i] ; pass 0`.

    `[x!]` stands for all dims of a tensor, with x! for those that the arguments name (one dim, or a list of dims: x0!,
    x1!, ...; None or an empty list is all); `[]` leaves these out. A call whose tensors have other ranks has no rule.
    They are dims of tensor `tensor`, or of one whose shape is argument `sizes`; without `scalars` it must have dims.
    """
    every = (arguments,) if isinstance(arguments, int) else arguments
    rank = call.tensors[tensor].ndim if sizes is None else len(call[sizes])
    if not rank and not scalars:
        return None
    is_one = len(every) == 1 and isinstance(call[every[0]], int)
    chosen = {dim for argument in every for dim in call.dims(argument, rank)}

    def written(match: re.Match[str]) -> str:
        name, mark = match.groups()
        numbered = name.isalpha() and not is_one
        return dims(rank, changed={dim: f"{name}{dim if numbered else ''}{mark}" for dim in chosen})

    rule = _BRACKETS.sub(written, text)
    inputs = rule.partition("->")[0].split(",")
    fits = all(len(one.split()) == meta.ndim for one, meta in zip(inputs, call.tensors, strict=True))
    return rule if fits else None


def joint(kind: str, count: int) -> str:
    """The clause that says that the first `count` inputs may be Partial together."""
    return f" ; {kind} {'+'.join(map(str, range(count)))}"


def tied(sizes: Sequence[int], names: Sequence[str]) -> str:
    """Dims that broadcast against dims `names`, the last aligned: 1 where the size is 1."""
    own = names[len(names) - len(sizes) :]
    return " ".join("1" if size == 1 else name for size, name in zip(sizes, own, strict=True))


def numbered(letter: str, count: int, mark: str = "!") -> str:
    """So many dims of one letter: `s0! s1!`."""
    return " ".join(f"{letter}{index}{mark}" for index in range(count))
