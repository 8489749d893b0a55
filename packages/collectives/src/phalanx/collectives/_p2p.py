"""Messages between two ranks: isend, irecv and batches of them, as torch.distributed has them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work

from phalanx.collectives import _call_rows, _p2p_streams, _recording
from phalanx.collectives._errors import fail
from phalanx.collectives._group_state import GroupState
from phalanx.collectives._p2p_streams import Message
from phalanx.collectives._process_group import GroupLike, ensure_initialized, find
from phalanx.collectives._transport import CoreTransport, transport_for
from phalanx.collectives._work import source_of
from phalanx.core import ANY_RANK

_MOST_TAG = 2**32 - 1


def isend(
    tensor: torch.Tensor, dst: int | None = None, group: GroupLike = None, tag: int = 0, group_dst: int | None = None
) -> Work:
    """Send a tensor to another rank, and return at once. Not collective, but for the first call on a group.

    As torch.distributed.isend. Messages of one sender with one tag arrive in the order sent. A rank may send to itself.

    Args:
        tensor: A tensor of any shape, strides and dtype. It must stay unchanged until the work is complete.
        dst: The receiver, as a global rank.
        group: As for `all_reduce`. If its ranks are not connected yet, all of them must make a call on it: see
            `enable_group`.
        tag: 0 to 2**32 - 1; the receive must have the same.
        group_dst: The receiver, as a rank within the group, instead of `dst`.

    Returns:
        The work. On a group that the core serves it may be dropped: the message is sent all the same. On other groups
        keep it until it has been waited for.

    Raises:
        ValueError: There is no such rank or tag, or the group is not one of this rank's; nothing was sent.
        PhalanxError: From this call or from `wait`: as for `all_reduce`.

    Example:
        >>> work = isend(torch.tensor([rank]), 1 - rank)
        >>> received = torch.empty(1, dtype=torch.int64)
        >>> recv(received, 1 - rank) == 1 - rank and work.wait()
        True
    """
    try:
        return _started(_checked(True, tensor, dst, group, tag, group_dst))
    except (RuntimeError, ValueError) as error:
        fail(error)


def irecv(
    tensor: torch.Tensor, src: int | None = None, group: GroupLike = None, tag: int = 0, group_src: int | None = None
) -> Work:
    """Receive a tensor from another rank, and return at once. Not collective, but for the first call on a group.

    As torch.distributed.irecv.

    Args:
        tensor: A contiguous tensor with the number of elements and the dtype of the message, which is in it when the
            work is complete.
        src: The sender, as a global rank; None, without group_src, for any.
        group, tag: As for `isend`.
        group_src: The sender, as a rank within the group, instead of `src`.

    Returns:
        The work; its `source_rank` is the sender.

    Raises:
        ValueError: There is no such rank or tag, the tensor is not contiguous, or the group is not one of this rank's.
        PhalanxError: From this call or from `wait`: as for `all_reduce`; MismatchError if the sender's dtype or number
            of elements differs.

    Example:
        >>> received = torch.empty(1)
        >>> work = irecv(received, 1 - rank)
        >>> send(torch.ones(1), 1 - rank)
        >>> work.wait() and received
        tensor([1.])
    """
    try:
        return _started(_checked(False, tensor, src, group, tag, group_src))
    except (RuntimeError, ValueError) as error:
        fail(error)


def send(
    tensor: torch.Tensor, dst: int | None = None, group: GroupLike = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """`isend` and its wait. As torch.distributed.send.

    Args:
        tensor, dst, group, tag, group_dst: As for `isend`.

    Raises:
        ValueError, PhalanxError: As for `isend`.

    Example:
        >>> received = torch.empty(1)
        >>> if rank == 0:
        ...     send(torch.ones(1), 1)
        ... else:
        ...     sender = recv(received, 0)
        >>> received  # on rank 1
        tensor([1.])
    """
    isend(tensor, dst, group, tag, group_dst).wait()


def recv(
    tensor: torch.Tensor, src: int | None = None, group: GroupLike = None, tag: int = 0, group_src: int | None = None
) -> int:
    """`irecv` and its wait. As torch.distributed.recv.

    Args:
        tensor, src, group, tag, group_src: As for `irecv`.

    Returns:
        The sender, as a global rank.

    Raises:
        ValueError, PhalanxError: As for `irecv`.

    Example:
        >>> received = torch.empty(1)
        >>> if rank == 0:
        ...     send(torch.ones(1), 1, tag=7)
        ... else:
        ...     print(recv(received, tag=7))  # the sender, on rank 1
        0
    """
    message = _checked(False, tensor, src, group, tag, group_src)
    try:
        work = _started(message)
        work.wait()
        if message.peer != ANY_RANK:
            return message.state.ranks[message.peer]
        return source_of(work)
    except (RuntimeError, ValueError) as error:
        fail(error)


class P2POp:
    """One message of `batch_isend_irecv`. As torch.distributed.P2POp.

    Args:
        op: isend or irecv, of this package or of torch.distributed.
        tensor, group, tag: As for `isend` or `irecv`.
        peer: The other rank, as a global rank.
        group_peer: The other rank, as a rank within the group, instead of `peer`.

    Raises:
        ValueError: `op` is none of these functions.

    Example:
        >>> P2POp(isend, torch.ones(2), peer=1)
        P2POp(isend, [2] of torch.float32, peer=1, tag=0)
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv, dist.isend, dist.irecv):
            raise ValueError(
                f"P2POp: op is {op!r}; it must be the function isend or irecv of phalanx.collectives or "
                "torch.distributed"
            )
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer

    def __repr__(self) -> str:
        peer = f"peer={self.peer}" if self.group_peer is None else f"group_peer={self.group_peer}"
        return f"P2POp({self.op.__name__}, {list(self.tensor.shape)} of {self.tensor.dtype}, {peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Send and receive several messages, and return at once. Not collective, but for the first call on a group.

    As torch.distributed.batch_isend_irecv, for any backend. The order of sends and receives does not matter; messages
    between two ranks in one direction, with one tag, meet in the order of the lists.

    Args:
        p2p_op_list: A list of P2POp of this package or of torch.distributed, all on one group. It may be empty.

    Returns:
        A work for each message, in order.

    Raises:
        ValueError: An argument is wrong; nothing was sent.
        PhalanxError: As for `isend` and `irecv`.

    Example:
        >>> received = torch.empty(1)
        >>> ops = [P2POp(isend, torch.ones(1), 1 - rank), P2POp(irecv, received, 1 - rank)]
        >>> all(work.wait() for work in batch_isend_irecv(ops)) and received
        tensor([1.])
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(op, (P2POp, dist.P2POp)) for op in p2p_op_list):
        raise ValueError(f"batch_isend_irecv: expected a list of P2POp, not {p2p_op_list!r}")
    try:
        messages = [_of(op) for op in p2p_op_list]
        if any(message.state is not messages[0].state for message in messages):
            raise ValueError(
                "batch_isend_irecv: the list has messages on several groups; all must be on one group, so make one "
                "call for each group"
            )
        return _all_started(messages)
    except (RuntimeError, ValueError) as error:
        fail(error)


# ---- parts of them ---------------------------------------------------------------------------------------------------


def _checked(
    sends: bool, tensor: torch.Tensor, rank: int | None, group: GroupLike, tag: int, group_rank: int | None
) -> Message:
    operation, peer_name = ("isend", "dst") if sends else ("irecv", "src")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{operation}: expected a torch.Tensor, not {type(tensor).__name__}")
    state = find(group, "", operation)
    where = f"{operation} on group '{state.name}'"
    if type(tag) is not int or not 0 <= tag <= _MOST_TAG:
        raise ValueError(f"{where}: the tag is {tag!r}; it must be an int from 0 to {_MOST_TAG}")
    plain = _call_rows.waited(tensor).detach()
    if not sends and not plain.is_contiguous():
        raise ValueError(
            f"{where}: the tensor is not contiguous: it has shape {list(plain.shape)} and strides "
            f"{list(plain.stride())}; receive into a contiguous tensor, and copy"
        )
    if rank is not None and group_rank is not None:
        raise ValueError(f"{where}: {peer_name} and group_{peer_name} are both given; give only one of them")
    if rank is None and group_rank is None and sends:
        raise ValueError(f"{where}: {peer_name} is missing; give the rank of the receiver as dst or group_dst")
    return Message(sends, plain, _peer(where, state, peer_name, rank, group_rank), tag, state)


def _peer(where: str, state: GroupState, name: str, rank: int | None, group_rank: int | None) -> int:
    if rank is None and group_rank is None:
        return ANY_RANK
    if group_rank is not None:
        if type(group_rank) is not int or not 0 <= group_rank < state.size:
            raise ValueError(f"{where}: group_{name} is {group_rank!r}; it must be an int from 0 to {state.size - 1}")
        return group_rank
    if rank not in state.ranks:
        raise ValueError(f"{where}: {name} is {rank!r}, which is not in the group; its ranks are {list(state.ranks)}")
    return state.ranks.index(rank)


def _of(op: Any) -> Message:
    # torch's P2POp has both, and its peer is a global rank.
    group_peer = op.group_peer if isinstance(op, P2POp) else None
    return _checked(op.op in (isend, dist.isend), op.tensor, op.peer, op.group, op.tag, group_peer)


def _started(message: Message) -> Work:
    """Start it; inside a coalescing manager of the group, later."""
    ensure_initialized(message.state, message.tensor)
    recorder = _recording.recorder_on(message.state)
    if recorder is None:
        return transport_for(message.state, message.tensor, by_address=True).post(message)
    posted: Work = recorder.post(message)
    return posted


def _all_started(messages: list[Message]) -> list[Work]:
    """Start them; what the core moves on GPUs, as one."""
    if len(messages) < 2 or _recording.recorder_on(messages[0].state) is not None:
        return [_started(message) for message in messages]
    for message in messages:
        ensure_initialized(message.state, message.tensor)
    transports = [transport_for(message.state, message.tensor, by_address=True) for message in messages]
    rows = {
        i: messages[i]._replace(tensor=transport.memory(messages[i]))
        for i, transport in enumerate(transports)
        if isinstance(transport, CoreTransport) and messages[i].tensor.is_cuda
    }
    on_streams = dict(zip(rows, _p2p_streams.put(list(rows.values()), "batch"), strict=True))
    return [on_streams[i] if i in on_streams else transports[i].post(message) for i, message in enumerate(messages)]
