"""Attention of queries, keys and values that are sharded on the sequence: round a ring (`ring_attention.py`).

The output stays sharded on the sequence, and no rank ever has all keys. With a StridedShard, of which each rank has
pieces from the head and from further back, causal attention costs ranks about the same.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.dtensor._algorithms.common import check_strict, redistribute_local, wrapped
from phalanx.dtensor._algorithms.registry import algorithm
from phalanx.dtensor._algorithms.ring_attention import SEQUENCE, Ring, ring_attention, ring_attention_backward
from phalanx.dtensor._compile import is_traced
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import coordinate_of
from phalanx.dtensor._op_plan import bound
from phalanx.dtensor.placement_types import Replicate, Shard, split_dim


def _takes(first: int, dropout: int) -> Any:
    """A test of whether q, k and v, from argument `first` on, have the same shards, on the sequence in one mesh dim."""

    def takes(values: Sequence[Any], choice: Any, moves: Sequence[Any]) -> bool:
        query, key, value = (one._spec for one in values[first : first + 3])
        if values[dropout] != 0 or values[dropout + 2] is not None or values[0].device.type != "cpu":
            return False
        if (
            not isinstance(query.mesh, DeviceMesh)
            or coordinate_of(query.mesh) is None
            or type(query) is not DTensorSpec
        ):
            return False
        if key.placements != query.placements or value.placements != query.placements:
            return False
        if key.shape != value.shape or not all(one.shape.numel() for one in (query, key, value)):
            return False
        cut = [one for one in query.placements if split_dim(one) == SEQUENCE]
        # On other mesh dims ranks have other batches or heads, which know nothing of each other: equal shares of them.
        others = [one for one in query.placements if split_dim(one) != SEQUENCE]
        if len(cut) != 1 or not all(
            one == Replicate() or (isinstance(one, Shard) and one.dim < SEQUENCE) for one in others
        ):
            return False
        return query.local_shape[0] > 0 and all(_is_even(query, dim) for dim in range(SEQUENCE))

    return takes


def _is_even(spec: DTensorSpec, dim: int) -> bool:
    ways = 1
    for mesh_dim in spec.mesh_dims_of(dim):
        ways *= spec.mesh.shape[mesh_dim]
    return spec.shape[dim] % ways == 0


def _ring(query: DTensorSpec, key: DTensorSpec) -> Ring:
    mesh = query.mesh
    assert isinstance(mesh, DeviceMesh)
    (mesh_dim,) = query.mesh_dims_of(SEQUENCE)
    coordinate = coordinate_of(mesh) or ()
    places = [(*coordinate[:mesh_dim], at, *coordinate[mesh_dim + 1 :]) for at in range(mesh.shape[mesh_dim])]
    group: dist.ProcessGroup | None = mesh.get_group(mesh_dim) if len(places) > 1 else None
    return Ring(
        ranks=tuple(int(mesh.mesh[place]) for place in places),
        place=coordinate[mesh_dim],
        group=group,
        queries=tuple(query.local_runs_at(place)[SEQUENCE] for place in places),
        keys=tuple(key.local_runs_at(place)[SEQUENCE] for place in places),
    )


def _gathered(tensor: Any) -> Any:
    """Keys or values with the whole sequence. Collective.

    A graph has no messages round a ring: there the op is done by its rule, as where sizes are symbols.
    """
    spec: DTensorSpec = tensor._spec
    whole = [Replicate() if split_dim(one) == SEQUENCE else one for one in spec.placements]
    return wrapped(redistribute_local(tensor, whole), spec.mesh, whole, spec.shape, spec)


@algorithm("aten._scaled_dot_product_flash_attention_for_cpu.default", takes=_takes(0, 3))
def attention(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """(query, key, value, dropout_p, is_causal, attn_mask, scale) -> (output, logsumexp), sharded as query."""
    check_strict(op)
    query, key, value, _, causal, _, scale = bound(op, args, kwargs)
    if is_traced():
        made: tuple[Any, Any] = op(query, *map(_gathered, (key, value)), *args[3:], **kwargs)
        return made
    spec: DTensorSpec = query._spec
    locals_ = (query._local_tensor, key._local_tensor, value._local_tensor)
    output, total = ring_attention(*locals_, _ring(spec, key._spec), causal, scale)
    shape = (*spec.shape[:-1], value.shape[-1])
    return wrapped(output, spec.mesh, spec.placements, shape, spec), wrapped(
        total, spec.mesh, spec.placements, spec.shape[:-1]
    )


@algorithm("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", takes=_takes(1, 6))
def attention_backward(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale) -> gradients."""
    check_strict(op)
    grad, query, key, value, output, total, _, causal, _, scale = bound(op, args, kwargs)
    if is_traced():
        whole: tuple[Any, Any, Any] = op(grad, query, *map(_gathered, (key, value)), *args[4:], **kwargs)
        return whole
    spec: DTensorSpec = query._spec
    found = ring_attention_backward(
        redistribute_local(grad, spec.placements),
        query._local_tensor,
        key._local_tensor,
        value._local_tensor,
        redistribute_local(output, spec.placements),
        redistribute_local(total, spec.placements),
        _ring(spec, key._spec),
        causal,
        scale,
    )
    given = (query, key, value)
    pieces = [
        wrapped(one, spec.mesh, spec.placements, of.shape, of._spec) for one, of in zip(found, given, strict=True)
    ]
    return pieces[0], pieces[1], pieces[2]
