"""What moves data without adding it up: all_gather, all_to_all, and the tensors of the other ranks."""

import torch

from phalanx.core import InvalidArgumentError
from phalanx.symm_mem._alloc import is_symm_mem_tensor
from phalanx.symm_mem._context import current
from phalanx.symm_mem._groups import resolve
from phalanx.symm_mem._ops.peers import check_like, core_dtype, handle_of, peer_views, reduction_of, size_of


def get_remote_tensors(x: torch.Tensor, group_name: str) -> list[torch.Tensor]:
    return peer_views(handle_of("get_remote_tensors", x, group_name, contiguous=False), x)


def _low_contention_all_gather(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    operation = "_low_contention_all_gather"
    out = _gathered(tensor, group_name)
    source = tensor.contiguous()
    if is_symm_mem_tensor(source):
        handle = handle_of(operation, source, group_name)
        handle.symm.all_gather(handle.offset, out.data_ptr(), source.numel(), core_dtype(source))
    else:
        group = resolve(group_name).meet(current(), 0)
        group.all_gather(source.data_ptr(), out.data_ptr(), source.numel(), core_dtype(source))
    return out


def _gathered(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    rows = tensor.shape[0] if tensor.dim() else 1
    return tensor.new_empty([size_of(group_name) * rows, *tensor.shape[1:]])


def multimem_all_gather_out(tensor: torch.Tensor, group_name: str, out: torch.Tensor) -> torch.Tensor:
    check_like("multimem_all_gather_out", out, _gathered(tensor, group_name).shape, tensor)
    return out.copy_(_low_contention_all_gather(tensor, group_name))


def _low_contention_reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    operation = "_low_contention_reduce_scatter"
    op = reduction_of(operation, reduce_op)
    out = _scattered(tensor, reduce_op, group_name)
    source = tensor.contiguous()
    if is_symm_mem_tensor(source):
        handle = handle_of(operation, source, group_name)
        handle.symm.reduce_scatter(handle.offset, out.data_ptr(), out.numel(), core_dtype(source), op)
    else:
        group = resolve(group_name).meet(current(), 0)
        group.reduce_scatter(source.data_ptr(), out.data_ptr(), out.numel(), core_dtype(source), op)
    return out


def _scattered(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    size = size_of(group_name)
    if tensor.dim() == 0 or tensor.shape[0] % size:
        raise InvalidArgumentError(
            f"_low_contention_reduce_scatter: dim 0 of {list(tensor.shape)} must be a multiple of the group size {size}"
        )
    return tensor.new_empty([tensor.shape[0] // size, *tensor.shape[1:]])


def all_to_all_vdev(
    tensor: torch.Tensor, out: torch.Tensor, in_splits: torch.Tensor, out_splits_offsets: torch.Tensor, group_name: str
) -> None:
    """Rows go to the ranks as each rank's `in_splits` says; `out_splits_offsets` tells what came."""
    operation, size = "all_to_all_vdev", size_of(group_name)
    if in_splits.dtype != torch.int64 or in_splits.shape != (size,):
        raise InvalidArgumentError(
            f"{operation}: in_splits is {list(in_splits.shape)} of {in_splits.dtype}; it must have {size} elements of "
            "torch.int64"
        )
    if out_splits_offsets.dtype != torch.int64 or out_splits_offsets.shape != (2, size):
        raise InvalidArgumentError(
            f"{operation}: out_splits_offsets is {list(out_splits_offsets.shape)} of {out_splits_offsets.dtype}; it "
            f"must have shape [2, {size}] of torch.int64"
        )
    if tensor.dim() == 0 or out.dim() == 0 or out.shape[1:] != tensor.shape[1:] or out.dtype != tensor.dtype:
        raise InvalidArgumentError(
            f"{operation}: rows of {list(tensor.shape)} of {tensor.dtype} do not fit into {list(out.shape)} of "
            f"{out.dtype}"
        )
    handle, splits_handle = handle_of(operation, tensor, group_name), handle_of(operation, in_splits, group_name)
    handle.barrier()  # everybody's rows and splits are there
    wrong, at = "", 0
    for rank, (rows, splits) in enumerate(
        zip(peer_views(handle, tensor), peer_views(splits_handle, in_splits), strict=True)
    ):
        listed = splits.tolist()
        begin, count = sum(listed[: handle.rank]), listed[handle.rank]
        out_splits_offsets[0, rank], out_splits_offsets[1, rank] = count, at
        if min(listed) < 0 or sum(listed) > len(rows):
            wrong = wrong or f"the splits {listed} of rank {rank} do not lie within its {len(rows)} rows"
        elif at + count > len(out):
            wrong = wrong or f"{at + count} rows or more come to rank {handle.rank}, whose output has {len(out)}"
        else:
            out[at : at + count] = rows[begin : begin + count]
            at += count
    handle.barrier()  # everybody has read this rank's
    if wrong:
        raise InvalidArgumentError(f"{operation}: {wrong}")


# ---- what a compiler needs to know -----------------------------------------------------------------------------------


def _remotes(x: torch.Tensor, group_name: str) -> list[torch.Tensor]:
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for _ in range(size_of(group_name))
    ]


def _last(*arguments: torch.Tensor) -> torch.Tensor:
    return arguments[-1]


def _nothing(*arguments: object) -> None:
    return None


_ROWS = "Tensor input, Tensor(a!) out"
OPS = [
    ("get_remote_tensors(Tensor x, str group_name) -> Tensor[]", get_remote_tensors, _remotes),
    ("_low_contention_all_gather(Tensor tensor, str group_name) -> Tensor", _low_contention_all_gather, _gathered),
    (
        "multimem_all_gather_out(Tensor input, str group_name, Tensor(a!) out) -> Tensor(a!)",
        multimem_all_gather_out,
        _last,
    ),
    (
        "_low_contention_reduce_scatter(Tensor tensor, str reduce_op, str group_name) -> Tensor",
        _low_contention_reduce_scatter,
        _scattered,
    ),
    (
        f"all_to_all_vdev({_ROWS}, Tensor in_splits, Tensor(a!) out_splits_offsets, str group_name) -> ()",
        all_to_all_vdev,
        _nothing,
    ),
]
