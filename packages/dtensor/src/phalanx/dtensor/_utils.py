"""Shapes and offsets of local tensors, under the name of torch's module of this kind."""

from collections.abc import Sequence

from torch.types import IntLikeType

from phalanx.dtensor import _layout
from phalanx.dtensor._dtensor_spec import normalize_placements
from phalanx.dtensor._mesh import Mesh, coordinate_of
from phalanx.dtensor.placement_types import Placement


def compute_local_shape_and_global_offset(
    global_shape: Sequence[IntLikeType], mesh: Mesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[IntLikeType, ...], tuple[IntLikeType, ...]]:
    """The shape of this rank's local tensor, and the global index of its first element. Not collective.

    An empty shard begins at the end of its dim. The offset says where the local tensor lies in the global one only if
    each dim has one run of indices, which a StridedShard may split; () with `skip_offset`. On a rank outside the mesh
    the result is ((0,), ()).

    Source: torch.distributed.tensor._utils.compute_local_shape_and_global_offset.
    """
    coordinate = coordinate_of(mesh)
    if coordinate is None:
        return (0,), ()
    placed = normalize_placements(mesh, placements, len(global_shape))
    shape = _layout.local_shape(global_shape, mesh.shape, placed, coordinate)
    if skip_offset:
        return shape, ()
    runs = _layout.local_runs(global_shape, mesh.shape, placed, coordinate)
    offset = tuple(dim[0][0] if dim else size for dim, size in zip(runs, global_shape, strict=True))
    return shape, offset
