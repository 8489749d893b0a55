"""Placements: how a tensor is placed on one mesh dim. Pure data, which knows no mesh, size or tensor.

    Shard(0)                      # dim 0 in the chunks of torch.chunk; the last ones may be short or empty
    SizedShard(0, (3, 5))         # dim 0 in pieces of sizes that the user chose
    StridedShard(0, 2)            # dim 0 split in 2 first, and each of these over the mesh dim
    Replicate()                   # the same on every rank
    Partial("sum")                # each rank has a term; the value is their sum

They are immutable, may be keys, and survive pickle and copy; equal ones are the same object, but for SizedShard. They
derive from torch's placements: torch's APIs take them, Dynamo holds them as constants, and they are equal to torch's
(`Shard(0) == torch.distributed.tensor.Shard(0)`, with the same hash). SizedShard has no counterpart in torch, and
derives only from the common base, so that torch cannot take it for equal chunks.

This module does not import torch's, because that imports sympy. Until other code imports it, the bases are stand-ins.

Each has:

- `is_shard(dim=None)`: a rank has one slice of a dim: Shard and SizedShard (but not StridedShard, as in torch);
- `is_replicate()`;
- `is_partial(reduce_op=None)`.

`split_dim` gives the dim that a placement of any kind splits.
"""

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, SupportsIndex, TypeAlias, final

from phalanx.collectives.reductions import REDUCTIONS
from phalanx.dtensor import _torch_compat

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Partial as _Partial
    from torch.distributed.tensor.placement_types import Placement as Placement
    from torch.distributed.tensor.placement_types import Replicate as _Replicate
    from torch.distributed.tensor.placement_types import Shard as _Shard

    _Strided = Any
else:
    # torch's module brings sympy: `adopt_placements` replaces these bases when somebody imports it.
    Placement = _torch_compat.Placement
    _Shard, _Strided, _Replicate, _Partial = map(
        _torch_compat.placement_base, ("Shard", "StridedShard", "Replicate", "Partial")
    )

__all__ = [
    "AnyPlacement",
    "AnyShard",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "SizedShard",
    "StridedShard",
    "as_placement",
    "as_torch_placement",
]

REDUCE_OPS: Final = tuple(REDUCTIONS)


def _set(self: object, name: str, value: object) -> None:
    # Past __setattr__, which refuses.
    object.__setattr__(self, name, value)


class _Value:
    """What the classes below have in common. Their other base, the last one, is exchanged: see `adopt_placements`."""

    __slots__ = ()
    _names: ClassVar[tuple[str, ...]]  # the arguments of the class, which its instances have as attributes
    _hash: int

    if not TYPE_CHECKING:  # which is to look at __new__
        __init__ = object.__init__  # does nothing: __new__ did it, once for equal values

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self).__bases__[-1] and self._values(other) == self._values(self))

    def __hash__(self) -> int:
        return self._hash

    def __setattr__(self, name: str, *value: object) -> NoReturn:
        raise AttributeError(f"{self!r} cannot be changed ({name!r}): make a new placement")

    __delattr__ = __setattr__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)}' for name in self._names)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._values(self)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        name = f"Phalanx{type(self).__name__}"
        return f"{name}({', '.join(map(repr, self._values(self)))})", {name: type(self)}

    @classmethod
    def _values(cls, placement: Any) -> tuple[Any, ...]:
        """The values of the arguments in a placement of this class, or of torch's."""
        return tuple(getattr(placement, name) for name in cls._names)

    @classmethod
    def _make(cls, number: int, *values: Any) -> Any:
        """An instance with these values and this hash, that of torch's."""
        base: Any = cls.__bases__[-1]
        named = dict(zip(cls._names, values, strict=True))
        made = base.__new__(cls)
        base.__init__(made, **named)
        for name, value in (*named.items(), ("_hash", number)):
            _set(made, name, value)
        return made


@final
class Shard(_Value, _Shard):
    """A dim of the tensor is cut into chunks over the mesh dim, as torch.chunk cuts it.

    The chunks have ceil(size / ranks) elements; the last ones may have fewer, or none.

    Args:
        dim: The dim of the tensor; a negative one counts from the end and is made positive where the tensor is known.
    """

    __slots__ = ("_hash", "dim")
    _names = ("dim",)
    dim: int
    _made: ClassVar[dict[int, "Shard"]] = {}

    def __new__(cls, dim: SupportsIndex) -> "Shard":
        dim = operator.index(dim)
        made = cls._made.get(dim)
        if made is None:
            made = cls._made.setdefault(dim, cls._make(hash(dim), dim))
        return made

    def __str__(self) -> str:
        return f"S({self.dim})"


@final
class SizedShard(_Value, Placement):
    """A dim of the tensor is split into pieces of given sizes over the mesh dim.

    If several placements split one dim, the sizes are those of the piece that the earlier mesh dims leave; they must
    add up to it on every rank.

    Args:
        dim: The dim of the tensor, as for Shard.
        sizes: The size of the piece of each rank of the mesh dim, in order; 0 is allowed.

    Raises:
        ValueError: A size is negative, or there is none.
    """

    __slots__ = ("_hash", "dim", "sizes")
    _names = ("dim", "sizes")
    dim: int
    sizes: tuple[int, ...]

    def __init__(self, dim: SupportsIndex, sizes: Iterable[SupportsIndex]) -> None:
        Placement.__init__(self)
        whole = tuple(operator.index(size) for size in sizes)
        if not whole or min(whole) < 0:
            raise ValueError(
                f"SizedShard: sizes must be one non-negative int for each rank of the mesh dim, not {whole}: "
                "write SizedShard(0, (3, 5)) for 3 rows on the first of two ranks and 5 on the second"
            )
        _set(self, "dim", operator.index(dim))
        _set(self, "sizes", whole)
        _set(self, "_hash", hash((SizedShard, self.dim, whole)))

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is SizedShard and other.dim == self.dim and other.sizes == self.sizes)

    __hash__ = _Value.__hash__  # a class with an __eq__ of its own inherits none

    def __str__(self) -> str:
        return f"S({self.dim}, {list(self.sizes)})"


@final
class StridedShard(_Value, _Strided):  # type: ignore[misc]  # a private class of torch has no type here
    """A dim of the tensor is split into `split_factor` chunks, and each of these into chunks over the mesh dim.

    A rank has its chunk of each of the first chunks, one after the other. So `[StridedShard(0, n), Shard(0)]` is a dim
    that the second mesh dim, of n ranks, shards before the first does (FSDP over tensor parallelism).

    Args:
        dim: The dim of the tensor, as for Shard.
        split_factor: The number of first chunks, at least 1. With 1 it splits as Shard(dim), but is not equal to it.

    Raises:
        ValueError: split_factor is below 1.
    """

    __slots__ = ("_hash", "dim", "split_factor")
    _names = ("dim", "split_factor")
    dim: int
    split_factor: int
    _made: ClassVar[dict[tuple[int, int], "StridedShard"]] = {}

    def __new__(cls, dim: SupportsIndex, split_factor: SupportsIndex) -> "StridedShard":
        key = operator.index(dim), operator.index(split_factor)
        made = cls._made.get(key)
        if made is None:
            if key[1] < 1:
                raise ValueError(f"StridedShard: split_factor must be at least 1, not {key[1]}")
            made = cls._made.setdefault(key, cls._make(hash(key), *key))
        return made

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


@final
class Replicate(_Value, _Replicate):
    """Every rank of the mesh dim has the same values."""

    __slots__ = ("_hash",)
    _names = ()
    _made: ClassVar[list["Replicate"]] = []

    def __new__(cls) -> "Replicate":
        if not cls._made:
            cls._made.append(cls._make(-1))
        return cls._made[0]

    def __hash__(self) -> int:
        return -1  # faster than from its slot, and most placements are this one

    def __str__(self) -> str:
        return "R"


@final
class Partial(_Value, _Partial):
    """Every rank of the mesh dim has a term of the value, which is their reduction.

    Args:
        reduce_op: "sum", "avg", "min", "max", "product", "band", "bor" or "bxor".

    Raises:
        ValueError: There is no such reduction.
    """

    __slots__ = ("_hash", "reduce_op")
    _names = ("reduce_op",)
    reduce_op: str
    _made: ClassVar[dict[str, "Partial"]] = {}

    def __new__(cls, reduce_op: str | None = "sum") -> "Partial":
        reduce_op = "sum" if reduce_op is None else reduce_op
        made = cls._made.get(reduce_op)
        if made is None:
            if reduce_op not in REDUCE_OPS:
                raise ValueError(f"Partial: unknown reduce op {reduce_op!r}; expected one of {', '.join(REDUCE_OPS)}")
            made = cls._made.setdefault(reduce_op, cls._make(1 + hash(reduce_op), reduce_op))
        return made

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op!r})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


# The placements of this package, and those of them that split a dim: for type checkers, and for isinstance.
AnyShard: TypeAlias = Shard | SizedShard | StridedShard
AnyPlacement: TypeAlias = Shard | SizedShard | StridedShard | Replicate | Partial

_SHARDS: Final = frozenset((Shard, SizedShard, StridedShard))
_OURS: Final[frozenset[type[_Value]]] = frozenset((*_SHARDS, Replicate, Partial))


def as_placement(placement: object) -> AnyPlacement:
    """The placement of this package that is equal to a placement of this package or of torch. Not collective.

    Args:
        placement: A placement.

    Raises:
        RuntimeError: The value is neither, or it is a placement that only torch knows, such as its internal Partial
            with a mask.

    Example:
        >>> as_placement(torch.distributed.tensor.Shard(0))
        Shard(dim=0)
    """
    kind = type(placement)
    if kind in _OURS:
        return placement  # type: ignore[return-value]
    ours: Any
    for ours in (Shard, Replicate, Partial, StridedShard):
        if kind is ours.__bases__[-1]:
            return ours(*ours._values(placement))  # type: ignore[no-any-return]
    raise RuntimeError(
        f"unknown placement {placement!r} ({kind.__module__}.{kind.__qualname__}): write Shard(dim), Replicate(), "
        "Partial(reduce_op), StridedShard(dim, split_factor) or SizedShard(dim, sizes)"
    )


def as_torch_placement(placement: object) -> Placement:
    """The placement of torch that is equal to a placement of this package or of torch. Not collective.

    Args:
        placement: A placement.

    Raises:
        ValueError: The placement is a SizedShard, which torch does not have.
        RuntimeError: The value is not a placement.

    Example:
        >>> type(as_torch_placement(Shard(0))) is torch.distributed.tensor.Shard
        True
    """
    ours = as_placement(placement)
    if isinstance(ours, SizedShard):
        raise ValueError(
            f"as_torch_placement: torch has no placement like {ours!r}: redistribute to Shard({ours.dim}) first"
        )
    made: Placement = _torch_compat.torch_placement(type(ours).__name__)(
        **dict(zip(ours._names, ours._values(ours), strict=True))
    )
    return made


def split_dim(placement: Placement) -> int | None:
    """The dim of the tensor that a placement of this package splits, or None."""
    return placement.dim if type(placement) in _SHARDS else None  # type: ignore[attr-defined]


def on_dim(placement: AnyPlacement, dim: int) -> AnyPlacement:
    """The same placement for another dim of the tensor; what splits none stays as it is."""
    if type(placement) not in _SHARDS:
        return placement
    kind: Any = type(placement)
    return kind(dim, *kind._values(placement)[1:])  # type: ignore[no-any-return]


def without_partial(placements: Iterable[AnyPlacement]) -> tuple[AnyPlacement, ...]:
    """The placements with Replicate for Partial: after a reduction, and by default of a gradient, since the terms of a
    Partial all have the gradient of the whole.
    """
    return tuple(Replicate() if type(one) is Partial else one for one in placements)


_StridedShard = StridedShard  # as torch calls it

_MEMBERS: Final = ("__eq__", "is_partial", "is_replicate", "is_shard")
_torch_compat.adopt_placements(
    (Shard, StridedShard, Replicate, Partial), {cls: (*_MEMBERS, *cls._names) for cls in _OURS}
)
