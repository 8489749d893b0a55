"""Indices out of range: the error that one process raises, on every rank.

A kernel looks only at what it reads. Where a rank has nothing of a tensor, looks up only what it has, or takes its part
of an index that all have, it would pass over an index that another rank refuses, and ranks would be out of step. So the
index is looked at here, on every rank that has it: no communication. Ranks with other parts of an index do not see
those of each other, and only the one that has a wrong one raises.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._torch_compat import assert_async


class Bound(NamedTuple):
    """The values that the elements of an index may have."""

    argument: int  # counted in the op's schema
    place: int | None  # where in it, if it is a list
    dim: int  # the dim that is looked up; -1: all elements, counted flat
    size: int  # the number of elements there
    wraps: bool  # whether negative ones count from the end
    error: type[Exception]  # what torch raises
    ignored: int | None = None  # an element that stands for nothing
    before: bool = False  # whether every rank has the whole index before anything moves


def check_bounds(op: Any, index: torch.Tensor, bound: Bound) -> None:
    """Raise if an element of the local tensor of an index is out of range."""
    if bound.ignored is not None:
        index = index[index != bound.ignored] if type(index) is torch.Tensor else index.clamp(0, bound.size - 1)
    if not index.numel():
        return
    low, high = torch.aminmax(index)
    least = -bound.size if bound.wraps else 0
    if type(index) is not torch.Tensor or index.device.type != "cpu":  # traced, or on a device that is not waited for
        assert_async((low >= least) & (high < bound.size), f"{op}: {_text(bound)}")
        return
    if int(low) < least or int(high) >= bound.size:
        found = int(low) if int(low) < least else int(high)
        raise bound.error(f"{op}: index {found} is out of range: {_text(bound)}")


def _text(bound: Bound) -> str:
    where = "the tensor" if bound.dim < 0 else f"dim {bound.dim}"
    return f"{where} has {bound.size} elements" + ("" if bound.wraps else ", and negative indices are not allowed")


# ---- ops that are done by a rule -------------------------------------------------------------------------------------

# What torch raises for ops whose argument 1 is the dim, and argument 2 the index.
_ALONG: dict[str, type[Exception]] = {
    **dict.fromkeys(("index_select", "index_copy", "index_fill"), IndexError),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce", "index_add"), RuntimeError),
}
_BY_LIST = ("index", "index_put", "_unsafe_index", "_unsafe_index_put")


def bounds_of(
    op: Any,
    values: Sequence[Any],
    leaves: Sequence[tuple[int, int | None, Any]],
    specs: Sequence[DTensorSpec],
    used: Sequence[DTensorSpec],
) -> tuple[Bound, ...]:
    """The checks that a call must make of its indices, because not all ranks run a kernel that does; mostly none.

    `leaves` are as `_sharding_prop.tensor_leaves` gives them, with `specs`; `used` are their specs when the op runs,
    and those of its results.
    """
    if any(type(one) is not DTensorSpec for one in specs):  # sizes are not known while a graph is made of any
        return ()
    found = _bounds(op._schema.name.removeprefix("aten::").removesuffix("_"), values)
    if not found:
        return ()
    is_empty = any(map(_has_empty_part, used))
    needed = []
    for bound in found:
        at = next(at for at, one in enumerate(leaves) if one[0] == bound.argument and bound.place in (None, one[1]))
        before = specs[at].is_replicated
        if is_empty or (before and not used[at].is_replicated):
            needed.append(bound._replace(before=before))
    return tuple(needed)


def _bounds(name: str, values: Sequence[Any]) -> tuple[Bound, ...]:
    """The values that the indices of an op may have."""
    source = values[0]
    if name == "embedding":
        return (Bound(1, None, 0, int(source.shape[0]), False, IndexError),)
    if name == "take":
        return (Bound(1, None, -1, int(source.numel()), True, IndexError),)
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        dim = min(1, source.ndim - 1)
        return (Bound(1, None, dim, int(source.shape[dim]), False, IndexError, ignored=int(values[4])),)
    if name in _BY_LIST:
        return tuple(
            Bound(1, dim, dim, int(source.shape[dim]), True, IndexError)
            for dim, one in enumerate(values[1])
            if one is not None and one.dtype not in (torch.bool, torch.uint8)
        )
    if name not in _ALONG:
        return ()
    dim = int(values[1]) % max(1, source.ndim)
    size = int(source.shape[dim]) if source.ndim else 1
    return (Bound(2, None, dim, size, name == "index_fill", _ALONG[name]),)


def _has_empty_part(spec: DTensorSpec) -> bool:
    """Whether some rank of the mesh has nothing of a tensor that has something."""
    if type(spec) is not DTensorSpec or not spec.is_sharded or 0 in spec.shape:
        return False
    return any(0 in spec.local_shape_at(where) for where in product(*map(range, spec.mesh.shape)))
