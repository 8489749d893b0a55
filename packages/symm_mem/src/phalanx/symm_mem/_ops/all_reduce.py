"""all_reduce, reduce_scatter and sums of tiles of symmetric inputs, which the peers read in place."""

from collections.abc import Callable, Sequence

import torch

from phalanx.core import Algo, InvalidArgumentError, UnsupportedError
from phalanx.symm_mem._handle import SymmetricMemory
from phalanx.symm_mem._ops._common import (
    check_like,
    core_dtype,
    handle_of,
    op,
    part_of,
    peer_views,
    reduce_views,
    reduction_of,
    size_of,
)

_REDUCTION = "str reduce_op, str group_name"


def _reduce_into(
    operation: str, symmetric: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor, algo: Algo
) -> torch.Tensor:
    reduction = reduction_of(operation, reduce_op)
    check_like(operation, out, symmetric.shape, symmetric)
    handle = handle_of(operation, symmetric, group_name)
    target = out if out.is_contiguous() else out.new_empty(out.shape)
    in_place = target.data_ptr() == symmetric.data_ptr()
    handle.symm.all_reduce(
        handle.offset,
        None if in_place else target.data_ptr(),
        symmetric.numel(),
        core_dtype(symmetric),
        reduction,
        algo=algo,
        stream=handle.stream(),
    )
    return out if target is out else out.copy_(target)


def _new(tensor: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@op(f"one_shot_all_reduce(Tensor input, {_REDUCTION}) -> Tensor", _new)
@op(f"multimem_one_shot_all_reduce(Tensor input, {_REDUCTION}) -> Tensor", _new)
def one_shot_all_reduce(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return _reduce_into("one_shot_all_reduce", tensor, reduce_op, group_name, _new(tensor), Algo.ONE_SHOT)


@op(f"one_shot_all_reduce_out(Tensor input, {_REDUCTION}, Tensor(a!) out) -> Tensor(a!)")
@op(f"multimem_one_shot_all_reduce_out(Tensor input, {_REDUCTION}, Tensor(a!) out) -> Tensor(a!)")
def one_shot_all_reduce_out(tensor: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor) -> torch.Tensor:
    return _reduce_into("one_shot_all_reduce_out", tensor, reduce_op, group_name, out, Algo.ONE_SHOT)


def _copied(operation: str, symm_buffer: torch.Tensor, local_input: torch.Tensor) -> torch.Tensor:
    """Copy the tensor into the buffer."""
    if local_input.dtype != symm_buffer.dtype or local_input.numel() > symm_buffer.numel():
        raise InvalidArgumentError(
            f"{operation}: {local_input.numel()} elements of {local_input.dtype} do not fit into a symmetric buffer of "
            f"{symm_buffer.numel()} of {symm_buffer.dtype}"
        )
    if not symm_buffer.is_contiguous():
        raise InvalidArgumentError(
            f"{operation}: the symmetric buffer has strides {list(symm_buffer.stride())}; it must be contiguous"
        )
    placed = symm_buffer.view(-1)[: local_input.numel()].view(local_input.shape)
    placed.copy_(local_input)
    return placed


_COPY = f"Tensor symm_buffer, Tensor local_input, {_REDUCTION}"


@op(f"one_shot_all_reduce_copy({_COPY}) -> Tensor", lambda symm_buffer, local_input, *rest: _new(local_input))
def one_shot_all_reduce_copy(
    symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    return one_shot_all_reduce_copy_out(symm_buffer, local_input, reduce_op, group_name, _new(local_input))


@op(f"one_shot_all_reduce_copy_out({_COPY}, Tensor(a!) out) -> Tensor(a!)")
def one_shot_all_reduce_copy_out(
    symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    operation = "one_shot_all_reduce_copy"
    placed = _copied(operation, symm_buffer, local_input)
    return _reduce_into(operation, placed, reduce_op, group_name, out, Algo.ONE_SHOT)


@op(f"two_shot_all_reduce_(Tensor(a!) input, {_REDUCTION}) -> Tensor(a!)")
def two_shot_all_reduce_(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return _reduce_into("two_shot_all_reduce_", tensor, reduce_op, group_name, tensor, Algo.TWO_SHOT)


@op(f"two_shot_all_reduce_out(Tensor(a!) input, {_REDUCTION}, Tensor(b!) output) -> Tensor(b!)")
def two_shot_all_reduce_out(
    tensor: torch.Tensor, reduce_op: str, group_name: str, output: torch.Tensor
) -> torch.Tensor:
    return _reduce_into("two_shot_all_reduce_out", tensor, reduce_op, group_name, output, Algo.TWO_SHOT)


def _by_switch(handle: SymmetricMemory, reduce: Callable[[Algo], object]) -> None:
    """Reduce with NVLink switches if possible; otherwise all ranks get the same error before anything begins."""
    if handle.multicast_ptr:
        try:
            reduce(Algo.MULTIMEM)
        except UnsupportedError:
            pass
        else:
            return
    reduce(Algo.AUTO)


@op(f"multimem_all_reduce_(Tensor(a!) input, {_REDUCTION}) -> Tensor(a!)")
def multimem_all_reduce_(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    operation = "multimem_all_reduce_"
    if tensor.is_cpu:
        return _reduce_into(operation, tensor, reduce_op, group_name, tensor, Algo.AUTO)
    handle = handle_of(operation, tensor, group_name)
    _by_switch(handle, lambda algo: _reduce_into(operation, tensor, reduce_op, group_name, tensor, algo))
    return tensor


@op("multimem_one_shot_reduce_out(Tensor input, str reduce_op, int root, str group_name, Tensor(a!) out) -> Tensor(a!)")
def multimem_one_shot_reduce_out(
    tensor: torch.Tensor, reduce_op: str, root: int, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    operation = "multimem_one_shot_reduce_out"
    reduction = reduction_of(operation, reduce_op)
    handle = handle_of(operation, tensor, group_name)
    _check_root(operation, root, handle.world_size)
    is_root = handle.rank == root
    if is_root:
        check_like(operation, out, tensor.shape, tensor)
    target = out if out.is_contiguous() else out.new_empty(out.shape)
    to, count, dtype = target.data_ptr() if is_root else None, tensor.numel(), core_dtype(tensor)
    stream = handle.stream()
    _by_switch(
        handle,
        lambda algo: handle.symm.reduce(handle.offset, to, count, dtype, reduction, root, algo=algo, stream=stream),
    )
    return out.copy_(target) if is_root and target is not out else out


def _check_root(operation: str, root: int, size: int) -> None:
    if not 0 <= root < size:
        raise InvalidArgumentError(f"{operation}: root is {root}; the ranks of the group are 0 to {size - 1}")


@op("reduce_scatter_out(Tensor(a!) input, str group_name, bool split_last_dim, Tensor(b!) output) -> Tensor(b!)")
def reduce_scatter_out(
    tensor: torch.Tensor, group_name: str, split_last_dim: bool, output: torch.Tensor
) -> torch.Tensor:
    operation = "reduce_scatter_out"
    dim = max(tensor.dim() - 1, 0) if split_last_dim else 0
    shape = part_of(operation, tensor.shape, dim, size_of(group_name))
    check_like(operation, output, shape, tensor)
    handle = handle_of(operation, tensor, group_name)
    if dim != 0:  # columns: not contiguous in the blocks
        handle.barrier()
        columns = [view.narrow(dim, handle.rank * shape[dim], shape[dim]) for view in peer_views(handle, tensor)]
        output.copy_(reduce_views(columns, "sum"))
        handle.barrier()  # peers have read this rank's
        return output
    target = output if output.is_contiguous() else output.new_empty(shape)
    handle.symm.reduce_scatter(
        handle.offset, target.data_ptr(), target.numel(), core_dtype(tensor), stream=handle.stream()
    )
    return output if target is output else output.copy_(target)


@op('tile_reduce(Tensor in_tile, Tensor(a!) out_tile, int root, str group_name, str reduce_op="sum") -> ()')
def tile_reduce(
    in_tile: torch.Tensor, out_tile: torch.Tensor, root: int, group_name: str, reduce_op: str = "sum"
) -> None:
    _reduce_tiles("tile_reduce", [in_tile], out_tile, [root], group_name, reduce_op)


@op(
    "multi_root_tile_reduce(Tensor[] in_tiles, Tensor(a!) out_tile, int[] roots, str group_name, "
    'str reduce_op="sum") -> ()'
)
def multi_root_tile_reduce(
    in_tiles: Sequence[torch.Tensor],
    out_tile: torch.Tensor,
    roots: Sequence[int],
    group_name: str,
    reduce_op: str = "sum",
) -> None:
    _reduce_tiles("multi_root_tile_reduce", in_tiles, out_tile, roots, group_name, reduce_op)


def _reduce_tiles(
    operation: str,
    in_tiles: Sequence[torch.Tensor],
    out_tile: torch.Tensor,
    roots: Sequence[int],
    group_name: str,
    reduce_op: str,
) -> None:
    """Tile i is reduced over all ranks into `out_tile` of rank roots[i]."""
    reduction_of(operation, reduce_op)
    if len(in_tiles) != len(roots) or not in_tiles:
        raise InvalidArgumentError(
            f"{operation}: there are {len(in_tiles)} tiles and {len(roots)} roots; give one root for each tile"
        )
    if len(set(roots)) != len(roots):
        raise InvalidArgumentError(
            f"{operation}: the roots are {list(roots)}; each rank may be there once, because it has one output"
        )
    size = size_of(group_name)
    for root in roots:
        _check_root(operation, root, size)
    handles = [handle_of(operation, tile, group_name, contiguous=False) for tile in in_tiles]
    mine = [i for i, root in enumerate(roots) if root == handles[0].rank]
    for i in mine:
        check_like(operation, out_tile, in_tiles[i].shape, in_tiles[i])
    handles[0].barrier()
    for i in mine:
        out_tile.copy_(reduce_views(peer_views(handles[i], in_tiles[i]), reduce_op))
    handles[0].barrier()  # peers have read this rank's
