"""Running the steps of a plan: the collectives of phalanx.collectives for the calls of `local_steps`.

Groups are given by name, which is a constant for torch.compile and the fastest form otherwise. A call gives a tensor
that may be pending; a local step waits for what it reads.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, product
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import phalanx.collectives as pc
from phalanx.core import MismatchError
from phalanx.dtensor._graph_agreement import Sent, recorded, sent_over
from phalanx.dtensor._mesh import AbstractMesh, Mesh, coordinate_of, describe
from phalanx.dtensor._redistribute.local_steps import Action, Call, Local
from phalanx.dtensor._redistribute.planner import LOCAL, Step
from phalanx.dtensor._torch_compat import is_recorded, mesh_groups, ranks_of_mesh

Run: TypeAlias = Callable[..., torch.Tensor]
# Messages of a redistribution do not meet those of a user's own send and recv.
TAG = 0x70687864
_Pending = pc.AsyncCollectiveTensor
_all_gather, _all_reduce, _reduce_scatter = pc.all_gather_tensor, pc.all_reduce, pc.reduce_scatter_tensor
_all_gather_v, _reduce_scatter_v = pc.all_gather_v, pc.reduce_scatter_v
_all_to_all, _shard_dim_alltoall, _wait = pc.all_to_all_single, pc.shard_dim_alltoall, pc.wait_tensor


def wait_if_pending(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, after the collective that fills it."""
    return _wait(tensor) if isinstance(tensor, _Pending) else tensor


# ---- groups ----------------------------------------------------------------------------------------------------------


def ranks_of(mesh: Mesh) -> tuple[int, ...]:
    """The global ranks of a mesh in the order of their coordinates; of an AbstractMesh, their numbers."""
    return tuple(range(mesh.size())) if isinstance(mesh, AbstractMesh) else ranks_of_mesh(mesh)


def order_of(mesh: Mesh, mesh_dim: int) -> tuple[int, ...]:
    """The coordinates of this rank's neighbours on a mesh dim, in the order of their process group.

    torch sorts the ranks of a group, so a mesh whose ranks do not ascend has another order than its groups.
    """
    size = mesh.shape[mesh_dim]
    coordinate = coordinate_of(mesh)
    if isinstance(mesh, AbstractMesh) or coordinate is None or size == 1:
        return tuple(range(size))
    of = dict(zip(product(*map(range, mesh.shape)), ranks_of_mesh(mesh), strict=True))
    row = [of[(*coordinate[:mesh_dim], at, *coordinate[mesh_dim + 1 :])] for at in range(size)]
    ranks = dist.get_process_group_ranks(mesh.get_group(mesh_dim))
    return tuple(row.index(rank) for rank in ranks)


# ---- calls -----------------------------------------------------------------------------------------------------------


def bind(call: Call, mesh: Mesh | None) -> Local:
    """The collective of a call on a mesh, whose mesh dims it names; None for an exchange among ranks of two meshes."""
    if isinstance(mesh, AbstractMesh):
        return _refusal(call, mesh)
    if call.name == "exchange":
        return _exchange(call, mesh)
    assert mesh is not None
    name = mesh_groups(mesh)[call.mesh_dim]
    dim, target, op, sizes, wanted = call.dim, call.target_dim, call.op, list(call.sizes), list(call.target_sizes)
    calls: dict[str, Local] = {
        "all_gather": lambda x: _all_gather(x, dim, name),
        "all_reduce": lambda x: _all_reduce(x, op, name),
        "reduce_scatter": lambda x: _reduce_scatter(x, op, dim, name),
        "all_gather_v": lambda x: _all_gather_v(x, sizes, dim, name),
        "reduce_scatter_v": lambda x: _reduce_scatter_v(x, op, sizes, dim, name),
        "all_to_all": lambda x: _shard_dim_alltoall(x, dim, target, name),
        "all_to_all_v": lambda x: _shard_dim_alltoall(x, dim, target, name, "", sizes, wanted),
    }
    return calls[call.name]


def _refusal(call: Call, mesh: Mesh) -> Local:
    text = (
        f"redistribute: {call.name} over an AbstractMesh {describe(mesh)}, which has no ranks that could communicate: "
        "make the tensor on a DeviceMesh, from torch.distributed.init_device_mesh"
    )

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(text)

    return refuse


def _exchange(call: Call, mesh: Mesh | None) -> Local:
    peers, sent, received = call.peers, list(call.sent), list(call.received)
    if call.mesh_dim >= 0:
        assert isinstance(mesh, DeviceMesh)
        name = mesh_groups(mesh)[call.mesh_dim]
        return lambda x: _all_to_all(x, received, sent, name)
    world = dist.group.WORLD
    assert world is not None
    name, size = str(world.group_name), dist.get_world_size()
    everyone = peers if mesh is None else ranks_of(mesh)
    if len(everyone) == size:
        to, of = [0] * size, [0] * size
        for peer, out, into in zip(peers, sent, received, strict=True):
            to[peer], of[peer] = out, into
        return lambda x: _all_to_all(x, of, to, name)
    return _messages(peers, sent, received, name)


def _messages(peers: Sequence[int], sent: Sequence[int], received: Sequence[int], name: str) -> Local:
    """An exchange of messages, in which only the ranks take part that have something for each other."""
    me, total = dist.get_rank(), sum(received)
    # (rank, where what goes to it begins, how much that is, where what comes from it begins, how much that is)
    parts = list(zip(peers, accumulate(sent, initial=0), sent, accumulate(received, initial=0), received, strict=False))
    own = next(((to, of, n) for peer, to, n, of, _ in parts if peer == me), (0, 0, 0))
    outs = [(peer, to, n) for peer, to, n, _, _ in parts if n and peer != me]
    ins = [(peer, of, n) for peer, _, _, of, n in parts if n and peer != me]
    names = ["irecv"] * len(ins) + ["isend"] * len(outs)
    others = [peer for peer, _, _ in (*ins, *outs)]
    tags = [TAG] * len(names)

    def run(flat: torch.Tensor) -> torch.Tensor:
        result = flat.new_empty(total)
        if own[2]:
            result.narrow(0, own[1], own[2]).copy_(flat.narrow(0, own[0], own[2]))
        if names:
            tensors = [result.narrow(0, at, n) for _, at, n in ins] + [flat.narrow(0, at, n) for _, at, n in outs]
            for each in pc.batch_p2p_ops_inplace(names, others, tags, tensors, name):
                wait_if_pending(each)
        return result

    return run


def sent_of(mesh: Mesh, steps: Sequence[Step]) -> tuple[Sent, ...]:
    """The texts of the collectives in steps on one mesh, for the comparison of graphs."""
    return tuple(
        sent_over(mesh, f"{step.collective} over mesh dims {step.mesh_dims} of {describe(mesh)}")
        for step in steps
        if step.collective not in LOCAL and any(mesh.shape[mesh_dim] > 1 for mesh_dim in step.mesh_dims)
    )


# ---- a chain of actions ----------------------------------------------------------------------------------------------


def chain(actions: Sequence[tuple[Action, Mesh | None]], sent: Sequence[Sent] = ()) -> Run:
    """run(local, async_op=False) of several actions, each with the mesh of its call, one after the other.

    `sent` is what graphs say of the collectives, the same on all ranks: a rank may have nothing to do in one.
    """
    parts: list[Local] = []
    is_view = may_pend = False
    for action, mesh in actions:
        if action.keeps:
            continue
        call = None if action.call is None else bind(action.call, mesh)
        parts.extend(part for part in (action.before, call, action.after) if part is not None)
        is_view = action.is_view
        may_pend = call is not None and action.after is None
    if is_view:  # of the caller's tensor, or of one that is larger than what is needed of it
        parts.append(_copied)
    if not parts:
        return _as_stored(same, sent) if sent else same
    return _as_stored(_several(parts[:-1], parts[-1], may_pend), sent)


def _as_stored(run: Run, sent: Sequence[Sent]) -> Run:
    """Collectives read memory, where conj() and imag may have left a change undone; and so do all ops below
    `__torch_dispatch__`, where torch does not make such changes any more.
    """

    def resolved(local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
        if not torch.compiler.is_dynamo_compiling() and (local.is_conj() or local.is_neg()):
            local = local.resolve_conj().resolve_neg()
        try:
            if sent and is_recorded():
                with recorded(sent, local.dtype):
                    return run(local, async_op)
            return run(local, async_op)
        except MismatchError as error:
            raise explained(error) from None

    return resolved


_SIZES = (
    " The local tensors of a DTensor have not the sizes or dtypes that it says: DTensor.from_local and local_map take "
    "it that every rank has as much as this one. Where ranks have more or less, give from_local shape=, the shape of "
    "the whole tensor, with Shard(dim) for the chunks of torch.chunk and SizedShard(dim, sizes) for others; "
    "from_local(run_check=True) tells which ranks differ."
)


def explained(error: MismatchError) -> MismatchError:
    """The error of ranks that made other calls of one collective, with what a user of DTensors can do."""
    if not str(error).endswith(_SIZES):
        error.args = (str(error) + _SIZES,)
    return error


def same(local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
    """Where nothing changes."""
    return local


def outside(local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
    """On a rank that is not in the mesh."""
    return local.new_empty(0)


def _copied(view: torch.Tensor) -> torch.Tensor:
    return view.clone(memory_format=torch.contiguous_format)


def _several(first: Sequence[Local], last: Local, may_pend: bool) -> Run:
    def run(local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
        value = local
        for part in first:
            value = wait_if_pending(part(value))
        value = last(value)
        return value if type(value) is not _Pending or (async_op and may_pend) else _wait(value)

    return run
