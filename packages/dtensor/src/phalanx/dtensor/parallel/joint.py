"""One conversion of an input that several modules share, so that its gradient is reduced once.

The q, k and v of an attention, or the gate and up of an MLP, get one tensor and each makes a DTensor of it. With a
DTensor each, the backward of each reduces its own part of the input gradient: three collectives. With one DTensor for
all, autograd first adds up the parts, which are Partial (a local sum), and the backward of the one conversion reduces
once; and where the input is gathered (sequence parallel), that happens once too.

So the last conversion of this thread is kept, and given again for the same tensor. It is forgotten at the conversion of
another one, and when the forward of a module ends that was parallelized with a plan: at most one DTensor is held.
"""

import threading
import weakref
from functools import lru_cache
from typing import Any

import torch

from phalanx.dtensor._mesh import Mesh, token
from phalanx.dtensor.api import DTensor
from phalanx.dtensor.placements import AnyPlacement, on_dim, split_dim

Layouts = tuple[AnyPlacement, ...]


class _Last(threading.local):
    """The last conversion: of what, how, and the result."""

    tensor: "weakref.ref[torch.Tensor] | None" = None
    key: tuple[Any, ...] = ()
    result: DTensor | None = None


_last = _Last()


def forget() -> None:
    """Let go of the last conversion of this thread."""
    _last.tensor, _last.key, _last.result = None, (), None


def as_placed(tensor: torch.Tensor, mesh: Mesh, given: Layouts, wanted: Layouts) -> DTensor:
    """A tensor as a DTensor of placements `wanted`; the same object for all that ask one after the other.

    Collective over the mesh where placements differ. Differentiable.

    Args:
        tensor: A plain tensor, which is a local tensor of placements `given`; or a DTensor, of any placements.
        mesh: The mesh.
        given: The placements of a plain tensor.
        wanted: Those of the result.
    """
    if torch.compiler.is_compiling() or tensor.is_inference():
        # An inference tensor does not say when it is written into; and what is traced must not depend on what was.
        return convert(tensor, mesh, given, wanted)
    # A tensor that was written into is another one, and so is one whose gradient is recorded from now on.
    records = torch.is_grad_enabled() and tensor.requires_grad
    key = (token(mesh), given, wanted, tensor._version, records, tensor.grad_fn if records else None)
    if _last.tensor is not None and _last.tensor() is tensor and _last.key == key:
        assert _last.result is not None
        return _last.result
    forget()
    result = convert(tensor, mesh, given, wanted)
    if result is not tensor:
        _last.tensor, _last.key, _last.result = weakref.ref(tensor), key, result
    return result


def convert(tensor: torch.Tensor, mesh: Mesh, given: Layouts, wanted: Layouts) -> DTensor:
    """As `as_placed`, for one who asks alone."""
    made = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, given)
    return brought(made, wanted)


def brought(tensor: DTensor, wanted: Layouts) -> DTensor:
    """A DTensor in placements `wanted`, itself if it is there. Collective where not. Differentiable.

    Not asynchronous: what comes next reads the result, and a pending tensor costs more than it saves there.
    """
    if torch.compiler.is_compiling():
        # Dynamo sees no spec; in a graph redistribute leaves nothing of a tensor that is there.
        return tensor.redistribute(placements=wanted)
    spec = tensor._spec
    return tensor if spec.placements == _on_dims(wanted, spec.ndim) else tensor.redistribute(placements=wanted)


@lru_cache(maxsize=256)
def _on_dims(layouts: Layouts, ndim: int) -> Layouts:
    """Layouts with dims counted from the front; one that the tensor has not is for `redistribute` to refuse."""
    dims = ((one, split_dim(one)) for one in layouts)
    return tuple(one if dim is None or dim >= 0 else on_dim(one, dim + ndim) for one, dim in dims)
