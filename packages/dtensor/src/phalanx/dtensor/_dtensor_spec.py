"""Specs: what a DTensor is, but for its values. Equal specs are one object, so that `is` compares them and a plan cache
hashes them by identity.

    spec = DTensorSpec(mesh, (Shard(0), Replicate()), (8, 4), (4, 1), torch.float32)
    spec is DTensorSpec(mesh, (Shard(0), Replicate()), (8, 4), (4, 1), torch.float32)        # True, on any thread

A spec is kept only as long as somebody holds it. Where a size is a SymInt, specs are compared by value (`==`), since
what is equal may not be known: only then are there several of one value.
"""

import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias, final

import torch
from torch.types import IntLikeType

from phalanx.dtensor import _layout
from phalanx.dtensor._mesh import Mesh, coordinate_of, describe, mesh_id, mesh_ids
from phalanx.dtensor._torch_compat import surely_equal
from phalanx.dtensor.placement_types import AnyPlacement, Partial, Placement, as_placement, on_dim, split_dim

# The reductions that only integers and bools have.
_BITWISE = ("band", "bor", "bxor")
_Entry: TypeAlias = "weakref.KeyedRef[tuple[Any, ...], DTensorSpec]"
_table: dict[tuple[Any, ...], _Entry] = {}
_lock = threading.RLock()  # reentrant: the garbage collector may call _forget anywhere
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


# What a spec has, in the order in which `_fill` gives it.
_FIELDS = ("mesh", "placements", "shape", "stride", "dtype", "tensor_meta", "ndim", "_local_shape", "_local_runs")


class TensorMeta(NamedTuple):
    """What every tensor has."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class DTensorSpec:
    """A DTensor without its values: mesh, placements, and shape, stride and dtype of the whole tensor.

    Equal meshes are taken for one. Placements may be torch's; negative dims are made positive. Without a stride it is
    contiguous. What does not fit together raises a TypeError, ValueError or IndexError that says what to write; an
    unknown placement a RuntimeError.
    """

    __slots__ = ("__weakref__", *_FIELDS)
    mesh: Mesh
    placements: tuple[AnyPlacement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    ndim: int
    tensor_meta: "TensorMeta"  # shape, stride and dtype once more: torch's constructor of wrappers asks for it
    _local_shape: torch.Size | None
    _local_runs: tuple[_layout.Runs, ...] | None

    def __new__(
        cls,
        mesh: Mesh,
        placements: Sequence[Placement],
        shape: Sequence[IntLikeType],
        stride: Sequence[IntLikeType] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "DTensorSpec":
        # The hot path: everything has the form in which it is kept, or is a list where that is a tuple.
        try:
            entry = _table.get((mesh_ids.get(id(mesh)), placements, shape, stride, dtype))
        except TypeError:
            placements = tuple(placements) if type(placements) is list else placements
            shape = tuple(shape) if type(shape) is list else shape
            stride = tuple(stride) if type(stride) is list else stride
            try:
                entry = _table.get((mesh_ids.get(id(mesh)), placements, shape, stride, dtype))
            except TypeError:  # a SymInt, or something wrong
                entry = None
        if entry is not None:
            spec = entry()
            if spec is not None:
                return spec
        return _make(mesh, placements, shape, stride, dtype)

    @property
    def local_shape(self) -> torch.Size:
        """The shape of the local tensor of this rank; (0,) on a rank outside the mesh."""
        found = self._local_shape
        if found is None:
            coordinate = coordinate_of(self.mesh)
            found = torch.Size((0,)) if coordinate is None else self.local_shape_at(coordinate)
            _set(self, "_local_shape", found)
        return found

    @property
    def local_stride(self) -> tuple[int, ...]:
        """The stride of a local tensor without gaps whose dims lie in memory in the order of those of the whole."""
        local = self.local_shape
        if len(local) != self.ndim or coordinate_of(self.mesh) is None:
            return (1,)
        return _layout.stride_like(local, self.shape, self.stride)  # type: ignore[return-value]

    @property
    def local_runs(self) -> tuple[_layout.Runs, ...]:
        """For each dim, the runs of global indices that this rank has (see `_layout`): none outside the mesh."""
        found = self._local_runs
        if found is None:
            coordinate = coordinate_of(self.mesh)
            found = ((),) * self.ndim if coordinate is None else self.local_runs_at(coordinate)
            _set(self, "_local_runs", found)
        return found

    def local_shape_at(self, coordinate: Sequence[int]) -> torch.Size:
        """The shape of the local tensor at a coordinate of the mesh."""
        return _size(_layout.local_shape(self.shape, self.mesh.shape, self.placements, coordinate))

    def local_runs_at(self, coordinate: Sequence[int]) -> tuple[_layout.Runs, ...]:
        """For each dim, the runs of global indices at a coordinate of the mesh."""
        return _layout.local_runs(self.shape, self.mesh.shape, self.placements, coordinate)

    def mesh_dims_of(self, dim: int) -> tuple[int, ...]:
        """The mesh dims that split a dim of the tensor, in their order."""
        return tuple(mesh_dim for mesh_dim, placement in enumerate(self.placements) if split_dim(placement) == dim)

    @property
    def is_sharded(self) -> bool:
        """Whether a placement splits the tensor."""
        return any(split_dim(placement) is not None for placement in self.placements)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has the whole value."""
        return all(placement.is_replicate() for placement in self.placements)

    @property
    def is_partial(self) -> bool:
        """Whether a reduction is pending on a mesh dim."""
        return any(type(placement) is Partial for placement in self.placements)

    def replace(
        self,
        placements: Sequence[Placement] | None = None,
        shape: Sequence[IntLikeType] | None = None,
        stride: Sequence[IntLikeType] | None = None,
        dtype: torch.dtype | None = None,
    ) -> "DTensorSpec":
        """The spec that differs in these; a new shape without a stride is contiguous."""
        if shape is None:
            shape, stride = self.shape, self.stride if stride is None else stride
        return DTensorSpec(
            self.mesh,
            self.placements if placements is None else placements,
            shape,
            stride,
            self.dtype if dtype is None else dtype,
        )

    def __setattr__(self, name: str, *value: object) -> NoReturn:
        raise AttributeError(f"a DTensorSpec cannot be changed ({name!r}): use replace(), which returns a new one")

    __delattr__ = __setattr__

    def __copy__(self) -> "DTensorSpec":
        return self

    def __deepcopy__(self, memo: object) -> "DTensorSpec":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return DTensorSpec, (self.mesh, self.placements, tuple(self.shape), self.stride, self.dtype)

    def __repr__(self) -> str:
        return (
            f"DTensorSpec(shape={tuple(self.shape)}, dtype={self.dtype}, placements={self.placements}, "
            f"mesh={describe(self.mesh)})"
        )

    def __str__(self) -> str:
        names = self.mesh.mesh_dim_names or range(self.mesh.ndim)
        where = ", ".join(f"{name}: {placement}" for name, placement in zip(names, self.placements, strict=True))
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} ({where})"


@final
class _SymbolicSpec(DTensorSpec):
    """A spec with a SymInt. There may be several of one value; they are equal if each size is known to be."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other or (
            type(other) is _SymbolicSpec
            and mesh_id(self.mesh) == mesh_id(other.mesh)
            and self.placements == other.placements
            and self.dtype == other.dtype
            and self.ndim == other.ndim
            and all(map(surely_equal, self.shape, other.shape))
            and all(map(surely_equal, self.stride, other.stride))
        )

    def __hash__(self) -> int:
        return hash((mesh_id(self.mesh), self.placements, self.dtype, self.ndim))


_set = object.__setattr__


def _size(sizes: Iterable[IntLikeType]) -> torch.Size:
    return torch.Size(sizes)  # type: ignore[arg-type]  # it takes SymInts, too


# The defaults are held there, since the names are gone when the interpreter ends.
def _forget(entry: _Entry, *, lock: Any = _lock, table: dict[tuple[Any, ...], _Entry] = _table) -> None:
    with lock:
        # Another one may be in its place already.
        if table.get(entry.key) is entry:
            del table[entry.key]


def _make(
    mesh: Mesh,
    placements: Sequence[Placement],
    shape: Sequence[IntLikeType],
    stride: Sequence[IntLikeType] | None,
    dtype: torch.dtype,
) -> DTensorSpec:
    """Check everything, and find or make the spec."""
    number = mesh_id(mesh)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"DTensorSpec: dtype must be a torch dtype, not {dtype!r}: write torch.float32")
    if isinstance(shape, int | torch.SymInt | str) or not isinstance(shape, Sequence):
        raise TypeError(f"DTensorSpec: shape must be a sequence of ints, not {shape!r}: write (8, 4)")
    size = _size(shape)
    symbolic = not all(type(n) is int for n in size)
    if not symbolic and min(size, default=0) < 0:
        raise ValueError(f"DTensorSpec: the shape is {tuple(size)}, and no size may be negative")
    steps = _layout.contiguous_stride(size) if stride is None else tuple(stride)
    if len(steps) != len(size):
        raise ValueError(
            f"DTensorSpec: shape {tuple(size)} needs {len(size)} strides, not {steps}: leave them out if contiguous"
        )
    symbolic = symbolic or not all(type(n) is int for n in steps)
    placed = normalize_placements(mesh, placements, len(size))
    for placement in placed:
        if (
            type(placement) is Partial
            and placement.reduce_op in _BITWISE
            and (dtype.is_floating_point or dtype.is_complex)
        ):
            raise ValueError(
                f"{placement!r} is for integers and bools, and the tensor is {dtype}: write Partial('sum')"
            )
    _layout.check_sizes(size, mesh.shape, placed)
    if symbolic:
        return _fill(_SymbolicSpec, mesh, placed, size, steps, dtype)
    key = (number, placed, size, steps, dtype)
    with _lock:
        entry = _table.get(key)
        spec = None if entry is None else entry()
        if spec is None:
            spec = _fill(DTensorSpec, mesh, placed, size, steps, dtype)
            _table[key] = weakref.KeyedRef(spec, _forget, key)
    return spec


def _fill(
    cls: type[DTensorSpec], mesh: Mesh, placements: Any, shape: Any, stride: Any, dtype: torch.dtype
) -> DTensorSpec:
    spec = object.__new__(cls)
    values = mesh, placements, shape, stride, dtype, TensorMeta(shape, stride, dtype), len(shape), None, None
    for name, value in zip(_FIELDS, values, strict=True):
        _set(spec, name, value)
    return spec


def normalize_placements(mesh: Mesh, placements: Sequence[Placement], ndim: int) -> tuple[AnyPlacement, ...]:
    """The placements of a tensor of `ndim` dims on a mesh in the form that specs keep: ours, and dims not negative."""
    if isinstance(placements, Placement | str) or not isinstance(placements, Sequence):
        raise TypeError(
            f"placements must be a sequence with one placement for each mesh dim, not {placements!r}: "
            f"write [{placements if isinstance(placements, Placement) else 'Shard(0)'!r}]"
        )
    ours = tuple(as_placement(placement) for placement in placements)
    if len(ours) != mesh.ndim:
        raise ValueError(
            f"{len(ours)} placements {list(ours)} for a mesh of {mesh.ndim} dims {describe(mesh)}: "
            "`placements` must have the same length as the mesh has dims; write Replicate() for a mesh dim that splits "
            "nothing"
        )
    return tuple(_in_range(placement, ndim) for placement in ours)


def _in_range(placement: AnyPlacement, ndim: int) -> AnyPlacement:
    dim = split_dim(placement)
    if dim is None or 0 <= dim < ndim:
        return placement
    if -ndim <= dim < 0:
        return on_dim(placement, dim + ndim)
    if ndim == 0:
        raise IndexError(f"{placement!r} splits a tensor that has no dims: write Replicate()")
    raise IndexError(
        f"{placement!r} splits a dim that the tensor does not have: it has {ndim}, so write {-ndim} to {ndim - 1}"
    )
