"""The fast path of eager mode: an op on a plain CPU tensor, called without the dispatcher.

It is open where the dispatcher would do nothing but call the kernel (see _torch_compat.is_plain). What `phalanx build`
compiles does the same without Python: _native/eager.cpp.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from phalanx.collectives import _native
from phalanx.collectives._async_tensor import AsyncCollectiveTensor, start, wait_plain
from phalanx.collectives._torch_compat import CPU_KEY, is_plain, kernel_call


class FastPath:
    """The fast path of an op.

    Args:
        name: The name of the op. It writes into its first argument if the name ends with "_".

    Attributes:
        fast: fast(tensor, *the op's other arguments) starts it and gives its result, pending; or the tensor, when the
            result is in it. None if the fast path is closed.
    """

    fast: Callable[..., torch.Tensor | None]

    def __init__(self, name: str) -> None:
        def first(*args: Any) -> Any:  # by now the ops are loaded
            compiled = _native.loaded()
            if compiled is None:
                self.fast = _uncompiled(name)
            elif name.endswith("_"):
                self.fast = compiled.in_place(name)
            else:
                self.fast = compiled.start(name, AsyncCollectiveTensor)
            return self.fast(*args)

        self.fast = first


def _uncompiled(name: str) -> Callable[..., torch.Tensor | None]:
    kernel, in_place = kernel_call(getattr(torch.ops.phalanx, name).default), name.endswith("_")

    def call(tensor: torch.Tensor, *args: Any) -> torch.Tensor | None:
        if not is_plain(tensor):
            return None
        try:
            started = kernel(CPU_KEY, tensor, *args)
        except RuntimeError as error:
            if "Expected a value of type" in str(error):  # the checks of the caller have a better text
                return None
            raise
        if not in_place:
            return start(started)
        increment_version(tensor)
        wait_plain(tensor)
        return tensor

    return call
