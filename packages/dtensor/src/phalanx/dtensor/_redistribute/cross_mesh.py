"""From one mesh to another: who sends what to whom, over the ranks of both."""

from collections.abc import Sequence
from itertools import product

from phalanx.dtensor import _layout
from phalanx.dtensor._redistribute.local_steps import Action, Boxes, exchanging
from phalanx.dtensor._redistribute.planner import Placed
from phalanx.dtensor.placement_types import split_dim

Coordinate = tuple[int, ...]


class Side:
    """A mesh, whose global ranks are in the order of its coordinates, and what is where on it; none is Partial."""

    def __init__(self, shape: Sequence[int], mesh_shape: Sequence[int], ranks: Sequence[int], placed: Placed) -> None:
        self.shape, self.mesh_shape, self.placed = tuple(shape), tuple(mesh_shape), placed
        self.coordinates: dict[int, Coordinate] = dict(zip(ranks, product(*map(range, self.mesh_shape)), strict=True))

    def runs(self, coordinate: Coordinate) -> tuple[_layout.Runs, ...]:
        """The part of the rank at a coordinate."""
        return _layout.local_runs(self.shape, self.mesh_shape, self.placed, coordinate)

    def owners(self, receiver: int, number: int) -> dict[int, Coordinate]:
        """The ranks that one receives from: of several that have the same, one.

        If the receiver is in the mesh, it takes what it can from itself; others share the work among them by their
        number, the position in the other mesh.
        """
        near = self.coordinates.get(receiver)
        chosen = [
            None if split_dim(placement) is not None else number % size if near is None else near[at]
            for at, (placement, size) in enumerate(zip(self.placed, self.mesh_shape, strict=True))
        ]
        return {
            rank: coordinate
            for rank, coordinate in self.coordinates.items()
            if all(want is None or want == index for want, index in zip(chosen, coordinate, strict=True))
        }


def crossing(source: Side, target: Side, me: int) -> Action:
    """The work of a rank, of one mesh or both, that moves a tensor from one mesh to another."""
    ranks = tuple(sorted({*source.coordinates, *target.coordinates}))
    numbers = {rank: number for number, rank in enumerate(target.coordinates)}
    here, there = source.coordinates.get(me), target.coordinates.get(me)
    sends: list[Boxes] = [[] for _ in ranks]
    comes: list[Boxes] = [[] for _ in ranks]
    shape: tuple[int, ...] = (0,)
    if here is not None:
        for at, rank in enumerate(ranks):
            if rank in target.coordinates and me in source.owners(rank, numbers[rank]):
                sends[at] = list(_layout.blocks(source.runs(here), target.runs(target.coordinates[rank])))
    if there is not None:
        for rank, coordinate in source.owners(me, numbers[me]).items():
            comes[ranks.index(rank)] = list(_layout.blocks(source.runs(coordinate), target.runs(there)))
        shape = tuple(map(int, _layout.local_shape(target.shape, target.mesh_shape, target.placed, there)))
    return exchanging(ranks, sends, comes, shape, -1)


def crossing_bytes(source: Side, target: Side, itemsize: int) -> float:
    """Bytes that a rank of the source sends to others, on average."""
    total = 0
    for number, (rank, coordinate) in enumerate(target.coordinates.items()):
        want = target.runs(coordinate)
        for owner, at in source.owners(rank, number).items():
            if owner != rank:
                total += _layout.shared_count(source.runs(at), want)
    return total * itemsize / len(source.coordinates)
