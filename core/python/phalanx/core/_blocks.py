"""The collectives on lists of buffers, one for each rank, that lie anywhere."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from phalanx.core._call import CollectiveSpec, Operand, Ranks, operand, resolve_dtype
from phalanx.core._lib import ffi
from phalanx.core.dtypes import DType, DTypeLike
from phalanx.core.errors import InvalidArgumentError


class BlockSides(NamedTuple):
    """Both sides of a collective on blocks, checked.

    Attributes:
        source, out: For C: a pointer, or an array of phx_block.
        n: Elements of the side that is not a list.
        dtype: Their type.
        operands: What must stay alive.
    """

    source: Any
    out: Any
    n: int
    dtype: DType
    operands: tuple[Operand, ...]


def is_list(value: Any) -> bool:
    """Whether an argument is a list of buffers rather than one buffer."""
    return isinstance(value, list | tuple)


def resolve_blocks(
    spec: CollectiveSpec,
    ranks: Ranks,
    source: Any,
    out: Any,
    count: int | None,
    dtype: DTypeLike,
    root: int | None = None,
) -> BlockSides:
    """`resolve` with a list of buffers on a side that has a block for each rank. `count` must be None."""
    if count is not None:
        raise InvalidArgumentError("count goes with one buffer; the buffers of a list say how many elements they have")
    elsewhere = root is not None and root != ranks.group_rank
    sources = [] if spec.source_on_root and elsewhere else _operands(source, "source", spec.source_blocks, False, ranks)
    outs = [] if spec.out_on_root and elsewhere else _operands(out, "out", spec.out_blocks, True, ranks)
    kind = resolve_dtype(dtype, (*sources, *outs))
    sent, received = [_elements(sources, "source", kind), _elements(outs, "out", kind)]
    n = 0
    if not (spec.source_blocks and spec.out_blocks):
        n, listed, name = (sent[0], received, "out") if spec.out_blocks else (received[0], sent, "source")
        wrong = [i for i, m in enumerate(listed) if m != n and (root is not None or i == ranks.group_rank)]
        if wrong:
            raise InvalidArgumentError(
                f"{name}[{wrong[0]}] has {listed[wrong[0]]} elements, but the other side has {n}; give as many"
            )
    return BlockSides(
        _c_side(sources, sent, spec.source_blocks), _c_side(outs, received, spec.out_blocks), n, kind, (*sources, *outs)
    )


def _operands(value: Any, name: str, blocks: bool, writable: bool, ranks: Ranks) -> list[Operand]:
    if not blocks:
        return [_sized(value, name, writable)]
    if not is_list(value) or len(value) != ranks.group_size:
        what = f"a list of {len(value)}" if is_list(value) else f"{value!r:.40}"
        raise InvalidArgumentError(f"{name} is {what}; give a list of {ranks.group_size} buffers, one for each rank")
    return [_sized(item, f"{name}[{i}]", writable) for i, item in enumerate(value)]


def _sized(value: Any, name: str, writable: bool) -> Operand:
    result = operand(value, name, writable)
    if result.nbytes is None:
        raise InvalidArgumentError(f"{name} is a bare address, which has no length; give a buffer or a Memory")
    return result


def _elements(operands: Sequence[Operand], name: str, dtype: DType) -> list[int]:
    counts = []
    for i, item in enumerate(operands):
        n, rest = divmod(item.nbytes or 0, dtype.itemsize)
        if rest:
            raise InvalidArgumentError(
                f"{name}[{i}] has {item.nbytes} bytes, which is not a multiple of the element size, {dtype.itemsize}"
            )
        counts.append(n)
    return counts


def _c_side(operands: Sequence[Operand], counts: Sequence[int], blocks: bool) -> Any:
    if not blocks:
        return operands[0].pointer
    if not operands:
        return ffi.NULL  # the list of another rank
    return ffi.new("phx_block[]", [(item.pointer, n, 0, 0) for item, n in zip(operands, counts, strict=True)])
