"""Random ops in compiled functions: a key is a tensor there, drawn when the graph runs, and values are made of it.

    phalanx_dtensor::random_key(Tensor? after, str[] group_names, str device_type) -> Tensor
    phalanx_dtensor::random_values(Tensor key, ...) -> Tensor  # elements of this rank: which, where, how

A graph has one `random_key` where eager draws a key, in the same order: it counts as an effect, which compilers neither
drop nor repeat, and takes the key before it, since Inductor swaps effects that nothing else ties. What backward needs
of a key is saved, 8 bytes. Values are a function of the key: a checkpointed block makes them again.
"""

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from phalanx.core.random import Kind
from phalanx.dtensor import _torch_compat
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import Mesh, coordinate_of
from phalanx.dtensor._random.fill import Distribution, fill_runs
from phalanx.dtensor._random.state import agree_among, generator_of_ranks, key_of

_WRAP = 1 << 64
_INTEGERS = 0  # the kind of a law of integers: `a` is the smallest, `b` how many less one

# The last key of each graph that is being made.
_last: "weakref.WeakKeyDictionary[Any, torch.Tensor]" = weakref.WeakKeyDictionary()


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64."""
    return value - _WRAP if value >= _WRAP >> 1 else value


def key(mesh: Mesh, generator: torch.Generator | None = None) -> torch.Tensor:
    """The key of one random op, in the graph that is being made: its bits, as an int64 without dims.

    When the graph runs, it is collective as `draw_key` is.

    Raises:
        RuntimeError: A generator is given: a graph cannot hold one.
    """
    if generator is not None:
        raise RuntimeError(
            "a random op on a DTensor in a compiled function can only use the default generator: leave `generator` "
            "out, and seed with torch.manual_seed, or phalanx.dtensor.random.manual_seed(seed, mesh)"
        )
    is_shared = isinstance(mesh, DeviceMesh) and mesh.size() > 1 and coordinate_of(mesh) is not None
    names = list(_torch_compat.mesh_groups(mesh)) if is_shared else []  # type: ignore[arg-type]
    tracer = _torch_compat.graph_tracer()
    after = None if tracer is None else _last.get(tracer)
    with _torch_compat.saved_for_backward():
        made: torch.Tensor = torch.ops.phalanx_dtensor.random_key(after, names, str(mesh.device_type))
    if tracer is not None:
        _last[tracer] = made
    return made


def values(spec: DTensorSpec, distribution: Distribution, key: torch.Tensor, device: torch.device) -> torch.Tensor:
    """This rank's local tensor of a random tensor, in the graph that is being made. Not collective.

    Partial counts as Replicate, and this rank must be in the mesh of the spec.
    """
    runs = spec.local_runs
    kind, a, b = distribution
    law = (_INTEGERS, int(a), _signed(int(b) - 1)) if kind is None else (int(kind), float(a), float(b))
    made: torch.Tensor = torch.ops.phalanx_dtensor.random_values(
        key,
        list(spec.shape),
        [start for dim in runs for start, _ in dim],
        [length for dim in runs for _, length in dim],
        [len(dim) for dim in runs],
        list(spec.local_stride),
        *law,
        spec.dtype,
        device,
    )
    return made


def _key_kernel(after: torch.Tensor | None, group_names: Sequence[str], device_type: str) -> torch.Tensor:
    groups = [_torch_compat.group_named(name) for name in group_names]
    if groups:
        agree_among(groups, device_type)
    return torch.tensor(_signed(key_of(generator_of_ranks(bool(groups)))), dtype=torch.int64)


def _key_fake(*_: Any) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def _by_dim(values: Sequence[int], counts: Sequence[int]) -> list[Sequence[int]]:
    """What belongs to each dim, of which so many belong to it."""
    return [values[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def _empty(
    lengths: Sequence[int], counts: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    size = [sum(own) for own in _by_dim(lengths, counts)]
    return torch.empty_strided(size, list(stride), dtype=dtype, device=device)


def _values_kernel(
    key: torch.Tensor, shape: Any, starts: Any, lengths: Any, counts: Any, stride: Any, *rest: Any
) -> torch.Tensor:
    kind, a, b, *like = rest
    local = _empty(lengths, counts, stride, *like)
    if local.numel():
        law = Distribution(None, a, int(b) % _WRAP + 1) if kind == _INTEGERS else Distribution(Kind(kind), a, b)
        runs = tuple(
            tuple((start, length) for start, length in zip(*own, strict=True) if length)
            for own in zip(_by_dim(starts, counts), _by_dim(lengths, counts), strict=True)
        )
        fill_runs(local, tuple(shape), runs, law, int(key.item()) % _WRAP)
    return local


def _values_fake(key: torch.Tensor, shape: Any, starts: Any, lengths: Any, counts: Any, stride: Any, *rest: Any) -> Any:
    return _empty(lengths, counts, stride, *rest[3:])


_VALUES_SCHEMA = (
    "random_values(Tensor key, SymInt[] shape, SymInt[] starts, SymInt[] lengths, int[] counts, SymInt[] stride, "
    "int kind, Scalar a, Scalar b, ScalarType dtype, Device device) -> Tensor"
)
_KEY_SCHEMA = "random_key(Tensor? after, str[] group_names, str device_type) -> Tensor"
_library = _torch_compat.op_library(
    "phalanx_dtensor",
    (
        (_KEY_SCHEMA, _key_kernel, _key_fake, (torch.Tag.nondeterministic_seeded,)),
        (_VALUES_SCHEMA, _values_kernel, _values_fake, ()),
    ),
)
_torch_compat.keep_effect(torch.ops.phalanx_dtensor.random_key.default)
