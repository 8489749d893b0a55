"""Meshes of specs: torch's DeviceMesh, or an AbstractMesh; equal meshes have one id."""

import itertools
import os
import threading
import weakref
from collections.abc import Hashable, Sequence
from functools import partial
from math import prod
from typing import Any, TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from phalanx.dtensor._torch_compat import mesh_key


class AbstractMesh:
    """A mesh without ranks: its shape, and the simulated coordinate of this rank.

    For layouts and rules where no process group exists: planning, tests, explanations. Nothing can communicate over it.

    Args:
        shape: The number of ranks of each mesh dim.
        coordinate: The coordinate of "this rank"; None if it is not in the mesh. By default all zeros.
        mesh_dim_names: A name for each mesh dim.
        device_type: The device type of local tensors.

    Raises:
        ValueError: The coordinate is not in the shape, a mesh dim has no ranks, or there is not one name for each dim.
    """

    __slots__ = ("__weakref__", "_coordinate", "_key", "device_type", "mesh_dim_names", "shape")

    def __init__(
        self,
        shape: Sequence[int],
        coordinate: Sequence[int] | None = (),
        *,
        mesh_dim_names: Sequence[str] | None = None,
        device_type: str = "cpu",
    ) -> None:
        self.shape = tuple(shape)
        if not all(size > 0 for size in self.shape):
            raise ValueError(f"AbstractMesh: the shape is {self.shape}, and every mesh dim must have a rank or more")
        if coordinate is not None:
            coordinate = tuple(coordinate) or (0,) * len(self.shape)
            inside = len(coordinate) == len(self.shape) and all(
                0 <= index < size for index, size in zip(coordinate, self.shape, strict=True)
            )
            if not inside:
                raise ValueError(
                    f"AbstractMesh: the coordinate is {coordinate}, which is not in a mesh of shape {self.shape}"
                )
        self._coordinate = coordinate
        self.mesh_dim_names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        if self.mesh_dim_names is not None and len(self.mesh_dim_names) != len(self.shape):
            raise ValueError(
                f"AbstractMesh: shape {self.shape} needs {len(self.shape)} names, not {self.mesh_dim_names}"
            )
        self.device_type = device_type
        self._key = (self.shape, self._coordinate, self.mesh_dim_names, device_type)

    @property
    def ndim(self) -> int:
        """The number of mesh dims."""
        return len(self.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        """The number of ranks of the mesh, or of a mesh dim.

        Args:
            mesh_dim: The mesh dim; None for the whole mesh.
        """
        return prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def get_coordinate(self) -> tuple[int, ...] | None:
        """The coordinate of this rank, or None if it is not in the mesh."""
        return self._coordinate

    def at(self, coordinate: Sequence[int] | None) -> "AbstractMesh":
        """The same mesh, seen from another coordinate.

        Args:
            coordinate: The coordinate of "this rank"; None if it is not in the mesh.

        Raises:
            ValueError: The coordinate is not in the mesh.
        """
        return AbstractMesh(self.shape, coordinate, mesh_dim_names=self.mesh_dim_names, device_type=self.device_type)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AbstractMesh) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        names = f", mesh_dim_names={self.mesh_dim_names}" if self.mesh_dim_names else ""
        return f"AbstractMesh({self.shape}, {self._coordinate}{names})"


Mesh: TypeAlias = DeviceMesh | AbstractMesh


def coordinate_of(mesh: Mesh) -> tuple[int, ...] | None:
    """The coordinate of this rank in a mesh, or None if it is not in the mesh."""
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else tuple(coordinate)


def describe(mesh: Mesh) -> str:
    """A mesh in few words: `(dp=2, tp=4)`, or `(2, 4)` if its dims have no names."""
    names = mesh.mesh_dim_names
    if not names:
        return f"({', '.join(map(str, mesh.shape))}{',' if mesh.ndim == 1 else ''})"
    return f"({', '.join(f'{name}={size}' for name, size in zip(names, mesh.shape, strict=True))})"


# ---- which meshes are equal ------------------------------------------------------------------------------------------
#
# Users make equal meshes over and over: `mesh["tp"]` is a new object each time. Equal ones, seen from one coordinate,
# have one id, which specs compare. (torch's equality leaves out the coordinate, in which ranks that are threads
# differ.) A mesh whose process groups were destroyed is equal to no mesh that is made afterwards.

mesh_ids: dict[int, int] = {}  # id() of a living mesh -> its id; specs look here first
_families: dict[Hashable, "_Family"] = {}
_ids = itertools.count(1)
_lock = threading.RLock()  # reentrant: the garbage collector may call _forget anywhere
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


# A mesh, and the process groups that it had when it got its id.
_Member: TypeAlias = tuple[weakref.ref[Mesh], tuple[Any, ...]]


class _Family:
    """The living meshes that have one id."""

    __slots__ = ("members", "mesh_id")

    def __init__(self) -> None:
        self.mesh_id = next(_ids)
        self.members: dict[int, _Member] = {}

    def is_usable(self) -> bool:
        """Whether the groups of the meshes are still those that torch finds: of one, since all end together."""
        for ref, groups in self.members.values():
            mesh = ref()
            if mesh is not None:
                now = _groups(mesh)
                return len(now) == len(groups) and all(a is b for a, b in zip(now, groups, strict=True))
        return False


def _groups(mesh: Mesh) -> tuple[Any, ...]:
    """The process groups of a mesh as torch finds them now; none where it has or finds none."""
    try:
        return tuple(mesh.get_all_groups()) if isinstance(mesh, DeviceMesh) else ()
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError):
        return ()


def mesh_id(mesh: Mesh) -> int:
    """A number that equal meshes have in common. It stays while one of them lives, and is never used again."""
    known = mesh_ids.get(id(mesh))
    if known is not None:
        return known
    if not isinstance(mesh, DeviceMesh | AbstractMesh):
        raise TypeError(
            f"a mesh must be a torch DeviceMesh, not {type(mesh).__name__}: write "
            'torch.distributed.init_device_mesh("cpu", (number of ranks,))'
        )
    key = (mesh_key(mesh) if isinstance(mesh, DeviceMesh) else mesh._key, coordinate_of(mesh))
    groups = _groups(mesh)
    with _lock:
        family = _families.get(key)
        if family is None or not family.is_usable():
            family = _families[key] = _Family()
        family.members[id(mesh)] = weakref.ref(mesh, partial(_forget, id(mesh), key, family)), groups
        mesh_ids[id(mesh)] = family.mesh_id
    return family.mesh_id


def _forget(
    number: int,
    key: Hashable,
    family: _Family,
    ref: "weakref.ref[Mesh]",
    *,
    # Held here, since the names are gone when the interpreter ends.
    lock: Any = _lock,
    ids: dict[int, int] = mesh_ids,
    families: dict[Hashable, _Family] = _families,
) -> None:
    with lock:
        member = family.members.get(number)
        if member is not None and member[0] is ref:
            del family.members[number], ids[number]
        if not family.members and families.get(key) is family:
            del families[key]
