"""libphalanx_torch.so, which has the ops torch.ops.phalanx.*: loaded once, or why it cannot be."""

from functools import cache

import torch

from phalanx.core import load_torch_ops
from phalanx.core.torch_ops import TorchOps


@cache
def _load() -> TorchOps | ImportError:
    try:
        return load_torch_ops()
    except ImportError as error:
        return error


def loaded() -> TorchOps:
    """The phxt_* functions.

    Raises:
        ImportError: The library cannot be loaded.
    """
    ops = _load()
    if isinstance(ops, ImportError):
        raise ops
    return ops


def refusal() -> str:
    """Why this process cannot use the core, or ""."""
    ops = _load()
    return str(ops) if isinstance(ops, ImportError) else ""


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, once no collective writes into it any more. In a graph, the op that waits."""
    done: torch.Tensor = torch.ops.phalanx.wait_tensor(tensor)
    return done


def text(number: int) -> str:
    """The text behind a number, which ops of phalanx_c10d get in its place."""
    ops = loaded()
    return str(bytes(ops.ffi.string(ops.lib.phxt_text(number))).decode())
