"""The cheapest way from one tuple of placements to another on one mesh. Pure: no tensor, no rank, no communication.

A step changes one mesh dim, but for `exchange`, which changes several at once:

    all_gather       Shard -> Replicate
    all_to_all       Shard(a) -> Shard(b)
    all_reduce       Partial -> Replicate
    reduce_scatter   Partial -> Shard
    slice            Replicate -> Shard, on this rank alone
    partial          Replicate -> Partial, on this rank alone
    exchange         any shards -> any others: each rank sends each other one what that one needs of it
    move             the same to another mesh

Mesh dims that split one dim of the tensor are nested: a step changes only the innermost of them, since the pieces of
the inner ones depend on it. Partials of one mesh dim after another are reduced from the last to the first where the
order matters (a sum of maxima is not a maximum of sums).

Every number that a decision depends on is the same on all ranks.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product
from math import inf, prod
from typing import Final, TypeAlias

import torch

from phalanx.dtensor import _layout
from phalanx.dtensor._rules.cost import CostModel
from phalanx.dtensor.placement_types import AnyPlacement, Partial, Replicate, Shard, split_dim

Placed: TypeAlias = tuple[AnyPlacement, ...]

REPLICATE: Final = Replicate()
# A search that has looked at so many placements gives up, and undoes everything and splits anew.
_MOST_STATES = 600
# Up to so many ranks the bytes of an exchange are counted; above, they are estimated.
_MOST_COUNTED = 16
_COMMUTING = frozenset({("sum", "avg"), ("avg", "sum")})
# Steps that send nothing.
LOCAL: Final = frozenset({"slice", "partial", "relabel"})


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a transfer."""

    collective: str  # see the text of this module; "relabel" where only the placement has another name
    mesh_dims: tuple[int, ...]  # the mesh dims it works on
    source: Placed  # the placements before it
    target: Placed  # the placements after it
    bytes_per_rank: int  # bytes that a rank sends, on average
    cost_us: float  # the estimate

    def __str__(self) -> str:
        where = ", ".join(map(str, self.mesh_dims))
        change = f"({', '.join(map(str, self.source))}) -> ({', '.join(map(str, self.target))})"
        return (
            f"{self.collective:<14} mesh dim {where}: {change}, {self.bytes_per_rank:,} bytes per rank, "
            f"{self.cost_us:.1f} us"
        )


# ---- reductions ------------------------------------------------------------------------------------------------------


def reduction_path(op: str, dtype: torch.dtype) -> str:
    """How a reduction of a dtype is done; a ValueError if it has no meaning.

    "direct": by the collective. "float32": of 8-bit floats, which are reduced as float32 and rounded once. "gather": of
    a product of complex numbers, which the collective lacks: all terms go to all ranks.
    """
    if dtype.is_complex and op in ("min", "max"):
        raise ValueError(
            f"redistribute: Partial({op!r}) is not defined for {dtype}, because complex numbers have no order"
        )
    if dtype.is_complex and op == "product":
        return "gather"
    if dtype.is_floating_point and dtype.itemsize == 1:
        return "float32"
    return "direct"


def _may_reduce(placed: Placed, mesh_dim: int) -> bool:
    """Whether the Partial of a mesh dim may be reduced now: not before one further in that does not commute with it."""
    own = placed[mesh_dim]
    assert isinstance(own, Partial)
    return all(
        type(other) is not Partial or other is own or (own.reduce_op, other.reduce_op) in _COMMUTING
        for other in placed[mesh_dim + 1 :]
    )


class Planner:
    """The facts of the whole tensor and the mesh, and the prices of steps."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, mesh_shape: Sequence[int], model: CostModel) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.mesh_shape = tuple(mesh_shape)
        self.model = model
        self.whole_bytes = prod(self.shape) * dtype.itemsize

    # ---- one step ---------------------------------------------------------------------------------------------------

    def is_innermost(self, placed: Placed, mesh_dim: int, dim: int) -> bool:
        """Whether no later mesh dim splits a dim of the tensor."""
        return all(
            split_dim(other) != dim or size == 1
            for other, size in zip(placed[mesh_dim + 1 :], self.mesh_shape[mesh_dim + 1 :], strict=True)
        )

    def left_sizes(self, placed: Placed, mesh_dim: int, dim: int) -> list[int]:
        """The sizes that the mesh dims before one may leave of a dim of the tensor: a few, ascending."""
        sizes = {self.shape[dim]}
        for other, ranks in zip(placed[:mesh_dim], self.mesh_shape, strict=False):
            if split_dim(other) == dim:
                sizes = {int(n) for size in sizes for n in _layout.piece_sizes(size, other, ranks)}  # type: ignore[arg-type]
        return sorted(sizes)

    def _local_bytes(self, placed: Placed) -> float:
        """Bytes of a local tensor, on average."""
        return self.whole_bytes / prod(
            ranks for one, ranks in zip(placed, self.mesh_shape, strict=True) if split_dim(one) is not None
        )

    def _waste(self, placed: Placed, mesh_dim: int, placement: AnyPlacement) -> float:
        """How many times longer it takes than with equal pieces, because the longest decides."""
        dim = split_dim(placement)
        assert dim is not None
        most = 1.0
        for size in self.left_sizes(placed, mesh_dim, dim):
            pieces = _layout.piece_sizes(size, placement, self.mesh_shape[mesh_dim])  # type: ignore[arg-type]
            if size:
                most = max(most, int(max(pieces)) * len(pieces) / size)
        return most

    def _longest(self, placed: Placed, target: Placed, mesh_dim: int) -> float:
        """`_waste` of the collective, if any, that changes one mesh dim."""
        now, then = placed[mesh_dim], target[mesh_dim]
        if type(then) is Replicate and split_dim(now) is not None:
            return self._waste(placed, mesh_dim, now)
        if type(now) is Partial and split_dim(then) is not None:
            return self._waste(target, mesh_dim, then)
        return 1.0

    def _same_pieces(self, placed: Placed, mesh_dim: int, target: AnyPlacement) -> bool:
        """Whether two shards of one mesh dim are the same under another name."""
        source, ranks = placed[mesh_dim], self.mesh_shape[mesh_dim]
        dim = split_dim(source)
        return (
            dim is not None
            and dim == split_dim(target)
            and all(
                _layout.piece_runs(size, source, ranks, i) == _layout.piece_runs(size, target, ranks, i)  # type: ignore[arg-type]
                for size in self.left_sizes(placed, mesh_dim, dim)
                for i in range(ranks)
            )
        )

    def fits(self, placed: Placed) -> bool:
        """Whether the sizes of a SizedShard add up to what is left for it."""
        try:
            _layout.check_sizes(self.shape, self.mesh_shape, placed)
        except ValueError:
            return False
        return True

    def step(self, placed: Placed, mesh_dim: int, target: AnyPlacement) -> Step | None:
        """The step that changes one mesh dim, or None if there is none."""
        source, ranks = placed[mesh_dim], self.mesh_shape[mesh_dim]
        after = (*placed[:mesh_dim], target, *placed[mesh_dim + 1 :])
        left, new = split_dim(source), split_dim(target)
        if left is not None and not self.is_innermost(placed, mesh_dim, left):
            return None
        if new is not None and not (self.is_innermost(placed, mesh_dim, new) and self.fits(after)):
            return None
        # Bytes of the tensor that the mesh dim sees, on average: the others have cut it.
        seen = self._local_bytes((*placed[:mesh_dim], REPLICATE, *placed[mesh_dim + 1 :]))
        sent = (ranks - 1) / ranks * seen
        copied, slow = 0.0, 1.0  # slow: how many times more than the average the busiest rank sends
        if type(source) is Replicate:
            collective, sent = ("partial" if new is None else "slice"), 0.0
            copied = seen if new is None else seen / ranks
        elif type(target) is Partial:
            return None
        elif type(source) is Partial:
            if not _may_reduce(placed, mesh_dim):
                return None
            path = reduction_path(source.reduce_op, self.dtype)
            if new is None:
                collective = "all_reduce"
                sent *= {"direct": 2.0, "gather": float(ranks), "float32": 8.0}[path]
            elif path != "direct":
                return None
            else:
                collective, sent = "reduce_scatter", sent * self._waste(after, mesh_dim, target)
                copied = 0.0 if new == 0 else seen
        elif new is None:
            collective, sent = "all_gather", sent * self._waste(placed, mesh_dim, source)
            copied = 0.0 if left == 0 else seen
        elif self._same_pieces(placed, mesh_dim, target):
            return Step("relabel", (mesh_dim,), placed, after, 0, 0.0)
        else:
            collective, sent = "all_to_all", sent / ranks
            copied = 2 * seen / ranks
            slow = max(self._waste(placed, mesh_dim, source), self._waste(after, mesh_dim, target))
        cost = copied / self.model.copy_bytes_per_us
        if collective not in LOCAL:
            dim = self.model.mesh[mesh_dim]
            cost += dim.latency_us + slow * sent / dim.bytes_per_us
        return Step(collective, (mesh_dim,), placed, after, round(sent), cost)

    def exchange(self, placed: Placed, target: Placed) -> Step | None:
        """The step to the target, or as near to it as shards go: Partials stay, and none is made."""
        after = tuple(
            now if type(now) is Partial else (REPLICATE if type(then) is Partial else then)
            for now, then in zip(placed, target, strict=True)
        )
        sent, most, dims = self._traffic(placed, after)
        if not dims or not self.fits(after):
            return None
        models = [self.model.mesh[mesh_dim] for mesh_dim in dims]
        # The group is larger than that of a mesh dim, and everything is packed and unpacked.
        cost = sum(one.latency_us for one in models) / len(models) * 1.25 + most / min(m.bytes_per_us for m in models)
        cost += (self._local_bytes(placed) + self._local_bytes(after)) / self.model.copy_bytes_per_us
        return Step("exchange", dims, placed, after, round(sent), cost)

    def _traffic(self, placed: Placed, after: Placed) -> tuple[float, float, tuple[int, ...]]:
        """(bytes that a rank sends in an exchange on average, and at most, the mesh dims over which any are sent)."""
        if prod(self.mesh_shape) > _MOST_COUNTED:
            sent = self._local_bytes(after)
            return sent, sent, exchange_dims(placed, after, self.mesh_shape)
        ranks = list(product(*map(range, self.mesh_shape)))
        source = [_layout.local_runs(self.shape, self.mesh_shape, placed, rank) for rank in ranks]
        target = [_layout.local_runs(self.shape, self.mesh_shape, after, rank) for rank in ranks]
        totals: list[int] = []
        dims: set[int] = set()
        for sender, have in zip(ranks, source, strict=True):
            totals.append(0)
            for receiver, want in zip(ranks, target, strict=True):
                if sender != receiver and serves(placed, sender, receiver):
                    shared = _layout.shared_count(have, want)
                    if shared:
                        totals[-1] += shared
                        dims.update(at for at, (a, b) in enumerate(zip(sender, receiver, strict=True)) if a != b)
        itemsize = self.dtype.itemsize
        return sum(totals) * itemsize / len(ranks), float(max(totals) * itemsize), tuple(sorted(dims))

    # ---- all steps --------------------------------------------------------------------------------------------------

    def _choices(self, source: Placed, target: Placed) -> list[list[AnyPlacement]]:
        """The placements that each mesh dim may have on the way."""
        dims = sorted({dim for one in (*source, *target) if (dim := split_dim(one)) is not None})
        if sum(type(one) is Partial for one in source) > 1 and self.shape:
            # A sum over several mesh dims is cheaper where the outer one is scattered over a dim first.
            even = [n for n in range(len(self.shape)) if all(self.shape[n] % size == 0 for size in self.mesh_shape)]
            dims = sorted({*dims, *even[:1]})
        found: list[list[AnyPlacement]] = []
        for now, then in zip(source, target, strict=True):
            own: list[AnyPlacement] = [then, REPLICATE, *(Shard(dim) for dim in dims)]
            found.append([one for at, one in enumerate(own) if one not in own[:at] and one != now])
        return found

    def plan(self, source: Placed, target: Placed) -> tuple[Step, ...]:
        """The cheapest steps from one tuple of placements to another."""
        # Where a mesh dim has one rank, all placements are one.
        start = tuple(
            then if size == 1 else now for now, then, size in zip(source, target, self.mesh_shape, strict=True)
        )
        first: tuple[Step, ...] = ()
        if start != source:
            dims = tuple(at for at, (now, then) in enumerate(zip(source, start, strict=True)) if now != then)
            first = (Step("relabel", dims, source, start, 0, 0.0),)
        return first + self._search(start, target)

    def _search(self, start: Placed, target: Placed) -> tuple[Step, ...]:
        changes = [at for at, (now, then) in enumerate(zip(start, target, strict=True)) if now != then]
        if not changes:
            return ()
        if len(changes) == 1:
            direct = self.step(start, changes[0], target[changes[0]])
            # Nothing is cheaper than one step, but where pieces of very different lengths are made equal.
            if direct is not None and self._longest(start, target, changes[0]) <= 1.25:
                return (direct,)
        choices = self._choices(start, target)
        order = count()
        best: dict[Placed, float] = {start: 0.0}
        heap: list[tuple[float, int, Placed, tuple[Step, ...]]] = [(0.0, next(order), start, ())]
        done: set[Placed] = set()
        while heap and len(done) < _MOST_STATES:
            cost, _, placed, steps = heapq.heappop(heap)
            if placed == target:
                return steps
            if placed in done:
                continue
            done.add(placed)
            for step in self._next(start, placed, target, choices):
                total = cost + step.cost_us
                if total < best.get(step.target, inf):
                    best[step.target] = total
                    heapq.heappush(heap, (total, next(order), step.target, (*steps, step)))
        return self._undo_all(start, target)

    def _next(self, start: Placed, placed: Placed, target: Placed, choices: list[list[AnyPlacement]]) -> Iterator[Step]:
        for mesh_dim, own in enumerate(choices):
            if self.mesh_shape[mesh_dim] > 1:
                for choice in own:
                    step = None if choice == placed[mesh_dim] else self.step(placed, mesh_dim, choice)
                    if step is not None:
                        yield step
        # From where only Partials were reduced: another exchange is not better after other steps.
        if all(now == was or type(was) is Partial for now, was in zip(placed, start, strict=True)):
            step = self.exchange(placed, target)
            if step is not None:
                yield step

    def _undo_all(self, start: Placed, target: Placed) -> tuple[Step, ...]:
        """To Replicate from the last mesh dim on, and from there to the target from the first one on."""
        steps: list[Step] = []
        placed = start
        order = [*((at, REPLICATE) for at in reversed(range(len(start)))), *enumerate(target)]
        for mesh_dim, wanted in order:
            if placed[mesh_dim] != wanted:
                step = self.step(placed, mesh_dim, wanted)
                assert step is not None, (placed, mesh_dim, wanted)
                steps.append(step)
                placed = step.target
        return tuple(steps)


# ---- who sends to whom -----------------------------------------------------------------------------------------------


def serves(source: Placed, sender: Sequence[int], receiver: Sequence[int]) -> bool:
    """Whether one rank of a mesh sends what another needs: one of the ranks that have it does."""
    return all(
        split_dim(placement) is not None or a == b for placement, a, b in zip(source, sender, receiver, strict=True)
    )


def exchange_dims(source: Placed, target: Placed, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The mesh dims over which an exchange may send.

    An exchange may change the mesh dims whose placement changes, and later ones that split the same dims. It sends over
    those of them that the source splits: over others each rank has what its neighbours have.
    """
    found = {at for at, (now, then) in enumerate(zip(source, target, strict=True)) if now != then}
    changed = {dim for at in found for one in (source[at], target[at]) if (dim := split_dim(one)) is not None}
    first = min(found, default=len(source))
    for at in range(first, len(source)):
        if split_dim(source[at]) in changed or split_dim(target[at]) in changed:
            found.add(at)
    return tuple(at for at in sorted(found) if mesh_shape[at] > 1 and split_dim(source[at]) is not None)
