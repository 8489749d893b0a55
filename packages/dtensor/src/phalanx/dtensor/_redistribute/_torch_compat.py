"""What redistribute relies on that torch may move. Nothing else in the folder imports any."""

from torch.distributed.device_mesh import DeviceMesh

# Read in 2.11 to 2.13: a context in which no mode sees or changes an op.
from torch.utils._python_dispatch import _disable_current_modes


def ranks_of_mesh(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of a mesh in the order of their coordinates, also while fake tensors are in use.

    In 2.13 the mesh makes the tensor that says so from another one when it is asked.
    """
    with _disable_current_modes():
        return tuple(mesh.mesh.flatten().tolist())
