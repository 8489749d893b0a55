"""Attention of queries, keys and values that are sharded on the sequence: round a ring (`ring_attention.py`).

The output stays sharded on the sequence, and no rank ever has all keys. With a StridedShard, of which each rank has
pieces from the head and from further back, causal attention costs ranks about the same.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.dtensor._algorithms.common import algorithm, as_before, is_even, redistribute_local, wrapped
from phalanx.dtensor._algorithms.ring_attention import SEQUENCE, Ring, ring_attention, ring_attention_backward
from phalanx.dtensor._compile import is_traced
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import coordinate_of
from phalanx.dtensor._op_plan import call_bound
from phalanx.dtensor.placement_types import Replicate, Shard, split_dim


def _takes(query: Any, key: Any, value: Any, dropout: float, causal: bool, mask: Any, scale: float | None) -> bool:
    """Whether the three have the same shards, on the sequence in one mesh dim."""
    specs = query._spec, key._spec, value._spec
    spec = specs[0]
    if dropout != 0 or mask is not None or query.device.type != "cpu":
        return False
    if not isinstance(spec.mesh, DeviceMesh) or coordinate_of(spec.mesh) is None or type(spec) is not DTensorSpec:
        return False
    if any(one.placements != spec.placements or not one.shape.numel() for one in specs):
        return False
    # On other mesh dims ranks have other batches or heads, which know nothing of each other: equal shares of them.
    others = [one for one in spec.placements if split_dim(one) != SEQUENCE]
    if key.shape != value.shape or len(others) != spec.mesh.ndim - 1:
        return False
    if not all(one == Replicate() or (isinstance(one, Shard) and one.dim < SEQUENCE) for one in others):
        return False
    return spec.local_shape[0] > 0 and all(is_even(spec, dim) for dim in range(SEQUENCE))


def _takes_backward(grad: Any, query: Any, key: Any, value: Any, out: Any, total: Any, *rest: Any) -> bool:
    return _takes(query, key, value, *rest)


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


@algorithm("aten._scaled_dot_product_flash_attention_for_cpu.default", takes=_takes)
def attention(op: Any, query: Any, key: Any, value: Any, *rest: Any) -> tuple[Any, Any]:
    """(dropout_p, is_causal, attn_mask, scale) follow -> (output, logsumexp), sharded as query."""
    if is_traced():
        made: tuple[Any, Any] = call_bound(op, [query, *map(_gathered, (key, value)), *rest])
        return made
    _, causal, _, scale = rest
    spec: DTensorSpec = query._spec
    locals_ = (query._local_tensor, key._local_tensor, value._local_tensor)
    output, total = ring_attention(*locals_, _ring(spec, key._spec), causal, scale)
    return (
        wrapped(output, spec.mesh, spec.placements, (*spec.shape[:-1], value.shape[-1]), spec),
        wrapped(total, spec.mesh, spec.placements, spec.shape[:-1]),
    )


@algorithm("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", takes=_takes_backward)
def attention_backward(op: Any, grad: Any, query: Any, key: Any, value: Any, *rest: Any) -> tuple[Any, ...]:
    """(out, logsumexp, dropout_p, is_causal, attn_mask, scale) follow -> the gradients of the three."""
    if is_traced():
        whole: tuple[Any, ...] = call_bound(op, [grad, query, *map(_gathered, (key, value)), *rest])
        return whole
    output, total, _, causal, _, scale = rest
    spec: DTensorSpec = query._spec
    given = (query, key, value)
    grad, output, total = (redistribute_local(one, spec.placements) for one in (grad, output, total))
    locals_ = query._local_tensor, key._local_tensor, value._local_tensor
    found = ring_attention_backward(grad, *locals_, output, total, _ring(spec, key._spec), causal, scale)
    return tuple(as_before(one, of._spec) for one, of in zip(found, given, strict=True))
