"""Pieces from which rule functions write their texts: dims named d0, d1, ... by their place in the input."""

from collections.abc import Collection, Sequence


def dims(rank: int, whole: Collection[int] = (), changed: dict[int, str] | None = None) -> str:
    """The dims of a tensor of `rank`: those in `whole` with '!', those in `changed` as it says ("" leaves one out)."""
    words: list[str] = []
    for index in range(rank):
        word = f"d{index}" + ("!" if index in whole else "")
        words.append((changed or {}).get(index, word))
    return " ".join(filter(None, words))


def reduced(rank: int, over: Collection[int], keepdim: bool, op: str | None, outputs: int = 1) -> str:
    """The rule that reduces dims `over`: by an op that leaves Partials, or (None) with these dims whole."""
    over = [one for one in over if one < rank]  # torch counts a tensor without dims as if it had dim 0
    left = dims(rank, over if op is None else ())
    right = dims(rank, changed=dict.fromkeys(over, "1" if keepdim else ""))
    reductions = "" if op is None else "".join(f" ; d{index}:{op}" for index in sorted(over))
    return f"{left} -> {', '.join([right] * outputs)}{reductions}"


def joint(kind: str, count: int) -> str:
    """The clause that says that the first `count` inputs may be Partial together."""
    return f" ; {kind} {'+'.join(map(str, range(count)))}"


def same_dims(rank: int, whole: Collection[int], inputs: int, outputs: int = 1) -> str:
    """The rule of an op whose tensors all have the same dims, those in `whole` not to be cut."""
    return f"{', '.join([dims(rank, whole)] * inputs)} -> {', '.join([dims(rank)] * outputs)}"


def tied(sizes: Sequence[int], names: Sequence[str]) -> str:
    """Dims that broadcast against dims `names`, the last aligned: 1 where the size is 1."""
    own = names[len(names) - len(sizes) :]
    return " ".join("1" if size == 1 else name for size, name in zip(sizes, own, strict=True))
