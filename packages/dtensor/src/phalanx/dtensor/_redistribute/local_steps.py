"""The work of one rank in a step: the preparation, the call, and the use of the result. No communication.

An Action is `after(call(before(local)))`; only the call is a collective. So a test can run all ranks in one process.
Whatever can be is worked out when the Action is made.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, product
from math import lcm, prod
from operator import mul
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.types import IntLikeType

from phalanx.dtensor import _layout
from phalanx.dtensor._graph_agreement import neutral
from phalanx.dtensor._redistribute.planner import REPLICATE, Placed, Step, reduction_path
from phalanx.dtensor._torch_compat import surely_divides
from phalanx.dtensor.placement_types import AnyPlacement, Partial, Shard, split_dim

Local: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Boxes: TypeAlias = list[_layout.Block]


class Call(NamedTuple):
    """A collective on one tensor: "all_gather" and "reduce_scatter" (along `dim`), with `sizes` "all_gather_v" and
    "reduce_scatter_v", "all_reduce", "all_to_all" (from shards of `dim` to shards of `target_dim`, with the sizes of
    both "all_to_all_v") over a mesh dim; "exchange" of a flat buffer among ranks.
    """

    name: str
    mesh_dim: int  # -1 for an exchange among `peers` of several mesh dims
    dim: int = 0  # of the tensor
    target_dim: int = 0
    op: str = ""  # the reduction
    peers: tuple[int, ...] = ()  # for an exchange, the numbers of the ranks, ascending
    sent: tuple[int, ...] = ()  # for an exchange, how many elements go to each peer
    received: tuple[int, ...] = ()  # and how many come from each
    sizes: tuple[int, ...] = ()  # the size of `dim` on each rank of the group
    target_sizes: tuple[int, ...] = ()  # and that of `target_dim`


class Action(NamedTuple):
    """The work of one rank in a step."""

    before: Local | None  # from the local tensor to what the call takes; None if it takes the local tensor
    call: Call | None  # the collective; None if there is none
    after: Local | None  # from the result of the call to the local tensor; None if it is that
    keeps: bool = False  # whether the local tensor stays as it is
    is_view: bool = False  # whether the result is a view of the local tensor


class Uneven(Exception):
    """What a rank does depends on a size that is a symbol, because it is not cut into equal chunks."""


class Place(NamedTuple):
    """Where a rank is."""

    shape: tuple[IntLikeType, ...]  # of the whole tensor
    dtype: torch.dtype  # of the tensor
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]  # of the rank
    orders: tuple[tuple[int, ...], ...]  # for each mesh dim, the coordinates of its ranks in the order of the group
    numbers: tuple[int, ...]  # the number of each rank of the mesh, in the order of its coordinates


def action(step: Step, place: Place) -> Action:
    """The work of a rank in a step; Uneven if it is not the same for all values of the symbols in the shape."""
    if step.collective == "relabel":
        dims = [split_dim(step.source[at]) for at in step.mesh_dims if place.mesh_shape[at] > 1]
        if any(dim is not None and type(place.shape[dim]) is not int for dim in dims):
            raise Uneven
        return Action(None, None, None, keeps=True)
    if step.collective == "exchange":
        return _exchange(step, place)
    mesh_dim = step.mesh_dims[0]
    source, target = step.source[mesh_dim], step.target[mesh_dim]
    whole = (*step.source[:mesh_dim], REPLICATE, *step.source[mesh_dim + 1 :])
    seen: Any = _layout.local_shape(place.shape, place.mesh_shape, whole, place.coordinate)
    if step.collective == "partial":
        assert isinstance(target, Partial)
        op = target.reduce_op
        if op in ("sum", "bxor", "product") and place.coordinate[mesh_dim] != 0:
            return Action(lambda local: neutral(local, op == "product"), None, None)
        return Action(None, None, None, keeps=True)
    if all(type(size) is int for size in seen) and not prod(seen) and step.collective != "slice":
        # Every rank of the group sees the same: nothing, which needs no collective.
        shape = tuple(map(int, _layout.local_shape(place.shape, place.mesh_shape, step.target, place.coordinate)))
        return Action(lambda local: local.new_empty(shape), None, None)
    if step.collective == "slice":
        return _slice(target, seen, place, mesh_dim)
    if isinstance(source, Partial):
        if step.collective == "all_reduce":
            return _all_reduce(source.reduce_op, place, mesh_dim)
        return _along_dim("reduce_scatter", target, seen, place, mesh_dim, source.reduce_op)
    if step.collective == "all_gather":
        return _along_dim("all_gather", source, seen, place, mesh_dim)
    return _all_to_all(step, seen, place, mesh_dim)


# ---- one rank alone --------------------------------------------------------------------------------------------------


def _runs(placement: AnyPlacement, size: Any, ranks: int, index: int) -> list[tuple[int, int]]:
    return list(_layout.piece_runs(size, placement, ranks, index))  # type: ignore[arg-type]


def _take(tensor: torch.Tensor, dim: int, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The elements of these runs of a dim, one after another; a view if it is one run."""
    if len(runs) == 1:
        return tensor.narrow(dim, *runs[0])
    return torch.cat([tensor.narrow(dim, *run) for run in runs], dim) if runs else tensor.narrow(dim, 0, 0)


def _slice(target: AnyPlacement, seen: Any, place: Place, mesh_dim: int) -> Action:
    dim = split_dim(target)
    assert dim is not None
    size, ranks = seen[dim], place.mesh_shape[mesh_dim]
    if type(size) is not int and not _is_plain(target, size, range(ranks)):
        raise Uneven
    runs = _runs(target, size, ranks, place.coordinate[mesh_dim])
    return Action(lambda local: _take(local, dim, runs), None, None, is_view=len(runs) < 2)


# ---- reductions ------------------------------------------------------------------------------------------------------


def _all_reduce(op: str, place: Place, mesh_dim: int) -> Action:
    path, dtype, ranks = reduction_path(op, place.dtype), place.dtype, place.mesh_shape[mesh_dim]
    if path == "direct":
        return Action(None, Call("all_reduce", mesh_dim, op=op), None)
    if path == "float32":
        return Action(lambda x: x.to(torch.float32), Call("all_reduce", mesh_dim, op=op), lambda x: x.to(dtype))
    wide = torch.complex64 if dtype == torch.complex32 else dtype

    def multiplied(gathered: torch.Tensor) -> torch.Tensor:
        parts = gathered.view([ranks, gathered.size(0) // ranks, *gathered.shape[1:]]).to(wide)
        return parts.prod(0).squeeze(0).to(dtype)

    return Action(lambda x: x.unsqueeze(0), Call("all_gather", mesh_dim), multiplied)


# ---- shards ----------------------------------------------------------------------------------------------------------


def _is_plain(placement: AnyPlacement, size: IntLikeType, order: Sequence[int]) -> bool:
    """Whether the pieces of `size` elements are equal stretches one after another, in the order of the group."""
    if any(at != index for at, index in enumerate(order)) or not surely_divides(size, len(order)):
        return False
    if type(placement) is Shard:
        return True
    if type(size) is not int:
        return False
    length = size // len(order)
    return all(_runs(placement, size, len(order), at) == [(at * length, length)] for at in order)


def _stretches(placement: AnyPlacement, size: int, order: Sequence[int]) -> tuple[int, ...] | None:
    """The sizes of the pieces in the order of the group, if they lie one after another in it."""
    runs = [_runs(placement, size, len(order), index) for index in order]
    flat = [run for own in runs for run in own]
    if any(start != end for (start, _), end in zip(flat, _ends(flat), strict=False)):
        return None
    return tuple(sum(length for _, length in own) for own in runs)


def _along_dim(name: str, placement: AnyPlacement, seen: Any, place: Place, mesh_dim: int, op: str = "") -> Action:
    """An all_gather of shards or a reduce_scatter to shards: the call alone where these lie one after another."""
    dim, order = split_dim(placement), place.orders[mesh_dim]
    assert dim is not None
    if _is_plain(placement, seen[dim], order):
        return Action(None, Call(name, mesh_dim, dim=dim, op=op), None)
    if type(seen[dim]) is not int:
        raise Uneven
    if (found := _stretches(placement, seen[dim], order)) is not None:
        return Action(None, Call(f"{name}_v", mesh_dim, dim=dim, op=op, sizes=found), None)
    runs = [_runs(placement, seen[dim], len(order), index) for index in order]  # in the order of the group
    sizes = [sum(length for _, length in own) for own in runs]
    most = max(sizes)
    if name == "reduce_scatter":
        size = sizes[order.index(place.coordinate[mesh_dim])]
        after: Local | None = None
        if size != most:
            after = lambda x: x.narrow(dim, 0, size).contiguous()  # noqa: E731
        return Action(
            lambda local: torch.cat([_padded(_take(local, dim, own), dim, most) for own in runs], dim),
            Call(name, mesh_dim, dim=dim, op=op),
            after,
        )
    # (where it begins in the whole, which part of the group it is in, where there, length), in the order of the whole
    pieces = sorted(
        (start, part, at, length)
        for part, own in enumerate(runs)
        for (start, length), at in zip(own, _ends(own), strict=False)
    )
    shape = [len(order), *seen]
    shape[dim + 1] = most

    def joined(gathered: torch.Tensor) -> torch.Tensor:
        parts = gathered.view(shape).unbind()
        return torch.cat([parts[part].narrow(dim, at, length) for _, part, at, length in pieces], dim)

    return Action(lambda local: _padded(local, dim, most), Call(name, mesh_dim), joined)


def _ends(runs: Sequence[tuple[int, int]]) -> Iterator[int]:
    """How many elements there are before each of these runs, and in all."""
    return accumulate((length for _, length in runs), initial=0)


def _padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    short = size - tensor.size(dim)
    if not short:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = short
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _all_to_all(step: Step, seen: Any, place: Place, mesh_dim: int) -> Action:
    source, target = step.source[mesh_dim], step.target[mesh_dim]
    order = place.orders[mesh_dim]
    a, b = split_dim(source), split_dim(target)
    assert a is not None
    assert b is not None
    if a == b:
        return _exchange(step, place)
    if _is_plain(source, seen[a], order) and _is_plain(target, seen[b], order):
        return Action(None, Call("all_to_all", mesh_dim, dim=a, target_dim=b), None)
    if type(seen[a]) is int and type(seen[b]) is int:
        sizes, wanted = _stretches(source, seen[a], order), _stretches(target, seen[b], order)
        if sizes is not None and wanted is not None:
            call = Call("all_to_all_v", mesh_dim, dim=a, target_dim=b, sizes=sizes, target_sizes=wanted)
            return Action(None, call, None)
    return _exchange(step, place)


# ---- any shards ------------------------------------------------------------------------------------------------------


class Side:
    """A mesh, whose ranks have numbers in the order of its coordinates, and what is where on it; none is Partial."""

    def __init__(self, shape: Sequence[int], mesh_shape: Sequence[int], ranks: Sequence[int], placed: Placed) -> None:
        self.shape, self.mesh_shape, self.placed = tuple(shape), tuple(mesh_shape), placed
        self.coordinates = dict(zip(ranks, product(*map(range, mesh_shape)), strict=True))

    def runs(self, coordinate: Sequence[int]) -> tuple[_layout.Runs, ...]:
        """The part of the rank at a coordinate."""
        return _layout.local_runs(self.shape, self.mesh_shape, self.placed, coordinate)

    def serves(self, sender: Sequence[int], receiver: int, number: int) -> bool:
        """Whether the rank at a coordinate sends to another rank: of several that have the same, one does.

        If the receiver is in the mesh, it takes what it can from itself; others share the work among them by their
        number, the position in the other mesh.
        """
        near = self.coordinates.get(receiver)
        return all(
            split_dim(placement) is not None or index == (number % size if near is None else near[at])
            for at, (placement, size, index) in enumerate(zip(self.placed, self.mesh_shape, sender, strict=True))
        )

    def bytes_sent(self, target: "Side", itemsize: int) -> float:
        """Bytes that a rank sends to others, on average, when the tensor moves to another mesh."""
        total = 0
        for number, (receiver, coordinate) in enumerate(target.coordinates.items()):
            want = target.runs(coordinate)
            for sender, at in self.coordinates.items():
                if sender != receiver and self.serves(at, receiver, number):
                    total += _layout.shared_count(self.runs(at), want)
        return total * itemsize / len(self.coordinates)


def _exchange(step: Step, place: Place) -> Action:
    counts = _units(place.shape, place.mesh_shape, step.source, step.target)
    # The sizes of the units, where not all are 1.
    scale = [1 if type(size) is int else size // count for size, count in zip(place.shape, counts, strict=True)]
    source, target = (Side(counts, place.mesh_shape, place.numbers, placed) for placed in (step.source, step.target))
    me = next(rank for rank, at in source.coordinates.items() if at == place.coordinate)
    fixed = [at for at in range(len(place.mesh_shape)) if at not in step.mesh_dims]
    peers = [
        rank
        for rank, coordinate in sorted(source.coordinates.items())
        if all(coordinate[at] == place.coordinate[at] for at in fixed)
    ]
    return exchange(source, target, me, peers, step.mesh_dims[0] if len(step.mesh_dims) == 1 else -1, scale)


def _units(shape: Sequence[IntLikeType], mesh_shape: Sequence[int], source: Placed, target: Placed) -> list[int]:
    """How many units of equal size each dim has, such that no piece on either side ends within one.

    An int counts as so many units of 1. A SymInt that is not cut is one unit, and one that is cut evenly as many as
    there are pieces, so that what goes where is known for all sizes.
    """
    found: list[int] = []
    for dim, size in enumerate(shape):
        if type(size) is int:
            found.append(size)
            continue
        cuts = [
            [(one, ranks) for one, ranks in zip(placed, mesh_shape, strict=True) if split_dim(one) == dim]
            for placed in (source, target)
        ]
        count = lcm(*(prod(ranks for _, ranks in own) for own in cuts))
        if any(type(one) is not Shard for own in cuts for one, _ in own) or not surely_divides(size, count):
            raise Uneven
        found.append(count)
    return found


def narrowed(local: torch.Tensor, box: _layout.Block) -> torch.Tensor:
    """The view of a box of a local tensor."""
    for dim, (begin, length) in enumerate(zip(box.source, box.shape, strict=True)):
        if length != local.size(dim):
            local = local.narrow(dim, begin, length)
    return local


def exchange(
    source: Side, target: Side, me: int, ranks: Sequence[int], mesh_dim: int = -1, scale: Sequence[Any] = ()
) -> Action:
    """The work of a rank that sends each of `ranks` what that one needs of its part of the source, and puts what comes
    into its part of the target. It is in one of the meshes, or in both.

    The ranks ascend; they are those of a mesh dim, or -1. What the sides count are units of the sizes `scale`, or of 1.
    """

    def scaled(numbers: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(mul, numbers, scale)) if scale else tuple(map(int, numbers))

    def boxes_of(have: Sequence[_layout.Runs], want: Sequence[_layout.Runs]) -> Boxes:
        return [_layout.Block(*map(scaled, box)) for box in _layout.blocks(have, want)]

    numbers = {rank: number for number, rank in enumerate(target.coordinates)}
    sends: list[Boxes] = [[] for _ in ranks]
    comes: list[Boxes] = [[] for _ in ranks]
    shape: tuple[Any, ...] = (0,)
    here, there = source.coordinates.get(me), target.coordinates.get(me)
    if here is not None:
        have = source.runs(here)
        for own, rank in zip(sends, ranks, strict=True):
            if rank in numbers and source.serves(here, rank, numbers[rank]):
                own += boxes_of(have, target.runs(target.coordinates[rank]))
    if there is not None:
        want = target.runs(there)
        for own, rank in zip(comes, ranks, strict=True):
            at = source.coordinates.get(rank)
            if at is not None and source.serves(at, me, numbers[me]):
                own += boxes_of(source.runs(at), want)
        shape = scaled(_layout.local_shape(target.shape, target.mesh_shape, target.placed, there))
    boxes = list(chain.from_iterable(sends))
    places: list[tuple[int, int, Any, tuple[int, ...]]] = []
    begin = 0
    for box in chain.from_iterable(comes):
        where = tuple(slice(start, start + size) for start, size in zip(box.target, box.shape, strict=True))
        places.append((begin, prod(box.shape), where, box.shape))
        begin += prod(box.shape)

    def packed(local: torch.Tensor) -> torch.Tensor:
        if not boxes:
            return local.new_empty(0)
        parts = [narrowed(local, box).reshape(-1) for box in boxes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def unpacked(flat: torch.Tensor) -> torch.Tensor:
        if len(places) == 1 and places[0][3] == shape:
            return flat.view(shape)
        out = flat.new_empty(shape)
        for begin, count, where, size in places:
            out[where].copy_(flat.narrow(0, begin, count).view(size))
        return out

    def total(own: Boxes) -> int:
        return sum(prod(box.shape) for box in own)

    sent, received = tuple(map(total, sends)), tuple(map(total, comes))
    return Action(packed, Call("exchange", mesh_dim, peers=tuple(ranks), sent=sent, received=received), unpacked)
