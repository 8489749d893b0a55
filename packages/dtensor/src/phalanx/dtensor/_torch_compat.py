"""The private or unlisted parts of torch that this package relies on. Nothing else in it imports any.

Each says in which versions it was read. `test_torch_compat.py` fails with a plain text when torch moves one.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed.tensor.placement_types as _types
from torch.distributed.device_mesh import DeviceMesh
from torch.types import IntLikeType

# Read in 2.13. Private in torch: FSDP2 makes it, users rarely do.
TorchStridedShard: Any = _types._StridedShard


def register_constants(members: dict[type, tuple[str, ...]]) -> None:
    """Let Dynamo hold instances of these classes as constants, and call or read these members while it traces.

    Subclasses of torch's placements inherit its registration; this adds the members that torch's have not. Read in
    2.13. Versions that know placements by `isinstance` alone have nothing to register.
    """
    try:
        from torch._library.opaque_object import MemberType, register_opaque_type
    except ImportError:
        return
    for cls, names in members.items():
        register_opaque_type(cls, typ="value", members=dict.fromkeys(names, MemberType.USE_REAL))


# Public, but without types. Read in 2.11 to 2.13.
sym_min: Callable[[IntLikeType, IntLikeType], IntLikeType] = torch.sym_min
sym_max: Callable[[IntLikeType, IntLikeType], IntLikeType] = torch.sym_max


def surely_divides(size: IntLikeType, divisor: int) -> bool:
    """Whether a size is known to be a multiple of `divisor`; False where a SymInt does not say.

    Where a SymInt has a hint, the answer becomes a guard. Read in 2.13.
    """
    return size % divisor == 0 if type(size) is int else _surely(size % divisor == 0)


def surely_equal(a: IntLikeType, b: IntLikeType) -> bool:
    """Whether two sizes are known to be equal; False where a SymInt does not say. Read in 2.13."""
    return a == b if type(a) is int and type(b) is int else _surely(a == b)


def _surely(truth: Any) -> bool:
    # Imported here, since it brings sympy, and only who traces has a SymInt.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(truth))


def mesh_key(mesh: DeviceMesh) -> Hashable:
    """What torch compares when it compares meshes, without the mesh.

    2.13 has a method for it. Earlier versions are asked for what they show: ranks, shape, names and device type; and
    the thread, which stands for the rank under the threaded backend. Read in 2.13.
    """
    own: Callable[[], Hashable] | None = getattr(mesh, "_hash_key", None)
    if own is not None:
        return own()
    ranks = tuple(mesh.mesh.flatten().tolist())
    return ranks, tuple(mesh.shape), mesh.mesh_dim_names, mesh.device_type, getattr(mesh, "_thread_id", None)
