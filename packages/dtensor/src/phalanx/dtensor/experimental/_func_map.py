"""local_map: run a function of plain tensors on the local tensors of DTensors."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any, TypeAlias

import torch

import phalanx.collectives as pc
from phalanx.core import UnsupportedError
from phalanx.dtensor._algorithms.common import is_even
from phalanx.dtensor._dtensor_spec import normalize_placements
from phalanx.dtensor._mesh import Mesh, coordinate_of, describe, mesh_id
from phalanx.dtensor._redistribute.comm import wait_if_pending
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import tree_flatten, tree_unflatten
from phalanx.dtensor.placement_types import AnyPlacement, Placement, Shard, SizedShard, split_dim

PlacementType: TypeAlias = Sequence[Placement] | None
InputPlacements: TypeAlias = tuple[PlacementType, ...] | None
OutputPlacements: TypeAlias = PlacementType | tuple[PlacementType, ...]


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: OutputPlacements = None,
    in_placements: InputPlacements = None,
    in_grad_placements: InputPlacements = None,
    device_mesh: Mesh | None = None,
    *,
    redistribute_inputs: bool = False,
    spmd_types: bool = False,
) -> Callable[..., Any]:
    """A function of DTensors that runs `func` on their local tensors. Differentiable; collective if `func` is.

    Args:
        func: Called with local tensors in place of the DTensors. Without it `local_map` returns a decorator.
        out_placements: A list of placements for one output, a tuple of such lists for several, counted flat; None for
            an output that is not a tensor, and for Replicate. Outputs are DTensors if an input was one. If an input has
            uneven shards, the ranks exchange the sizes of sharded outputs (a collective), and shards that are not the
            chunks of torch.chunk become a SizedShard; otherwise all ranks must return the same sizes. If the sizes of
            an output depend on values, return a plain tensor and make a DTensor of it with `from_local(shape=...)` and
            a SizedShard.
        in_placements: The placements that each positional input must have, counted flat through lists and dicts; None
            for an input that is not a DTensor. By default any placements are accepted.
        in_grad_placements: The placements of the gradients that the ranks give, for each input; by default those of the
            input.
        device_mesh: The mesh of the outputs; by default that of the first DTensor.
        redistribute_inputs: Whether to redistribute inputs of other placements, instead of raising.
        spmd_types: torch 2.14's check of `func` by the package spmd_types. It must be False.

    Returns:
        The function; or a decorator, without `func`.

    Raises:
        ValueError: There is another number of inputs or outputs than of placements, or an input has other placements,
            or is on another mesh than the first.
        TypeError: A value that is not a tensor has placements, a tensor has none, or `func` returned a DTensor.
        UnsupportedError: `spmd_types` is True.

    Source: torch.distributed.tensor.experimental.local_map.

    Example:
        >>> double = local_map(lambda x: x * 2, out_placements=[Shard(0)], in_placements=([Shard(0)],))
        >>> double(distribute_tensor(torch.arange(4), mesh, [Shard(0)])).full_tensor()
        tensor([0, 2, 4, 6])
    """
    if spmd_types:
        raise UnsupportedError(
            "local_map: spmd_types=True is not supported: the package spmd_types checks functions of torch's DTensor "
            "only; leave the argument out, and the function runs without that check"
        )
    if func is None:
        return partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    name = getattr(func, "__name__", type(func).__name__)
    both = {"in_placements": in_placements, "in_grad_placements": in_grad_placements}
    given = {what: entries for what, entries in both.items() if entries is not None}
    by_input = [dict(zip(given, entries, strict=True)) for entries in zip(*given.values(), strict=False)]

    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, tree = tree_flatten(args)
        for what, entries in given.items():
            if len(entries) != len(flat):
                raise ValueError(
                    f"local_map: {what} has {len(entries)} entries, and {name} is called with {len(flat)} positional "
                    "inputs: write one entry for each, and None for an input that is not a tensor"
                )
        mesh: Mesh | None = next((one.device_mesh for one in flat if isinstance(one, DTensor)), None)
        if mesh is None:
            return func(*args, **kwargs)
        local = [
            _input(name, index, value, mesh, by_input[index] if by_input else {}, redistribute_inputs)
            for index, value in enumerate(flat)
        ]
        result = func(*tree_unflatten(local, tree), **kwargs)
        is_uneven = any(_is_uneven(one) for one in flat if isinstance(one, DTensor))
        return _outputs(name, result, out_placements, mesh if device_mesh is None else device_mesh, is_uneven)

    return update_wrapper(mapped, func)


def _input(name: str, index: int, value: Any, mesh: Mesh, entries: Mapping[str, PlacementType], may_move: bool) -> Any:
    """The input that the function gets; `entries` are its own of in_placements and in_grad_placements, where given."""
    wanted = entries.get("in_placements")
    if not isinstance(value, DTensor):
        if not isinstance(value, torch.Tensor) and wanted is not None:
            raise TypeError(
                f"local_map: input {index} of {name} is {type(value).__name__}, not a tensor, and in_placements has "
                f"{list(wanted)} for it: write None"
            )
        return value
    if mesh_id(value.device_mesh) != mesh_id(mesh):
        raise ValueError(
            f"local_map: input {index} of {name} is on mesh {describe(value.device_mesh)}, the first DTensor on "
            f"{describe(mesh)}: move them to one mesh with redistribute(mesh, placements)"
        )
    for what, given in entries.items():
        if given is None:
            raise TypeError(
                f"local_map: input {index} of {name} is a DTensor, and its entry of {what} is None: write its "
                f"placements, {list(value.placements)}"
            )
    if wanted is not None:
        placements = normalize_placements(mesh, tuple(wanted), value.ndim)
        if placements != value.placements:
            if not may_move:
                raise ValueError(
                    f"local_map: input {index} of {name} has placements {list(value.placements)}, and in_placements "
                    f"has {list(placements)}: redistribute it, or write redistribute_inputs=True"
                )
            value = value.redistribute(placements=placements)
    return wait_if_pending(value.to_local(grad_placements=entries.get("in_grad_placements")))


def _is_uneven(tensor: DTensor) -> bool:
    """Whether ranks have shards of several sizes: the same answer on all ranks."""
    for placement in tensor._spec.placements:
        dim = split_dim(placement)
        if isinstance(placement, SizedShard) or (dim is not None and not is_even(tensor._spec, dim)):
            return True
    return False


def _outputs(name: str, result: Any, given: OutputPlacements, mesh: Mesh, is_uneven: bool) -> Any:
    """The outputs as DTensors."""
    flat, tree = tree_flatten(result)
    is_one = not isinstance(given, tuple) or (bool(given) and all(isinstance(one, Placement) for one in given))
    each: tuple[Any, ...] = (given,) if is_one else tuple(given or ())
    if len(each) != len(flat):
        raise ValueError(
            f"local_map: out_placements is for {len(each)} outputs, and {name} returned {len(flat)}: write a tuple "
            "with one list of placements for each, and None for an output that is not a tensor"
        )
    parts = enumerate(zip(flat, each, strict=True))
    return tree_unflatten([_output(name, at, value, one, mesh, is_uneven) for at, (value, one) in parts], tree)


def _output(name: str, index: int, value: Any, placements: PlacementType, mesh: Mesh, is_uneven: bool) -> Any:
    if isinstance(value, DTensor):
        raise TypeError(
            f"local_map: output {index} of {name} is a DTensor; it must be a plain tensor: return its to_local()"
        )
    if not isinstance(value, torch.Tensor):
        if placements is not None:
            raise TypeError(
                f"local_map: output {index} of {name} is {type(value).__name__}, not a tensor, and out_placements has "
                f"{list(placements)} for it: write None"
            )
        return value
    local = wait_if_pending(value)
    if placements is None:
        return DTensor.from_local(local, mesh)
    placed = normalize_placements(mesh, tuple(placements), local.ndim)
    if not is_uneven or coordinate_of(mesh) is None:
        return DTensor.from_local(local, mesh, placed)
    placed, shape = global_from_shards(local, mesh, placed)
    return DTensor.from_local(local, mesh, placed, shape=shape)


def global_from_shards(
    local: torch.Tensor, mesh: Mesh, placements: Sequence[AnyPlacement]
) -> tuple[Any, tuple[int, ...]]:
    """Placements and shape of the tensor of which ranks have pieces of any sizes. Collective over the mesh.

    Raises:
        ValueError: The pieces do not make up one tensor that placements can describe. Raised on every rank.
    """
    placed, shape = list(placements), list(local.shape)
    cutting = [mesh_dim for mesh_dim, one in enumerate(placed) if isinstance(one, Shard) and mesh.shape[mesh_dim] > 1]
    # Every rank sees the sizes of all, so that all come to one result.
    table = torch.tensor(shape, device=local.device)
    for mesh_dim in reversed(cutting):
        rows = table.flatten().contiguous()
        found = pc.wait_tensor(pc.all_gather_tensor(rows, 0, (mesh, mesh_dim)))  # type: ignore[arg-type]
        table = found.view(mesh.shape[mesh_dim], *table.shape)
    for dim in range(local.ndim):
        own = [mesh_dim for mesh_dim in cutting if split_dim(placed[mesh_dim]) == dim]
        sizes = table[..., dim]
        for place, mesh_dim in reversed(list(enumerate(cutting))):
            if mesh_dim not in own:  # ranks along it have other pieces of other dims, and as much of this one
                _need_equal(sizes.movedim(place, 0), dim, mesh_dim, placed[mesh_dim])
                sizes = sizes.select(place, 0)
        for mesh_dim in reversed(own):  # the innermost cut first: what is left are sums of its pieces
            rows = sizes.reshape(-1, mesh.shape[mesh_dim])
            if not all(_is_chunked(row) for row in rows.tolist()):
                _need_equal(rows, dim, mesh_dim, placed[mesh_dim])
                placed[mesh_dim] = SizedShard(dim, rows[0].tolist())
            sizes = sizes.sum(-1)
        shape[dim] = int(sizes)
    return tuple(placed), tuple(shape)


def _is_chunked(sizes: list[int]) -> bool:
    """Whether these are the sizes of torch.chunk."""
    length = -(-sum(sizes) // len(sizes))
    return sizes == [max(0, min(length, sum(sizes) - length * at)) for at in range(len(sizes))]


def _need_equal(rows: torch.Tensor, dim: int, mesh_dim: int, placement: AnyPlacement) -> None:
    """Refuse pieces that have other sizes in each row of the mesh."""
    if bool((rows != rows[:1]).any()):
        raise ValueError(
            f"local_map: along mesh dim {mesh_dim} ({placement}) the rows of the mesh returned shards of sizes "
            f"{rows.tolist()} of dim {dim}, and every row must have the same sizes: return shards of the same sizes, "
            "or use a mesh of one dim, where any sizes are possible"
        )
