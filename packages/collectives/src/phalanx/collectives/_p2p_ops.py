"""Messages between two ranks as ops of torch.ops.phalanx, and their functional forms.

isend and what a batch sends are copied, so that a compiler may use the memory again; irecv gives a new tensor, which
wait_tensor completes. The peers are global ranks, as in torch's ops of these names.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work

from phalanx.collectives import _p2p, _torch_compat
from phalanx.collectives._async_tensor import WaitHandle, wrap
from phalanx.collectives._layout import contiguous_like
from phalanx.collectives._process_group import GroupLike, find, traced_name
from phalanx.collectives._registry import state_named
from phalanx.collectives._torch_compat import constant_in_graphs, is_dynamo_compiling, is_tracing
from phalanx.collectives._work import CoreWork

_ISEND = "isend(Tensor tensor, int dst, int tag, str group_name) -> Tensor"
_IRECV = "irecv(Tensor tensor, int src, int tag, str group_name) -> Tensor"
_BATCH = "batch_p2p_ops(str[] op_list, int[] peer_list, int[] tag_list, Tensor[] tensors, str group_name) -> Tensor[]"


# ---- the ops ---------------------------------------------------------------------------------------------------------


def _isend(tensor: torch.Tensor, dst: int, tag: int, group_name: str) -> torch.Tensor:
    return _batch(["isend"], [dst], [tag], [tensor], group_name)[0]


def _irecv(tensor: torch.Tensor, src: int, tag: int, group_name: str) -> torch.Tensor:
    return _batch(["irecv"], [src], [tag], [tensor], group_name)[0]


def _batch(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[torch.Tensor],
    group_name: str,
) -> list[torch.Tensor]:
    sends = _check_batch(op_list, peer_list, tag_list, tensors)
    buffers = [
        tensor.clone(memory_format=torch.contiguous_format) if sent else contiguous_like(tensor)
        for sent, tensor in zip(sends, tensors, strict=True)
    ]
    works = _started(sends, buffers, peer_list, tag_list, group_name)
    results = []
    for sent, buffer, work in zip(sends, buffers, works, strict=True):
        # A token stands for a message that is being sent. A message of the core is sent whether or not its work is
        # kept; one of gloo ends with its work, so the work is kept with the token.
        result = buffer.new_empty(0) if sent else buffer
        if not (sent and isinstance(work, CoreWork)):
            _torch_compat.register_work(result, work)
        results.append(result)
    return results


def _started(
    sends: Sequence[bool], tensors: Sequence[torch.Tensor], peers: Sequence[int], tags: Sequence[int], group: GroupLike
) -> list[Work]:
    messages = zip(sends, tensors, peers, tags, strict=True)
    ops = [
        _p2p.P2POp(_p2p.isend if sent else _p2p.irecv, tensor, peer, group, tag) for sent, tensor, peer, tag in messages
    ]
    return _p2p.batch_isend_irecv(ops)


def _fake_isend(tensor: torch.Tensor, dst: int, tag: int, group_name: str) -> torch.Tensor:
    return tensor.new_empty(0)


def _fake_batch(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[torch.Tensor],
    group_name: str,
) -> list[torch.Tensor]:
    sends = _check_batch(op_list, peer_list, tag_list, tensors)
    return [
        tensor.new_empty(0) if sent else contiguous_like(tensor) for sent, tensor in zip(sends, tensors, strict=True)
    ]


def _check_batch(ops: Sequence[str], peers: Sequence[int], tags: Sequence[int], tensors: Sequence[Any]) -> list[bool]:
    if bad := [op for op in ops if op not in ("isend", "irecv")]:
        raise ValueError(f"batch_p2p_ops: op_list has {bad[0]!r}; its entries must be 'isend' or 'irecv'")
    if not len(ops) == len(peers) == len(tags) == len(tensors):
        raise ValueError(
            f"batch_p2p_ops: there are {len(ops)} ops, {len(peers)} peers, {len(tags)} tags and {len(tensors)} "
            "tensors; the lists must have one entry for each message"
        )
    return [op == "isend" for op in ops]


def register() -> None:
    """Register the ops."""
    _torch_compat.add_op(_ISEND, _isend, _fake_isend)
    _torch_compat.add_op(_IRECV, _irecv, contiguous_like)
    _torch_compat.add_op(_BATCH, _batch, _fake_batch)


# ---- functional forms ------------------------------------------------------------------------------------------------


def isend_inplace(
    tensor: torch.Tensor, dst: int | None = None, tag: int = 0, group: GroupLike = None, group_dst: int = -1
) -> torch.Tensor:
    """`isend`, in a form that can be traced. As torch.distributed._functional_collectives.isend_inplace.

    Args:
        tensor, dst, tag, group: As for `isend`.
        group_dst: The receiver, as a rank within the group, if not -1: then dst must be None.

    Returns:
        An AsyncCollectiveTensor with the values of `tensor`: its first use waits until the message is on its way. In a
        compiled graph an empty tensor.

    Raises:
        ValueError, PhalanxError: As for `isend`.

    Example:
        >>> sent = isend_inplace(torch.ones(1), 1 - rank)
        >>> irecv_inplace(torch.empty(1), 1 - rank) + 0
        tensor([1.])
    """
    if is_dynamo_compiling() or is_tracing():
        name = _name(group, "isend_inplace")
        started: torch.Tensor = torch.ops.phalanx.isend(
            tensor, _global("isend_inplace", name, "dst", dst, group_dst), tag, name
        )
        return started
    return _wrapped(tensor, _p2p.isend(tensor, dst, group, tag, None if group_dst == -1 else group_dst))


def irecv_inplace(
    tensor: torch.Tensor, src: int | None = None, tag: int = 0, group: GroupLike = None, group_src: int = -1
) -> torch.Tensor:
    """`irecv`, in a form that can be traced. As torch.distributed._functional_collectives.irecv_inplace.

    In a compiled graph the message is complete when the call returns: if two ranks exchange messages, use
    `batch_p2p_ops_inplace`.

    Args:
        tensor, src, tag, group: As for `irecv`, but without group_src, src must not be None.
        group_src: The sender, as a rank within the group, if not -1: then src must be None.

    Returns:
        An AsyncCollectiveTensor of the memory of `tensor`; in a compiled graph `tensor`.

    Raises:
        ValueError, PhalanxError: As for `irecv`.

    Example:
        >>> sent = isend_inplace(torch.ones(1), 1 - rank)
        >>> irecv_inplace(torch.empty(1), 1 - rank)
        AsyncCollectiveTensor(tensor([1.]))
    """
    if is_dynamo_compiling() or is_tracing():
        name = _name(group, "irecv_inplace")
        coming = torch.ops.phalanx.irecv(tensor, _global("irecv_inplace", name, "src", src, group_src), tag, name)
        return tensor.copy_(torch.ops.phalanx.wait_tensor(coming))
    if src is None and group_src == -1:
        raise ValueError("irecv_inplace: src is missing; give the rank of the sender, or use irecv, which accepts any")
    return _wrapped(tensor, _p2p.irecv(tensor, src, group, tag, None if group_src == -1 else group_src))


def batch_p2p_ops_inplace(
    op_list: list[str],
    peer_list: list[int],
    tag_list: list[int],
    tensors: list[torch.Tensor],
    group_name: GroupLike = None,
) -> list[torch.Tensor]:
    """`batch_isend_irecv`, in a form that can be traced.

    As torch.distributed._functional_collectives.batch_p2p_ops_inplace.

    Args:
        op_list: "isend" or "irecv" for each message.
        peer_list: The other rank of each message, as a global rank.
        tag_list: The tag of each message.
        tensors: The tensor that each message sends or receives into.
        group_name: As `group` of `isend`.

    Returns:
        For each message the result of `isend_inplace` or `irecv_inplace`.

    Raises:
        ValueError, PhalanxError: As for `batch_isend_irecv`.

    Example:
        >>> given = [torch.ones(1), torch.empty(1)]
        >>> batch_p2p_ops_inplace(["isend", "irecv"], [1 - rank] * 2, [0, 0], given)[1]
        AsyncCollectiveTensor(tensor([1.]))
    """
    if is_dynamo_compiling() or is_tracing():
        name = _name(group_name or None, "batch_p2p_ops_inplace")
        begun = torch.ops.phalanx.batch_p2p_ops(op_list, peer_list, tag_list, tensors, name)
        return [
            tensor.copy_(torch.ops.phalanx.wait_tensor(each)) if op == "irecv" else each
            for op, tensor, each in zip(op_list, tensors, begun, strict=True)
        ]
    sends = _check_batch(op_list, peer_list, tag_list, tensors)
    works = _started(sends, tensors, peer_list, tag_list, group_name or None)
    return [_wrapped(tensor, work) for tensor, work in zip(tensors, works, strict=True)]


def _wrapped(tensor: torch.Tensor, work: Any) -> torch.Tensor:
    return wrap(tensor.detach(), WaitHandle.of(work.wait))


def _name(group: GroupLike, operation: str) -> str:
    if group is None:
        group = dist.group.WORLD
    if group is None:
        raise ValueError(f"{operation}: there is no default group; call torch.distributed.init_process_group first")
    return traced_name(group, "", operation) if is_dynamo_compiling() else find(group, "", operation).name


def _global(operation: str, name: str, argument: str, rank: int | None, group_rank: int) -> int:
    if group_rank == -1:
        if rank is None:
            raise ValueError(f"{operation}: {argument} is missing; give {argument} or group_{argument}")
        return rank
    if rank is not None:
        raise ValueError(f"{operation}: {argument} and group_{argument} are both given; give only one of them")
    return _global_rank(name, group_rank)


@constant_in_graphs
def _global_rank(name: str, group_rank: int) -> int:
    return state_named(name).ranks[group_rank]
