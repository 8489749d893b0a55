"""Indices out of range: the error that one process raises, on every rank.

A kernel looks only at what it reads. Where a rank has nothing of a tensor, or looks up only what it has, it would pass
over an index that another rank refuses, and ranks would be out of step. So the index is looked at here, on every rank
that has it: no communication.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from phalanx.dtensor.spec import Spec


class Bound(NamedTuple):
    """What the elements of an index may be.

    Attributes:
        argument: The argument, counted in the op's schema.
        place: Where in it, if it is a list.
        dim: The dim that is looked up; -1: all elements, counted flat.
        size: The number of elements there.
        wraps: Whether negative ones count from the end.
        error: What torch raises.
    """

    argument: int
    place: int | None
    dim: int
    size: int
    wraps: bool
    error: type[Exception]


def check_bounds(op: Any, index: torch.Tensor, bound: Bound) -> None:
    """Raise if an element of an index is out of range.

    Args:
        op: The op.
        index: The local tensor of the index.
        bound: What its elements may be.
    """
    if not index.numel() or index.dtype in (torch.bool, torch.uint8):
        return
    low, high = torch.aminmax(index)
    least = -bound.size if bound.wraps else 0
    if type(index) is not torch.Tensor or index.device.type != "cpu":  # traced, or on a device that is not waited for
        torch._assert_async((low >= least) & (high < bound.size), f"{op}: {_text(bound)}")
        return
    if int(low) < least or int(high) >= bound.size:
        found = int(low) if int(low) < least else int(high)
        raise bound.error(f"{op}: index {found} is out of range: {_text(bound)}")


def _text(bound: Bound) -> str:
    where = "the tensor" if bound.dim < 0 else f"dim {bound.dim}"
    return f"{where} has {bound.size} elements" + ("" if bound.wraps else ", and negative indices are not allowed")


# ---- ops that are done by a rule -------------------------------------------------------------------------------------

# The argument that is the index, and what torch raises; the dim is argument 1.
_ALONG = {
    "index_select": (2, IndexError),
    "gather": (2, RuntimeError),
    "scatter": (2, RuntimeError),
    "scatter_add": (2, RuntimeError),
    "scatter_reduce": (2, RuntimeError),
    "index_add": (2, RuntimeError),
    "index_copy": (2, IndexError),
    "index_fill": (2, IndexError),
}
_BY_LIST = ("index", "index_put", "_unsafe_index", "_unsafe_index_put")


def bounds_of(op: Any, values: Sequence[Any], specs: Sequence[Spec]) -> tuple[Bound, ...]:
    """What a call must check of its indices, since kernels do not on all ranks; mostly nothing.

    Args:
        op: An OpOverload.
        values: Every argument of its schema.
        specs: The specs of the tensors of the call, its results included.
    """
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    if name not in _ALONG and name not in _BY_LIST and name not in ("take", "embedding"):
        return ()
    if not any(map(_has_empty_part, specs)):
        return ()
    source = values[0]
    if name == "embedding":
        return (Bound(1, None, 0, int(source.shape[0]), False, IndexError),)
    if name == "take":
        return (Bound(1, None, -1, int(source.numel()), True, IndexError),)
    if name in _BY_LIST:
        return tuple(
            Bound(1, dim, dim, int(source.shape[dim]), True, IndexError)
            for dim, one in enumerate(values[1])
            if one is not None and one.dtype not in (torch.bool, torch.uint8)
        )
    argument, error = _ALONG[name]
    dim = int(values[1]) % max(1, source.ndim)
    size = int(source.shape[dim]) if source.ndim else 1
    return (Bound(argument, None, dim, size, name == "index_fill", error),)


def _has_empty_part(spec: Spec) -> bool:
    """Whether some rank of the mesh has nothing of a tensor that has something."""
    if type(spec) is not Spec or not spec.is_sharded or 0 in spec.shape:
        return False
    return any(0 in spec.local_shape_at(where) for where in product(*map(range, spec.mesh.shape)))
