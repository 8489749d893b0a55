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
from typing import Any, NamedTuple

import torch

from phalanx.dtensor._mesh import Mesh, mesh_id
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.placement_types import AnyPlacement, on_dim, split_dim

Layouts = tuple[AnyPlacement, ...]


class _Conversion(NamedTuple):
    tensor: torch.Tensor
    key: tuple[Any, ...]  # how it was converted
    askers: list[object]  # for which modules
    result: DTensor


class _State(threading.local):
    """The forwards that run in this thread."""

    depth: int = 0  # of modules that were parallelized with a plan
    last: _Conversion | None = None


_state = _State()


def begin_forward(*_: Any) -> None:
    """A hook before the forward of a module that was parallelized with a plan."""
    if not torch.compiler.is_compiling():
        _state.last = None
        _state.depth += 1


def end_forward(*_: Any) -> None:
    """The hook after it, also where it has raised."""
    if not torch.compiler.is_compiling():
        _state.last = None
        _state.depth = max(0, _state.depth - 1)


def as_placed(tensor: torch.Tensor, mesh: Mesh, given: Layouts, wanted: Layouts, asker: object) -> DTensor:
    """A tensor as a DTensor of placements `wanted`; the same object for modules of one forward that ask for it.

    Collective over the mesh where placements differ. Differentiable. A plain tensor is a local tensor of placements
    `given`; `asker` is the module for which it is.
    """
    if torch.compiler.is_compiling() or not (_state.depth and tensor.requires_grad and torch.is_grad_enabled()):
        # Without gradients there is nothing to reduce once; and what is traced must not depend on what was.
        return convert(tensor, mesh, given, wanted)
    is_copy = type(tensor) not in (torch.Tensor, torch.nn.Parameter) or given != wanted
    if is_copy and tensor.grad_fn is None:
        return convert(tensor, mesh, given, wanted)
    memory = None if is_copy else (tensor.data_ptr(), tensor.shape, tensor.stride())
    key = (mesh_id(mesh), given, wanted, tensor._version, tensor.grad_fn, memory)
    last = _state.last
    if (
        last is not None
        and (last.tensor is tensor and last.key == key)
        and not (is_copy and any(asker is one for one in last.askers))
    ):
        last.askers.append(asker)
        return last.result
    _state.last = last = None  # nothing of it is kept while the next one is made
    result = convert(tensor, mesh, given, wanted)
    if result is not tensor:
        _state.last = _Conversion(tensor, key, [asker], result)
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
