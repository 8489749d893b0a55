"""What inference engines ask of a group of CPUs beyond the other collectives: results along any dim, and dicts.

    from phalanx.collectives import all_reduce_, inference

    all_reduce_(hidden, "sum", tp)                                    # in place
    logits = inference.gather(logits, dst=0, group=tp)                # joined along the last dim; None but on rank 0
    inference.send_tensor_dict({"hidden": hidden}, dst=1, group=pp)   # and recv_tensor_dict(0, pp) on rank 1

They return when they are complete, have no gradient, and belong outside of compiled graphs, but for `all_gather`.
docs/howto/inference.md shows them as the communicators of engines.
"""

import json
import math
import struct
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.distributed.distributed_c10d import GatherOptions

from phalanx.collectives import _call_rows, _recording
from phalanx.collectives._functional import all_gather_tensor, wait_tensor
from phalanx.collectives._layout import check_dim
from phalanx.collectives._p2p import irecv, isend, recv
from phalanx.collectives._process_group import GroupLike, find, process_group_of

__all__ = ["all_gather", "gather", "recv_tensor_dict", "send_tensor_dict"]

# ---- results along any dim -------------------------------------------------------------------------------------------


def all_gather(tensor: torch.Tensor, group: GroupLike = None, dim: int = -1) -> torch.Tensor:
    """Join the tensors of all ranks along a dim; every rank gets the result. Collective.

    As all_gather_tensor, but complete on return and without a gradient.

    Args:
        tensor: A tensor of at least one dim and of any strides and dtype; shape and dtype are the same on all ranks.
        group: A ProcessGroup, a one-dimensional DeviceMesh, (DeviceMesh, dim by its number or name), a list of global
            ranks, a list of lists of them, or None for the default process group.
        dim: The dim along which to join; negative ones count from the end.

    Returns:
        A contiguous tensor of the shape of `tensor`, with `dim` group-size times as long.

    Raises:
        IndexError: There is no such dim; nothing was sent.
        ValueError, PhalanxError: As for `all_reduce`.

    Example:
        >>> all_gather(torch.tensor([[rank], [rank]]), group)
        tensor([[0, 1],
                [0, 1]])
    """
    dim = check_dim("all_gather", "dim", dim, tensor.dim())
    given = tensor.detach() if tensor.requires_grad else tensor
    return wait_tensor(all_gather_tensor(given, dim, group))


def gather(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: GroupLike = None,
    dim: int = -1,
    *,
    group_dst: int | None = None,
) -> torch.Tensor | None:
    """Join the tensors of all ranks along a dim; one rank gets the result. Collective.

    Args:
        tensor, dim: As for `all_gather`.
        dst: The rank that gets it, as a global rank. By default the first rank of the group.
        group: As for `all_gather`.
        group_dst: The rank that gets it, as a rank within the group, instead of `dst`.

    Returns:
        What `all_gather` gives, on that rank; None elsewhere.

    Raises:
        IndexError: There is no such dim; nothing was sent.
        ValueError: There is no such rank, or the group is not one of this rank's; nothing was sent.
        RuntimeError: It failed, with what `torch.distributed.gather` raises: a DistBackendError where the backend is
            phalanx.

    Example:
        >>> gather(torch.tensor([[rank]]), 1, group)  # on rank 1
        tensor([[0, 1]])
    """
    dim = check_dim("gather", "dim", dim, tensor.dim())
    process_group = process_group_of(group, operation="gather")
    if dst is not None and group_dst is not None:
        raise ValueError("gather: dst and group_dst are both given; give only one of them")
    ranks = range(process_group.size()) if dst is None else dist.get_process_group_ranks(process_group)
    name = dst if dst is not None else group_dst or 0
    if name not in ranks:
        raise ValueError(f"gather: there is no rank {name!r} in the group; it must be one of {list(ranks)}")
    root = ranks.index(name)
    given, joined, parts = _call_rows.waited(tensor).detach(), None, None
    if root == process_group.rank():
        if math.prod(tensor.shape[:dim]) == 1 or _writes_columns(process_group):
            shape = list(tensor.shape)
            shape[dim] *= len(ranks)
            joined = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            parts = list(joined.chunk(len(ranks), dim))
        else:
            parts = [torch.empty_like(given, memory_format=torch.contiguous_format) for _ in ranks]
    options = GatherOptions()
    options.rootRank, options.asyncOp = root, False
    process_group.gather([] if parts is None else [parts], [given], options).wait()
    return torch.cat(parts, dim) if joined is None and parts is not None else joined


def _writes_columns(group: dist.ProcessGroup) -> bool:
    """Whether the backend of a group writes parts of a list where they lie, however that is."""
    return "cpu:phalanx" in dist.get_backend_config(group).split(",")


# ---- dicts of tensors ------------------------------------------------------------------------------------------------
# The first message has a fixed size: a mark, the length of the description of the dict, and its beginning. The second
# one has the rest of the description, if there is a rest. Then comes each tensor that has elements, as its bytes, from
# and to where it lies.

_FIRST = 1024
_HEAD = struct.Struct("<4sI")
_MARK = b"dict"
_PLAIN = (type(None), bool, int, float, str)


def send_tensor_dict(
    tensors: dict[str, Any],
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    *,
    group_dst: int | None = None,
    async_op: bool = False,
) -> list[Work]:
    """Send a dict of tensors and plain values to another rank, which calls `recv_tensor_dict`. Not collective, but for
    the first call on a group.

    Nothing is pickled: tensors are read where they lie, and names, shapes and other values are sent as JSON.

    Args:
        tensors: Tensors of the CPU by name, of any shape, strides and dtype, empty ones too; and None, bools, ints,
            floats, strings, tuples, lists and dicts of all these.
        dst, group, tag, group_dst: As for `isend`.
        async_op: Whether to return at once. The tensors must stay unchanged until the works are complete.

    Returns:
        Works, all of which have to be waited for; an empty list unless async_op.

    Raises:
        TypeError: There is something else in the dict; nothing was sent.
        ValueError: As for `isend`, or a coalescing manager is open on the group; nothing was sent.
        PhalanxError: As for `isend`.

    Example:
        >>> if rank == 0:
        ...     works = send_tensor_dict({"hidden": torch.ones(2), "step": 3}, 1, group)
        ... else:
        ...     print(recv_tensor_dict(0, group))
        {'hidden': tensor([1., 1.]), 'step': 3}
    """
    if not isinstance(tensors, dict):
        raise TypeError(f"send_tensor_dict: expected a dict, not {type(tensors).__name__}")
    _check_unrecorded("send_tensor_dict", group)
    found: list[torch.Tensor] = []
    text = json.dumps(_described(tensors, "", found), separators=(",", ":")).encode()
    first = bytearray(_FIRST)
    _HEAD.pack_into(first, 0, _MARK, len(text))
    begin = text[: _FIRST - _HEAD.size]
    first[_HEAD.size : _HEAD.size + len(begin)] = begin
    rest = bytearray(text[len(begin) :])
    messages = [torch.frombuffer(each, dtype=torch.uint8) for each in (first, rest) if each]
    messages += [_bytes_of(tensor) for tensor in found if tensor.numel()]
    works = [isend(message, dst, group, tag, group_dst) for message in messages]
    if async_op:
        return works
    for work in works:
        work.wait()
    return []


def recv_tensor_dict(
    src: int | None = None, group: GroupLike = None, tag: int = 0, *, group_src: int | None = None
) -> dict[str, Any]:
    """Receive what another rank sends by `send_tensor_dict`. Not collective, but for the first call on a group.

    Args:
        src, group, tag, group_src: As for `irecv`.

    Returns:
        The dict, with new contiguous tensors.

    Raises:
        ValueError: As for `irecv`, or a coalescing manager is open on the group.
        RuntimeError: What came is the message of another function.
        PhalanxError: As for `irecv`.

    Example:
        >>> if rank == 0:
        ...     print(recv_tensor_dict(1, group))
        ... else:
        ...     works = send_tensor_dict({"layers": [torch.zeros(1), torch.ones(1)]}, 0, group)
        {'layers': [tensor([0.]), tensor([1.])]}
    """
    _check_unrecorded("recv_tensor_dict", group)
    first = bytearray(_FIRST)
    src = recv(torch.frombuffer(first, dtype=torch.uint8), src, group, tag, group_src)
    mark, length = _HEAD.unpack_from(first)
    if mark != _MARK:
        raise RuntimeError(
            f"recv_tensor_dict: what rank {src} sent with tag {tag} is not the beginning of a dict; send it with "
            "send_tensor_dict, or receive it with recv"
        )
    text = first[_HEAD.size : _HEAD.size + length]
    if len(text) < length:
        rest = bytearray(length - len(text))
        recv(torch.frombuffer(rest, dtype=torch.uint8), src, group, tag)
        text += rest
    found: list[torch.Tensor] = []
    tensors = cast("dict[str, Any]", _rebuilt(json.loads(text), found))
    works = [irecv(_bytes_of(tensor), src, group, tag) for tensor in found if tensor.numel()]
    for work in works:
        work.wait()
    return tensors


def _check_unrecorded(operation: str, group: GroupLike) -> None:
    if _recording.is_any_open() and _recording.recorder_on(find(group, "", operation)) is not None:
        raise ValueError(f"{operation}: a coalescing manager is open on the group; call it outside of the manager")


def _described(value: Any, path: str, found: list[torch.Tensor]) -> Any:
    """The description of a value, for JSON; its tensors are appended to `found`.

    Args:
        value: The value.
        path: Where it is in the dict, for error texts.
        found: The tensors so far.
    """
    if isinstance(value, torch.Tensor):
        plain = _call_rows.memory_of(_call_rows.waited(value).detach())
        if plain is None or plain.is_quantized:
            raise TypeError(
                f"send_tensor_dict: {path} is a {type(value).__name__} of layout {value.layout} on {value.device}; "
                "give a dense tensor in memory of the CPU"
            )
        found.append(plain)
        return {"tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape)]}
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple, torch.Size):
        items = [_described(item, f"{path}[{i}]", found) for i, item in enumerate(value)]
        return {"list" if type(value) is list else "tuple": items}
    if isinstance(value, dict):
        if wrong := [key for key in value if type(key) is not str]:
            raise TypeError(f"send_tensor_dict: a dict has the key {wrong[0]!r}; keys must be strings")
        return {"dict": {key: _described(item, f"{path}[{key!r}]", found) for key, item in value.items()}}
    raise TypeError(
        f"send_tensor_dict: {path} is a {type(value).__name__}; give tensors, None, bools, ints, floats, strings, and "
        "tuples, lists and dicts of them"
    )


def _rebuilt(described: Any, found: list[torch.Tensor]) -> Any:
    """The value of a description; its tensors, which are still to be received, are appended to `found`."""
    if not isinstance(described, dict):
        return described
    ((kind, what),) = described.items()
    if kind == "tensor":
        found.append(torch.empty(what[1], dtype=getattr(torch, what[0])))
        return found[-1]
    if kind == "dict":
        return {key: _rebuilt(item, found) for key, item in what.items()}
    items = [_rebuilt(item, found) for item in what]
    return items if kind == "list" else tuple(items)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as bytes: a view, or a copy of a tensor that is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)
