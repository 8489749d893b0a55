"""Simulated ranks: a tensor cut by its placements, and put together again. Written apart from what it verifies."""

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import Any

import torch

from phalanx.dtensor.placement_types import Partial, Placement, Replicate, Shard

Coordinate = tuple[int, ...]

# How many times the epsilon of its dtype a value may be off, relative to the largest.
TOLERATED = 1e3


class Mismatch(Exception):
    """What the ranks have does not fit together, or is not what one process has."""


def coordinates(mesh_shape: Sequence[int]) -> Iterable[Coordinate]:
    """Where the ranks of a mesh are, in order."""
    return product(*map(range, mesh_shape))


def chunks(tensor: torch.Tensor, dim: int, count: int) -> list[torch.Tensor]:
    """`count` pieces of a tensor, as torch.chunk makes them, the missing ones empty."""
    pieces = list(torch.chunk(tensor, count, dim)) if tensor.shape[dim] else []
    empty = tensor.narrow(dim, 0, 0)
    return pieces + [empty] * (count - len(pieces))


def _size(tensor: torch.Tensor) -> torch.Tensor:
    """For each value a power of 2 near it; for a 0 one near the largest, but not above 1."""
    size = torch.where(torch.isfinite(tensor), tensor, torch.zeros_like(tensor)).abs()
    largest = min(1.0, float(size.max())) if size.numel() else 1.0
    exponent = torch.frexp(torch.where(size == 0, torch.full_like(size, largest), size)).exponent
    return torch.ldexp(torch.ones_like(size), exponent.clamp(-60, 60))


def terms(tensor: torch.Tensor, op: str, count: int, random: torch.Generator) -> list[torch.Tensor]:
    """`count` random tensors of which `tensor` is the reduction by `op`."""
    shape, dtype = tensor.shape, tensor.dtype
    owner = torch.randint(count, shape, generator=random)
    if dtype == torch.bool:
        op = {"product": "min"}.get(op, op)
    signed = dtype.is_floating_point or dtype.is_complex or dtype in (torch.int16, torch.int32, torch.int64, torch.int8)
    if op == "sum":
        # Eighths of a power of 2 near each value, so that little is lost; none where the value is not finite.
        steps = torch.randint(-16, 17, (count - 1, *shape), generator=random)
        if not signed:
            return [torch.where(owner == index, tensor, torch.zeros_like(tensor)) for index in range(count)]
        inexact = tensor.is_floating_point() or tensor.is_complex()
        found = (steps / 8 * _size(tensor) if inexact else steps // 4).to(dtype)
        if inexact:
            found = torch.where(torch.isfinite(tensor), found, torch.zeros_like(found))
        return [*found.unbind(), tensor - found.sum(0).to(dtype)]
    if op == "product":
        if dtype.is_floating_point or dtype.is_complex:
            powers = torch.tensor([0.5, 1.0, 2.0, -1.0])[torch.randint(4, (count - 1, *shape), generator=random)].to(
                dtype
            )
            return [*powers.unbind(), tensor / powers.prod(0)]
        one = torch.ones_like(tensor)
        return [torch.where(owner == index, tensor, one) for index in range(count)]
    if op in ("max", "min"):
        low = op == "max"
        found = torch.empty((count, *shape), dtype=dtype)
        for index in range(count):
            if dtype == torch.bool:
                other = torch.full_like(tensor, not low)
            elif dtype.is_floating_point:
                gap = torch.randint(0, 8, shape, generator=random).to(dtype) * 1.5
                gap[gap > 9] = torch.inf
                other = tensor - gap if low else tensor + gap
                # One NaN is enough for the whole to be NaN.
                other = torch.where(torch.isnan(tensor), torch.ones_like(tensor), other)
                other = torch.where(torch.isnan(other), tensor, other)
            else:
                gap = torch.randint(0, 5, shape, generator=random).to(dtype)
                limit = torch.iinfo(dtype).min if low else torch.iinfo(dtype).max
                moved = tensor - gap if low else tensor + gap
                wrapped = moved > tensor if low else moved < tensor
                other = torch.where(wrapped, torch.full_like(tensor, limit), moved)
            found[index] = torch.where(owner == index, tensor, other)
        return list(found.unbind())
    raise ValueError(f"the verifier cannot make terms of a reduction by {op}")


def cut(
    tensor: torch.Tensor, placements: Sequence[Placement], mesh_shape: Sequence[int], random: torch.Generator
) -> dict[Coordinate, torch.Tensor]:
    """The local tensor of every rank."""
    pieces: dict[Coordinate, torch.Tensor] = {(): tensor}
    for placement, count in zip(placements, mesh_shape, strict=True):
        grown: dict[Coordinate, torch.Tensor] = {}
        for coordinate, piece in pieces.items():
            if isinstance(placement, Shard):
                parts = chunks(piece, placement.dim, count)
            elif isinstance(placement, Partial):
                parts = terms(piece, placement.reduce_op, count, random)
            else:
                parts = [piece] * count
            for index, part in enumerate(parts):
                grown[(*coordinate, index)] = part
        pieces = grown
    return {coordinate: piece.clone(memory_format=torch.contiguous_format) for coordinate, piece in pieces.items()}


def _reduce(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    total = parts[0]
    functions: dict[str, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
    for part in parts[1:]:
        total = functions[op](total, part)
    return total


def put_together(
    pieces: dict[Coordinate, torch.Tensor],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    shape: torch.Size,
    coarsest: float = 0.0,
) -> torch.Tensor:
    """The whole tensor of which every rank has a part.

    Args:
        pieces: The local tensor of every rank.
        placements: One for each mesh dim.
        mesh_shape: The mesh.
        shape: The shape that the whole must have.
        coarsest: As for `compare`.

    Raises:
        Mismatch: A part has another shape than its rank must have, or replicas differ.
    """
    probe = torch.empty(shape, device="meta")
    for coordinate in coordinates(mesh_shape):
        want = probe
        for placement, count, index in zip(placements, mesh_shape, coordinate, strict=True):
            if isinstance(placement, Shard):
                want = chunks(want, placement.dim, count)[index]
        if pieces[coordinate].shape != want.shape:
            raise Mismatch(f"rank {coordinate} has shape {list(pieces[coordinate].shape)}, not {list(want.shape)}")
    for level in reversed(range(len(mesh_shape))):
        placement = placements[level]
        shrunk: dict[Coordinate, torch.Tensor] = {}
        for coordinate in coordinates(mesh_shape[:level]):
            parts = [pieces[(*coordinate, index)] for index in range(mesh_shape[level])]
            if isinstance(placement, Shard):
                shrunk[coordinate] = torch.cat(parts, placement.dim)
            elif isinstance(placement, Partial):
                shrunk[coordinate] = _reduce(parts, placement.reduce_op)
            elif isinstance(placement, Replicate):
                for part in parts[1:]:
                    compare(part, parts[0], "a replica", coarsest)
                shrunk[coordinate] = parts[0]
        pieces = shrunk
    return pieces[()]


def compare(got: torch.Tensor, want: torch.Tensor, what: str, coarsest: float = 0.0) -> None:
    """Compare values, shape and dtype.

    Args:
        got: What the ranks have.
        want: What one process has.
        what: How to call it.
        coarsest: The largest epsilon among the dtypes that went in.

    Raises:
        Mismatch: They differ.
    """
    if got.dtype != want.dtype:
        raise Mismatch(f"{what} has dtype {got.dtype}, not {want.dtype}")
    if got.shape != want.shape:
        raise Mismatch(f"{what} has shape {list(got.shape)}, not {list(want.shape)}")
    if not prod(want.shape):
        return
    if not (want.is_floating_point() or want.is_complex()):
        if not torch.equal(got, want):
            raise Mismatch(f"{what} differs in {int((got != want).sum())} of {want.numel()} elements")
        return
    finite = want[torch.isfinite(want)].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    # Terms of a sum cancel: what is lost is relative to the largest element, not to each.
    epsilon = max(coarsest, torch.finfo(want.dtype).eps)
    most = TOLERATED * epsilon
    close = torch.isclose(got, want, rtol=most, atol=most * (1 + size), equal_nan=True)
    if not bool(close.all()):
        at = int((~close).flatten().nonzero()[0])
        raise Mismatch(
            f"{what} differs in {int((~close).sum())} of {want.numel()} elements, first {got.flatten()[at].item():.6g} "
            f"for {want.flatten()[at].item():.6g}"
        )
