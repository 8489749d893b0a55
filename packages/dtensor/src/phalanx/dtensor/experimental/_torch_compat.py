"""The private parts of torch that this folder relies on. See `phalanx/dtensor/_torch_compat.py`."""

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils import checkpoint

# Read in 2.11 to 2.13.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten


def enclosing_checkpoints() -> list[tuple[Any, str]]:
    """What computes activation checkpoints again in which the caller runs: (object, name of its attribute with the
    function that does it), the innermost first.

    torch keeps the function in an object of its own for each checkpoint, and tells nobody of it: it is found in the
    frames that run now, and, for a checkpoint that hooks of a module have begun, behind the hooks of saved tensors.
    Read in 2.13.
    """
    found: list[tuple[Any, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            values = frame.f_locals
            if frame.f_code.co_name == "forward" and "run_function" in values:
                found.append((values["ctx"], "run_function"))
            elif frame.f_code.co_name == "checkpoint":
                generator = getattr(values.get("gen"), "gi_frame", None)
                if generator is not None and "new_frame" in generator.f_locals:
                    found.append((generator.f_locals["new_frame"], "recompute_fn"))
        frame = frame.f_back
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    cells = () if hooks is None else (getattr(hooks[0], "__closure__", None) or ())
    for cell in cells:
        holder = cell.cell_contents
        if isinstance(holder, checkpoint._CheckpointFrame) and not any(holder is one for one, _ in found):
            found.append((holder, "recompute_fn"))
    return found


def keep_as_recomputed(holder: Any, tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let a checkpoint that has recorded a tensor itself, while it computed again, have its values of that time.

    Args:
        holder: As `enclosing_checkpoints` gives it.
        tensor: What may have been recorded.
        values: The values, in memory that nobody writes into.
    """
    for saved in getattr(holder, "recomputed", {}).values():
        for handle, one in list(saved.items()):
            if one is tensor:
                saved[handle] = values
