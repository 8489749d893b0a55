"""One conversion of an input that several modules share, so that its gradient is reduced once.

The q, k and v of an attention, or the gate and up of an MLP, get one tensor and each makes a DTensor of it. With a
DTensor each, the backward of each reduces its own part of the input gradient: three collectives. With one DTensor for
all, autograd first adds up the parts, which are Partial (a local sum), and the backward of the one conversion reduces
once; and where the input is gathered (sequence parallel), that happens once too.

A conversion is shared only within one forward of a module that was parallelized with a plan, and never gives what was
in the tensor before: memory can be written without torch's knowledge (a receive, `x.data`, numpy), on one rank alone.
So what is shared is either a DTensor of the same memory, or the gathered copy of a tensor that autograd has recorded,
which nobody may write into behind autograd's back, and which one module is given once.
"""

import threading
from functools import lru_cache
from typing import Any

import torch

from phalanx.dtensor._mesh import Mesh, mesh_id
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.placement_types import AnyPlacement, on_dim, split_dim

Layouts = tuple[AnyPlacement, ...]


class _Last(threading.local):
    """The last conversion of the forward that runs: of what, how, for which modules, and the result."""

    depth: int = 0  # of forwards of modules that were parallelized with a plan
    tensor: torch.Tensor | None = None
    key: tuple[Any, ...] = ()
    askers: tuple[object, ...] = ()
    result: DTensor | None = None


_last = _Last()


def forget() -> None:
    """Let go of the last conversion of this thread."""
    _last.tensor, _last.key, _last.askers, _last.result = None, (), (), None


def begin_forward(*_: Any) -> None:
    """A hook before the forward of a module that was parallelized with a plan."""
    if not torch.compiler.is_compiling():
        forget()
        _last.depth += 1


def end_forward(*_: Any) -> None:
    """The hook after it, also where it has raised."""
    if not torch.compiler.is_compiling():
        forget()
        _last.depth = max(0, _last.depth - 1)


def as_placed(tensor: torch.Tensor, mesh: Mesh, given: Layouts, wanted: Layouts, asker: object) -> DTensor:
    """A tensor as a DTensor of placements `wanted`; the same object for modules of one forward that ask for it.

    Collective over the mesh where placements differ. Differentiable.

    Args:
        tensor: A plain tensor, which is a local tensor of placements `given`; or a DTensor, of any placements.
        mesh: The mesh.
        given: The placements of a plain tensor.
        wanted: The placements of the result.
        asker: The module for which it is.
    """
    if torch.compiler.is_compiling() or not (_last.depth and tensor.requires_grad and torch.is_grad_enabled()):
        # Without gradients there is nothing to reduce once; and what is traced must not depend on what was.
        return convert(tensor, mesh, given, wanted)
    is_copy = type(tensor) not in (torch.Tensor, torch.nn.Parameter) or given != wanted
    if is_copy and tensor.grad_fn is None:
        return convert(tensor, mesh, given, wanted)
    memory = None if is_copy else (tensor.data_ptr(), tensor.shape, tensor.stride())
    key = (mesh_id(mesh), given, wanted, tensor._version, tensor.grad_fn, memory)
    if _last.tensor is tensor and _last.key == key and not (is_copy and any(asker is one for one in _last.askers)):
        assert _last.result is not None
        _last.askers = (*_last.askers, asker)
        return _last.result
    forget()
    result = convert(tensor, mesh, given, wanted)
    if result is not tensor:
        _last.tensor, _last.key, _last.askers, _last.result = tensor, key, (asker,), result
    return result


def convert(tensor: torch.Tensor, mesh: Mesh, given: Layouts, wanted: Layouts) -> DTensor:
    """As `as_placed`, for one who asks alone."""
    made = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, given)
    return redistributed(made, wanted)


def redistributed(tensor: DTensor, wanted: Layouts) -> DTensor:
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
