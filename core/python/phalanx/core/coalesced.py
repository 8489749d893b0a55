"""Several collectives as one."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Unpack, overload

from phalanx.core._call import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    AnyCall,
    Blocking,
    CollectiveSpec,
    Nonblocking,
    Operand,
    c_root,
    call_async,
    resolve,
    resolve_one,
)
from phalanx.core._group_calls import GroupCalls
from phalanx.core._lib import ffi, lib
from phalanx.core.dtypes import DTypeLike, ReduceOp, ReduceOpLike, reduce_op_of
from phalanx.core.errors import InvalidArgumentError
from phalanx.core.uncopied import Uncopied
from phalanx.core.work import Work

_SIZE = ffi.sizeof("phx_call")


@dataclass(slots=True, eq=False)
class Call:
    """One call of `Group.coalesced`, made by the method that has the name of the collective.

    The methods take what those of `Group` take, and check nothing: `Group.coalesced` does.

    Example:
        >>> x = array("i", [rank])
        >>> group.coalesced([Call.all_reduce(x), Call.broadcast(array("i", [rank]))])
        >>> x
        array('i', [1])
    """

    spec: CollectiveSpec
    source: Any
    out: Any
    count: int | None = None
    dtype: DTypeLike = None
    op: ReduceOpLike | None = None
    root_group_rank: int | None = None

    @classmethod
    def all_reduce(
        cls,
        source: Any,
        out: Any = None,
        count: int | None = None,
        dtype: DTypeLike = None,
        op: ReduceOpLike = ReduceOp.SUM,
    ) -> "Call":
        """`Group.all_reduce`. Without `out` it is in place."""
        return cls(ALL_REDUCE, source, source if out is None else out, count, dtype, op)

    @classmethod
    def all_gather(cls, source: Any, out: Any, count: int | None = None, dtype: DTypeLike = None) -> "Call":
        """`Group.all_gather`."""
        return cls(ALL_GATHER, source, out, count, dtype)

    @classmethod
    def reduce_scatter(
        cls, source: Any, out: Any, count: int | None = None, dtype: DTypeLike = None, op: ReduceOpLike = ReduceOp.SUM
    ) -> "Call":
        """`Group.reduce_scatter`."""
        return cls(REDUCE_SCATTER, source, out, count, dtype, op)

    @classmethod
    def all_to_all(cls, source: Any, out: Any, count: int | None = None, dtype: DTypeLike = None) -> "Call":
        """`Group.all_to_all`."""
        return cls(ALL_TO_ALL, source, out, count, dtype)

    @classmethod
    def broadcast(
        cls, buffer: Any, count: int | None = None, dtype: DTypeLike = None, root_group_rank: int = 0
    ) -> "Call":
        """`Group.broadcast`."""
        return cls(BROADCAST, buffer, buffer, count, dtype, root_group_rank=root_group_rank)

    @classmethod
    def reduce(
        cls,
        source: Any,
        out: Any = None,
        count: int | None = None,
        dtype: DTypeLike = None,
        op: ReduceOpLike = ReduceOp.SUM,
        root_group_rank: int = 0,
    ) -> "Call":
        """`Group.reduce`."""
        return cls(REDUCE, source, out, count, dtype, op, root_group_rank)

    @classmethod
    def gather(
        cls, source: Any, out: Any = None, count: int | None = None, dtype: DTypeLike = None, root_group_rank: int = 0
    ) -> "Call":
        """`Group.gather`."""
        return cls(GATHER, source, out, count, dtype, root_group_rank=root_group_rank)

    @classmethod
    def scatter(
        cls, source: Any, out: Any, count: int | None = None, dtype: DTypeLike = None, root_group_rank: int = 0
    ) -> "Call":
        """`Group.scatter`."""
        return cls(SCATTER, source, out, count, dtype, root_group_rank=root_group_rank)


class Coalesced(Uncopied):
    """Calls that were checked and laid out, and can run as one, as often as wanted. Made by `Group.prepare`.

    It keeps their buffers alive.
    """

    def __init__(self, group: GroupCalls, calls: Iterable[Call]) -> None:
        rows: list[tuple[Any, ...]] = []
        operands: list[Operand] = []
        for index, call in enumerate(calls):
            if not isinstance(call, Call):
                raise InvalidArgumentError(f"call {index} is {call!r}; make it with a method of phalanx.core.Call")
            try:
                rows.append(_row(group, call, operands))
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"call {index} ({call.spec.name}): {error}") from None
        self._group = group
        self._operands = tuple(operands)
        self._count = len(rows)
        self._calls = ffi.new("phx_call[]", rows)

    @overload
    def run(self, **options: Unpack[Blocking]) -> None: ...
    @overload
    def run(self, **options: Unpack[Nonblocking]) -> Work: ...
    @overload
    def run(self, **options: Unpack[AnyCall]) -> Work | None: ...
    def run(self, **options: Unpack[AnyCall]) -> Work | None:
        """Run all of them as one: `Group.coalesced`. Collective."""
        group = self._group
        arguments = (group.pointer, self._calls, self._count)
        return call_async(lib.phx_coalesced, arguments, group._handle, group._orphans, self._operands, options)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"Coalesced({self._count} calls on {self._group!r})"


def _row(group: GroupCalls, call: Call, operands: list[Operand]) -> tuple[Any, ...]:
    """The fields of a phx_call. Appends what must stay alive."""
    spec = call.spec
    root = None if call.root_group_rank is None else c_root(call.root_group_rank, group)
    if spec is BROADCAST:
        assert root is not None
        writable = root != group.group_rank
        buffer, n, kind = resolve_one(call.source, "buffer", writable, call.count, call.dtype)
        operands.append(buffer)
        return (_SIZE, spec.kind, buffer.pointer, buffer.pointer, n, kind, 0, root, 0)
    op = 0 if call.op is None else reduce_op_of(call.op)
    sides = resolve(spec, group, call.source, call.out, call.count, call.dtype, root)
    operands += (sides.source, sides.out)
    return (_SIZE, spec.kind, sides.source.pointer, sides.out.pointer, sides.n, sides.dtype, op, root or 0, 0)
