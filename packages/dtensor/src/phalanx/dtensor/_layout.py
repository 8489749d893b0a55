"""Index arithmetic on shapes, mesh shapes and placements: which rank has which elements of a tensor. No mesh, no
tensor, no communication.

Placements split in the order of the mesh dims: each splits what the earlier ones left of its dim. For each dim a rank
has *runs*: (start, length) of stretches of global indices, ascending and disjoint, whose elements lie one after the
other in the local tensor. Shard and SizedShard leave one run of each, StridedShard up to `split_factor`. A local tensor
has the product of the runs of its dims.

Sizes may be SymInts in the functions that give shapes and runs (then runs may be empty, and their number depends on the
placements alone); `overlap` and `blocks` need ints. Shapes and placements are taken as `DTensorSpec` checks them: one
placement for each mesh dim, dims in range and not negative.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

from torch.types import IntLikeType

from phalanx.dtensor._torch_compat import surely_divides, sym_max, sym_min
from phalanx.dtensor.placement_types import AnyPlacement, AnyShard, Shard, SizedShard, split_dim

Run: TypeAlias = tuple[IntLikeType, IntLikeType]
Runs: TypeAlias = tuple[Run, ...]
Placements: TypeAlias = Sequence[AnyPlacement]


class Block(NamedTuple):
    """A box of elements that two local tensors have in common."""

    source: tuple[int, ...]  # where it begins in the local tensor of the source, for each dim
    target: tuple[int, ...]  # and in that of the target
    shape: tuple[int, ...]


# ---- one split of one dim -------------------------------------------------------------------------------------------


def _min(a: IntLikeType, b: IntLikeType) -> IntLikeType:
    return min(a, b) if type(a) is int and type(b) is int else sym_min(a, b)


def _max(a: IntLikeType, b: IntLikeType) -> IntLikeType:
    return max(a, b) if type(a) is int and type(b) is int else sym_max(a, b)


def chunk(size: IntLikeType, num_chunks: int, index: int) -> Run:
    """(start, length) of a chunk of `size` elements, as torch.chunk cuts them, with empty ones at the end."""
    if type(size) is int:
        whole = -(-size // num_chunks)
        begin = min(size, whole * index)
        return begin, min(size - begin, whole)
    if surely_divides(size, num_chunks):
        length = size // num_chunks
        return length * index, length
    length = (size + num_chunks - 1) // num_chunks
    start = _min(size, length * index)
    return start, _min(size - start, length)


def piece_runs(size: IntLikeType, placement: AnyShard, num_pieces: int, index: int) -> Runs:
    """The runs of piece `index` of the `num_pieces` into which a placement splits `size` elements.

    Without empty runs, and with neighbours joined, where the size is an int.
    """
    if isinstance(placement, Shard):
        return _tidy((chunk(size, num_pieces, index),))
    if isinstance(placement, SizedShard):
        return _tidy(((sum(placement.sizes[:index]), placement.sizes[index]),))
    firsts = [chunk(size, placement.split_factor, i) for i in range(placement.split_factor)]
    inner = [chunk(length, num_pieces, index) for _, length in firsts]
    return _tidy(tuple((start + offset, length) for (start, _), (offset, length) in zip(firsts, inner, strict=True)))


def piece_size(size: IntLikeType, placement: AnyShard, num_pieces: int, index: int) -> IntLikeType:
    """The number of elements of piece `index` of the `num_pieces` into which a placement splits `size` elements."""
    if isinstance(placement, Shard):
        return chunk(size, num_pieces, index)[1]
    if isinstance(placement, SizedShard):
        return placement.sizes[index]
    factor = placement.split_factor
    if type(size) is not int:
        if surely_divides(size, factor * num_pieces):
            return size // num_pieces
        return sum(length for _, length in piece_runs(size, placement, num_pieces, index))
    if size == 0:
        return 0
    first = -(-size // factor)
    whole, rest = divmod(size, first)
    return whole * chunk(first, num_pieces, index)[1] + chunk(rest, num_pieces, index)[1]


def piece_sizes(size: IntLikeType, placement: AnyShard, num_pieces: int) -> tuple[IntLikeType, ...]:
    """The sizes of all the pieces into which a placement splits `size` elements: what a gather or a scatter moves."""
    return tuple(piece_size(size, placement, num_pieces, index) for index in range(num_pieces))


def _tidy(runs: Runs) -> Runs:
    """Without empty runs, and with neighbours joined; runs with a SymInt stay, since what they are is not known."""
    tidy: list[Run] = []
    for start, length in runs:
        if type(start) is not int or type(length) is not int:
            return runs
        if not length:
            continue
        if tidy and tidy[-1][0] + tidy[-1][1] == start:
            tidy[-1] = (tidy[-1][0], tidy[-1][1] + length)
        else:
            tidy.append((start, length))
    return tuple(tidy)


def select(runs: Runs, parts: Runs) -> Runs:
    """The elements of `runs` at the positions `parts`, as runs of global indices."""
    if len(runs) == 1:
        begin = runs[0][0]
        return _tidy(tuple((begin + start, length) for start, length in parts))
    chosen: list[Run] = []
    for start, length in parts:
        position: IntLikeType = 0
        for begin, size in runs:
            low, high = _max(start, position), _min(start + length, position + size)
            chosen.append((begin + low - position, _max(high - low, 0)))
            position = position + size
    return _tidy(tuple(chosen))


# ---- a whole tensor -------------------------------------------------------------------------------------------------


def local_shape(
    shape: Sequence[IntLikeType], mesh_shape: Sequence[int], placements: Placements, coordinate: Sequence[int]
) -> tuple[IntLikeType, ...]:
    """The shape of the local tensor at a coordinate of the mesh."""
    sizes = list(shape)
    for num_pieces, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        dim = split_dim(placement)
        if dim is not None:
            sizes[dim] = piece_size(sizes[dim], placement, num_pieces, index)  # type: ignore[arg-type]
    return tuple(sizes)


def local_runs(
    shape: Sequence[IntLikeType], mesh_shape: Sequence[int], placements: Placements, coordinate: Sequence[int]
) -> tuple[Runs, ...]:
    """For each dim, the runs of global indices that the local tensor at a coordinate of the mesh has, in its order."""
    sizes = list(shape)
    runs: list[Runs] = [_tidy(((0, size),)) for size in shape]
    for num_pieces, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        dim = split_dim(placement)
        if dim is not None:
            parts = piece_runs(sizes[dim], placement, num_pieces, index)  # type: ignore[arg-type]
            runs[dim] = select(runs[dim], parts)
            sizes[dim] = piece_size(sizes[dim], placement, num_pieces, index)  # type: ignore[arg-type]
    return tuple(runs)


def global_shape(
    local: Sequence[IntLikeType], mesh_shape: Sequence[int], placements: Placements
) -> tuple[IntLikeType, ...]:
    """The shape of the whole tensor, if every rank has a local tensor of the same shape as this one.

    The size of a dim that a SizedShard splits first is the sum of its sizes.
    """
    sizes = list(local)
    for num_pieces, placement in zip(reversed(mesh_shape), reversed(placements), strict=True):
        dim = split_dim(placement)
        if isinstance(placement, SizedShard):
            sizes[placement.dim] = sum(placement.sizes)
        elif dim is not None:
            sizes[dim] = sizes[dim] * num_pieces
    return tuple(sizes)


def check_sizes(shape: Sequence[IntLikeType], mesh_shape: Sequence[int], placements: Placements) -> None:
    """Raise a ValueError unless every SizedShard has a size for each rank, and they add up to what the earlier mesh
    dims leave.
    """
    for mesh_dim, placement in enumerate(placements):
        if type(placement) is not SizedShard:
            continue
        if len(placement.sizes) != mesh_shape[mesh_dim]:
            raise ValueError(
                f"{placement!r} has {len(placement.sizes)} sizes, and mesh dim {mesh_dim} has {mesh_shape[mesh_dim]} "
                "ranks: give one size for each"
            )
        earlier = [
            range(num_pieces) if split_dim(other) == placement.dim else range(1)
            for num_pieces, other in zip(mesh_shape[:mesh_dim], placements[:mesh_dim], strict=True)
        ]
        for coordinate in product(*earlier):
            left = local_shape(shape, mesh_shape[:mesh_dim], placements[:mesh_dim], coordinate)[placement.dim]
            if left != sum(placement.sizes):
                whose = f"dim {placement.dim} of shape {tuple(shape)}"
                if any(len(ranks) > 1 for ranks in earlier):
                    whose = f"the piece of {whose} at {coordinate} of the earlier mesh dims"
                raise ValueError(
                    f"the sizes of {placement!r} add up to {sum(placement.sizes)}, but {whose} has {left} elements: "
                    "they must add up to that"
                )


# ---- two local tensors of one tensor ---------------------------------------------------------------------------------


def overlap(source: Runs, target: Runs) -> list[tuple[int, int, int]]:
    """The common parts of a dim of two tensors: (position in the source, position in the target, length), ascending."""
    shared: list[tuple[int, int, int]] = []
    i = j = at_source = at_target = 0
    while i < len(source) and j < len(target):
        (a, a_length), (b, b_length) = source[i], target[j]
        low, high = max(a, b), min(a + a_length, b + b_length)
        if low < high:
            shared.append((int(at_source + low - a), int(at_target + low - b), int(high - low)))
        if a + a_length <= b + b_length:
            i, at_source = i + 1, int(at_source + a_length)
        else:
            j, at_target = j + 1, int(at_target + b_length)
    return shared


def shared_count(source: Sequence[Runs], target: Sequence[Runs]) -> int:
    """The number of elements that two local tensors of one global tensor have in common."""
    return prod(sum(length for _, _, length in overlap(a, b)) for a, b in zip(source, target, strict=True))


def blocks(source: Sequence[Runs], target: Sequence[Runs]) -> Iterator[Block]:
    """The boxes of elements that two local tensors of one global tensor have in common, each element in one of them.

    Both are given by the runs of each dim, from `local_runs`; meshes and placements may be different.
    """
    for parts in product(*(overlap(a, b) for a, b in zip(source, target, strict=True))):
        yield Block(
            tuple(part[0] for part in parts), tuple(part[1] for part in parts), tuple(part[2] for part in parts)
        )


def boxes(runs: Sequence[Runs]) -> Iterator[Block]:
    """The boxes of the whole tensor (the target) that a local tensor (the source) has, from the runs of its dims."""
    return blocks(runs, [((0, sum(own[-1])),) if own else () for own in runs])  # as far as its last run goes


# ---- strides --------------------------------------------------------------------------------------------------------


def contiguous_stride(shape: Sequence[IntLikeType]) -> tuple[IntLikeType, ...]:
    """The stride of a contiguous tensor, as torch gives it: a dim without elements counts as one of size 1."""
    stride: list[IntLikeType] = []
    step: IntLikeType = 1
    for size in reversed(shape):
        stride.append(step)
        step = step * _max(size, 1)
    return tuple(reversed(stride))


def stride_like(
    shape: Sequence[IntLikeType], model_shape: Sequence[IntLikeType], model_stride: Sequence[IntLikeType]
) -> tuple[IntLikeType, ...]:
    """The stride of a tensor without gaps whose dims lie in memory in the same order as those of a model.

    A local tensor of a transposed tensor is transposed too, and the other way round. A dim along which the model, a
    tensor with as many dims, repeats itself (stride 0) does so here.
    """
    if tuple(model_stride) == contiguous_stride(model_shape):
        return contiguous_stride(shape)
    stride: list[IntLikeType] = [0] * len(shape)
    step: IntLikeType = 1
    # Dims of equal stride (one of them has one element): the later one is the inner one, as in a contiguous tensor.
    for dim in sorted(range(len(shape)), key=lambda dim: (model_stride[dim], -dim)):
        if model_stride[dim] != 0 or model_shape[dim] == 0:
            stride[dim] = step
            step = step * _max(shape[dim], 1)
    return tuple(stride)


def global_stride(
    whole: Sequence[IntLikeType], local: Sequence[IntLikeType], local_stride: Sequence[IntLikeType]
) -> tuple[IntLikeType, ...]:
    """The stride that a whole tensor says it has, from the shapes of both and the stride of a local tensor.

    Its dims lie in the order of those of the local tensor; where this has gaps, so has the whole, as in torch.
    """
    if tuple(local_stride) == stride_like(local, local, local_stride):
        return stride_like(whole, local, local_stride)
    stride = list(local_stride)
    for dim, (size, part) in enumerate(zip(whole, local, strict=True)):
        factor = (size + part - 1) // part if part else 1
        if factor != 1:
            for other in range(len(stride)):
                if other != dim and stride[other] >= stride[dim]:
                    stride[other] = stride[other] * factor
    return tuple(stride)
