"""What the collectives take and give, and the checks that need no communication."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from phalanx.core._handle import UINT64_MAX, c_integer
from phalanx.core._lib import ffi, lib
from phalanx.core._operand import ABSENT, Operand, operand, resolve_count, resolve_dtype
from phalanx.core.dtypes import DType
from phalanx.core.errors import InvalidArgumentError


class Form(NamedTuple):
    """The form of a collective.

    Attributes:
        name: Of the collective.
        kind: Its PHX_CALL_* number.
        source_blocks: Whether the source has a block of `count` elements for each rank; else it has one.
        out_blocks: Likewise for the output.
        source_on_root: Whether only the root has a source.
        out_on_root: Whether only the root has an output.
    """

    name: str
    kind: int
    source_blocks: bool = False
    out_blocks: bool = False
    source_on_root: bool = False
    out_on_root: bool = False


ALL_REDUCE = Form("all_reduce", lib.PHX_CALL_ALL_REDUCE)
ALL_GATHER = Form("all_gather", lib.PHX_CALL_ALL_GATHER, out_blocks=True)
REDUCE_SCATTER = Form("reduce_scatter", lib.PHX_CALL_REDUCE_SCATTER, source_blocks=True)
ALL_TO_ALL = Form("all_to_all", lib.PHX_CALL_ALL_TO_ALL, source_blocks=True, out_blocks=True)
BROADCAST = Form("broadcast", lib.PHX_CALL_BROADCAST)
REDUCE = Form("reduce", lib.PHX_CALL_REDUCE, out_on_root=True)
GATHER = Form("gather", lib.PHX_CALL_GATHER, out_blocks=True, out_on_root=True)
SCATTER = Form("scatter", lib.PHX_CALL_SCATTER, source_blocks=True, source_on_root=True)


class Ranks(Protocol):
    """Of a Group or a Symm."""

    group_rank: int
    group_size: int


class Sides(NamedTuple):
    """Both sides of a collective, checked."""

    source: Operand
    out: Operand
    n: int  # elements of one block
    dtype: DType


def resolve(
    form: Form,
    ranks: Ranks,
    source: Any,
    out: Any,
    count: int | None,
    dtype: DType | int | str | None,
    root: int | None = None,
) -> Sides:
    """Check both sides of a collective, and work out what was left out.

    Args:
        form: Which collective.
        ranks: The group.
        source, out: Addresses, Memory or buffers. What only the root has is not looked at on other ranks.
        count: Elements of one block, or None.
        dtype: Their type, or None.
        root: Group rank of the root, if there is one.

    Raises:
        InvalidArgumentError: Something is wrong or missing.
    """
    elsewhere = root is not None and root != ranks.group_rank
    given = taken = ABSENT
    sides = []
    if not (form.source_on_root and elsewhere):
        if source is None:
            raise _missing("source", root if form.source_on_root else None, "whose blocks are scattered")
        given = operand(source, "source", False)
        sides.append(("source", given, ranks.group_size if form.source_blocks else 1))
    if not (form.out_on_root and elsewhere):
        if out is None:
            raise _missing("out", root if form.out_on_root else None, "which takes the result")
        taken = operand(out, "out", True)
        sides.append(("out", taken, ranks.group_size if form.out_blocks else 1))
    if form.source_on_root:
        sides.reverse()  # the side that all ranks have says the count
    kind = resolve_dtype(dtype, (given, taken))
    return Sides(given, taken, resolve_count(count, kind.itemsize, sides), kind)


def resolve_out(
    form: Form,
    ranks: Ranks,
    out: Any,
    count: int | None,
    dtype: DType | int | str | None,
    root: int | None = None,
) -> Sides:
    """`resolve` where the input is in symmetric memory.

    Raises:
        InvalidArgumentError: Something is wrong or missing.
    """
    taken, sides = ABSENT, []
    if not form.out_on_root or root == ranks.group_rank:
        if out is None:
            raise _missing("out", root if form.out_on_root else None, "which takes the result")
        taken = operand(out, "out", True)
        sides.append(("out", taken, ranks.group_size if form.out_blocks else 1))
    kind = resolve_dtype(dtype, (taken,))
    return Sides(ABSENT, taken, resolve_count(count, kind.itemsize, sides), kind)


def resolve_buffer(
    ranks: Ranks, buffer: Any, count: int | None, dtype: DType | int | str | None, root: int
) -> tuple[Operand, int, DType]:
    """Check the buffer of a broadcast: operand, count and dtype.

    Raises:
        InvalidArgumentError: Something is wrong or missing.
    """
    given = operand(buffer, "buffer", writable=root != ranks.group_rank)
    kind = resolve_dtype(dtype, (given,))
    return given, resolve_count(count, kind.itemsize, (("buffer", given, 1),)), kind


def c_root(root_group_rank: int, ranks: Ranks) -> int:
    """Check the root of a collective."""
    return c_integer(root_group_rank, "root_group_rank", 0, ranks.group_size - 1)


def c_counts(counts: Sequence[int], name: str, ranks: Ranks, dtype: DType, *sides: tuple[str, Operand, int]) -> Any:
    """A list of counts for C.

    Args:
        counts: Elements, one entry for each group rank.
        name: Of the argument, for error texts.
        ranks: The group.
        dtype: Type of the elements.
        sides: Name and operand that must hold the block of one group rank; of all with a rank of -1.

    Raises:
        InvalidArgumentError: It has another length, a wrong entry, or more than a buffer holds.
    """
    if len(counts) != ranks.group_size:
        raise InvalidArgumentError(
            f"{name} has {len(counts)} entries; the group has {ranks.group_size} ranks: give one for each rank"
        )
    checked = [c_integer(n, f"{name}[{i}]", 0, UINT64_MAX) for i, n in enumerate(counts)]
    total = sum(checked) * dtype.itemsize
    if total > UINT64_MAX:
        raise InvalidArgumentError(f"{name} adds up to {total} bytes, which no memory can hold")
    for side_name, side, rank in sides:
        needed = total if rank < 0 else checked[rank] * dtype.itemsize
        if side.nbytes is not None and needed > side.nbytes:
            what = "adds up to" if rank < 0 else f"has, at this rank's place {rank},"
            raise InvalidArgumentError(
                f"{name} {what} {needed} bytes, but {side_name} has {side.nbytes}; give smaller counts or a longer "
                "buffer"
            )
    return ffi.new("size_t[]", checked)


def _missing(name: str, root: int | None, why: str) -> InvalidArgumentError:
    if root is None:
        return InvalidArgumentError(f"{name} is missing; give an address (int), a Memory, or a buffer")
    return InvalidArgumentError(f"{name} is missing: this is group rank {root}, the root, {why}")
