"""Plain all_gather and reduce_scatter, and the tensors of the other ranks."""

import torch

from phalanx.symm_mem._allocation import is_symm_mem_tensor
from phalanx.symm_mem._cuda import stream_kwargs
from phalanx.symm_mem._ops._common import (
    check_like,
    core_dtype,
    handle_of,
    op,
    part_of,
    peer_views,
    reduction_of,
    size_of,
)
from phalanx.symm_mem._ops.unfused import gather_into
from phalanx.symm_mem._process_group import resolve
from phalanx.symm_mem._state import current


def _remotes(x: torch.Tensor, group_name: str) -> list[torch.Tensor]:
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for _ in range(size_of(group_name))
    ]


@op("get_remote_tensors(Tensor x, str group_name) -> Tensor[]", _remotes)
def get_remote_tensors(x: torch.Tensor, group_name: str) -> list[torch.Tensor]:
    return peer_views(handle_of("get_remote_tensors", x, group_name, contiguous=False), x)


def _gathered(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    rows = tensor.shape[0] if tensor.dim() else 1
    return tensor.new_empty([size_of(group_name) * rows, *tensor.shape[1:]])


@op("_low_contention_all_gather(Tensor tensor, str group_name) -> Tensor", _gathered)
def _low_contention_all_gather(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    operation = "_low_contention_all_gather"
    out = _gathered(tensor, group_name)
    gather_into(operation, tensor.contiguous(), out, resolve(group_name, operation))
    return out


@op("multimem_all_gather_out(Tensor input, str group_name, Tensor(a!) out) -> Tensor(a!)")
def multimem_all_gather_out(tensor: torch.Tensor, group_name: str, out: torch.Tensor) -> torch.Tensor:
    operation = "multimem_all_gather_out"
    check_like(operation, out, _gathered(tensor, group_name).shape, tensor)
    if out.is_cuda and out.is_contiguous():  # NVLink switches write it at once if it is symmetric as well
        gather_into(operation, tensor.contiguous(), out, resolve(group_name, operation))
        return out
    return out.copy_(_low_contention_all_gather(tensor, group_name))


def _scattered(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return tensor.new_empty(part_of("_low_contention_reduce_scatter", tensor.shape, 0, size_of(group_name)))


@op("_low_contention_reduce_scatter(Tensor tensor, str reduce_op, str group_name) -> Tensor", _scattered)
def _low_contention_reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    operation = "_low_contention_reduce_scatter"
    reduction = reduction_of(operation, reduce_op)
    out = _scattered(tensor, reduce_op, group_name)
    source = tensor.contiguous()
    arguments = out.data_ptr(), out.numel(), core_dtype(source), reduction
    if is_symm_mem_tensor(source):
        handle = handle_of(operation, source, group_name)
        handle.symm.reduce_scatter(handle.offset, *arguments, stream=handle.stream())
    else:
        group = resolve(group_name, operation).initialize(current(), 0)
        group.reduce_scatter(source.data_ptr(), *arguments, **stream_kwargs(source))
    return out
