"""Whether this process can use the core on a GPU."""

import torch

from phalanx.collectives import _ops
from phalanx.collectives._streams import where
from phalanx.core import PhalanxError, World

_found: dict[int, str] = {}  # by the number of a GPU


def refusal(device: torch.device) -> str:
    """Why the core cannot serve tensors of a GPU in this process, or "". Not collective; it is found out once.

    Args:
        device: With its index.
    """
    found = _found.get(device.index)
    if found is None:
        found = _found[device.index] = _ops.refusal() or _try(device)
    return found


def _try(device: torch.device) -> str:
    """What a group of this rank alone fails with there: no driver, no kernels, a GPU that is too old."""
    told = where(device)
    try:
        with World(0, 1) as alone:
            block = alone.alloc(4, device=told["device"])
            symm = alone.create_group("gpu", [0]).rendezvous(block)
            symm.all_reduce(0, None, 1, "float32", stream=told["stream"])
            torch.cuda.current_stream(device).synchronize()
    except PhalanxError as error:
        return str(error)
    return ""
