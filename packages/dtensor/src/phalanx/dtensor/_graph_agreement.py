"""Ranks agree on the graphs that they compiled, before the first of their collectives.

    phalanx_dtensor::agree_on_graph(str graph, str[] collectives, str[] group_names, str device_type) -> Tensor
    phalanx_dtensor::neutral(Tensor local, bool one) -> Tensor

What a rank compiles depends on sizes of its own, so one rank may have a graph that the others have not, and all would
wait for a collective that never comes. Two things are done about it:

- Where a graph is made, its collectives are kept as they were recorded: they are saved for backward and not computed
  again, they stay in the pass in which they were recorded, and two of them are not merged because they look the same on
  this rank. What is the same on all ranks is merged here: one move of one tensor, however often ops need it. Nor does a
  compiler see which rank fills with zeros what another one keeps.
- A graph has one `agree_on_graph`, with the list of its collectives. When the list is new to a group, ranks compare it,
  and all raise where it differs. It counts as an effect, which compilers neither drop nor repeat.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx.dtensor import _torch_compat
from phalanx.dtensor._mesh import AbstractMesh, Mesh, coordinate_of

# The length of the text in which each rank shows its graph if graphs differ.
_TEXT_BYTES = 4096


class Sent(NamedTuple):
    """One collective of a graph, as all ranks see it."""

    text: str  # what it is, without what differs between ranks
    groups: tuple[str, ...]  # the names of the groups of all mesh dims of its mesh: whose ranks are to agree
    device_type: str  # the device type of its tensors


def sent_over(mesh: Mesh, text: str) -> Sent:
    """One collective over mesh dims of a mesh."""
    if isinstance(mesh, AbstractMesh):
        return Sent(text, (), "cpu")
    if coordinate_of(mesh) is None:  # this rank is in none of its groups
        return Sent(text, (), mesh.device_type)
    groups = tuple(name for name, size in zip(_torch_compat.mesh_groups(mesh), mesh.shape, strict=True) if size > 1)
    return Sent(text, groups, mesh.device_type)


# ---- while a graph is made ------------------------------------------------------------------------------------------


class _Graph:
    """The record of a graph that is being made."""

    def __init__(self) -> None:
        self.node: Any = None  # the call of agree_on_graph
        self.collectives: list[str] = []
        self.groups: tuple[str, ...] = ()
        self.moved: dict[Any, torch.Tensor] = {}


_graphs: "weakref.WeakKeyDictionary[Any, _Graph]" = weakref.WeakKeyDictionary()


def _graph_of(tracer: Any) -> _Graph | None:
    return None if tracer is None else _graphs.setdefault(tracer, _Graph())


@contextmanager
def recorded(sent: Sequence[Sent], dtype: torch.dtype) -> Iterator[None]:
    """Within it, these collectives are called with tensors of a dtype, while a graph is being made."""
    tracer = _torch_compat.graph_tracer()
    graph = _graph_of(tracer)
    if graph is None or graph.node is None:
        # Also where nothing is recorded yet: torch counts effects first, and makes the graph then.
        with _torch_compat.saved_for_backward():
            _agree_op("", [], [], sent[0].device_type)
    if graph is not None:
        graph.node = graph.node or _torch_compat.last_node(tracer, _agree_op)
        where = "backward" if _torch_compat.in_backward() else "forward"
        graph.collectives += [f"{where}: {one.text} of {str(dtype).removeprefix('torch.')}" for one in sent]
        # The groups of the first mesh: the meshes of later collectives may be what differs between ranks.
        graph.groups = graph.groups or sent[0].groups
        given = (_torch_compat.compile_name(), list(graph.collectives), list(graph.groups), sent[0].device_type)
        _torch_compat.set_arguments(graph.node, _agree_op, given)
    with _torch_compat.keep_collectives("phalanx"):
        yield


def moved_once(local: torch.Tensor, key: Any, move: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of a move of a tensor; in a graph, the earlier result of the same move of the same tensor.

    The result must not be written into. The key says which move it is, the same on all ranks.
    """
    graph = _graph_of(_torch_compat.graph_tracer())
    node = None if graph is None else _torch_compat.graph_node_of(local)
    if graph is None or node is None:
        return move()
    found = graph.moved.get((node, key))
    if found is None:
        found = graph.moved[node, key] = move()
    return found


def neutral(local: torch.Tensor, one: bool) -> torch.Tensor:
    """Zeros or ones that lie contiguously, with the shape and dtype of a local tensor.

    In a graph it is an op that depends on the tensor, as what another rank makes of it does. Zeros that depend on
    nothing let torch drop all that leads to the tensor, or compute it again, on this rank alone.
    """
    if _torch_compat.is_recorded():
        made: torch.Tensor = torch.ops.phalanx_dtensor.neutral.default(local, one)
        return made
    return _neutral(local, one)


def _neutral(local: torch.Tensor, one: bool) -> torch.Tensor:
    fill = torch.ones_like if one else torch.zeros_like
    return fill(local, memory_format=torch.contiguous_format)


# ---- when it runs ---------------------------------------------------------------------------------------------------

# For each group, what its ranks agree on: (names of all groups of the graph, digest of its collectives).
_agreed: "weakref.WeakKeyDictionary[Any, set[tuple[tuple[str, ...], int]]]" = weakref.WeakKeyDictionary()


def _agree(graph: str, collectives: Sequence[str], group_names: Sequence[str], device_type: str) -> torch.Tensor:
    """The kernel. Collective over the groups where these collectives are new to them; all raise if graphs differ.

    It returns an empty tensor: Inductor takes an op without tensors for one without a device, and puts it before
    kernels that it has not written yet, whose inputs it lets go too early then.
    """
    names = tuple(group_names)
    digest = _digest(collectives)
    known = _agreed.setdefault(_torch_compat.group_named(names[0]), set()) if names else None
    result = torch.empty(0, device=device_type)
    if known is None or (names, digest) in known:
        return result
    # Along one group after the other, so that all ranks of the mesh learn of a difference anywhere.
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=device_type)
    try:
        for name in names:
            extremes = pc.wait_tensor(pc.all_reduce(extremes, "max", name))
    except RuntimeError as error:
        raise RuntimeError(
            f"{_shown(graph, collectives)}: this rank runs the graph for the first time, and could not compare it with "
            f"the other ranks of the groups {list(names)}: {error}"
        ) from error
    if extremes.tolist() != [digest, -digest]:
        raise RuntimeError(_difference(graph, collectives, names, device_type))
    known.add((names, digest))
    return result


def _difference(graph: str, collectives: Sequence[str], names: Sequence[str], device_type: str) -> str:
    """The error text for graphs that differ. Collective over the groups."""
    mine = f"{dist.get_rank()}\n{_shown(graph, collectives)}".encode()[:_TEXT_BYTES]
    texts = torch.zeros(1, _TEXT_BYTES, dtype=torch.uint8)
    texts[0, : len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    texts = texts.to(device_type)
    for name in names:
        texts = pc.wait_tensor(pc.all_gather_tensor(texts, 0, name))
    ranks: dict[str, list[int]] = {}
    for row in texts.cpu():
        rank, _, text = bytes(row.tolist()).rstrip(b"\0").decode(errors="replace").partition("\n")
        if int(rank) not in ranks.setdefault(text, []):
            ranks[text].append(int(rank))
    shown = "; ".join(
        f"rank{'s' if len(own) > 1 else ''} {', '.join(map(str, sorted(own)))}: {text}" for text, own in ranks.items()
    )
    return (
        f"the ranks compiled different graphs, so their collectives do not match: {shown}. All ranks of a mesh must "
        "compile the same collectives in the same order: look for code in the compiled function that depends on the "
        "rank, or compile it with dynamic=False"
    )


def _digest(collectives: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(collectives).encode(), digest_size=7).digest(), "little")


def _shown(graph: str, collectives: Sequence[str]) -> str:
    # The digest tells long lists apart whose beginnings are the same.
    count = f"{len(collectives)} collective{'s' * (len(collectives) != 1)}"
    return f"graph {graph} [{_digest(collectives):x}] with {count} ({', '.join(collectives)})"


def _agree_fake(*given: Any) -> torch.Tensor:
    return torch.empty(0, device=given[-1])


_SCHEMA = "agree_on_graph(str graph, str[] collectives, str[] group_names, str device_type) -> Tensor"
_library = _torch_compat.op_library(
    "phalanx_dtensor",
    (
        (_SCHEMA, _agree, _agree_fake, ()),
        ("neutral(Tensor local, bool one) -> Tensor", _neutral, _neutral, ()),
    ),
)
_agree_op: Any = torch.ops.phalanx_dtensor.agree_on_graph.default
_torch_compat.keep_effect(_agree_op)
