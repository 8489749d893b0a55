"""What redistribute relies on that torch may move. Nothing else in the folder imports any."""

from torch.distributed.device_mesh import DeviceMesh
from torch.types import IntLikeType

# Read in 2.11 to 2.13: a context in which no mode sees or changes an op.
from torch.utils._python_dispatch import _disable_current_modes


def hint(size: IntLikeType) -> int:
    """The size that a SymInt has in the call that is traced, without a guard; 4096 where there is none.

    Read in 2.13; earlier versions keep it in the node.
    """
    if type(size) is int:
        return size
    try:
        from torch.fx.experimental.symbolic_shapes import optimization_hint
    except ImportError:
        found = getattr(getattr(size, "node", None), "hint", None)
        return 4096 if found is None else int(found)
    return int(optimization_hint(size, fallback=4096))


def ranks_of_mesh(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of a mesh in the order of their coordinates, also while fake tensors are in use.

    In 2.13 the mesh makes the tensor that says so from another one when it is asked.
    """
    with _disable_current_modes():
        return tuple(mesh.mesh.flatten().tolist())
