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


class Start:
    """An op that makes a new tensor.

    Attributes:
        begin: begin(tensor, *the op's other arguments) starts it and gives its result, pending; None if the fast
            path is closed.
    """

    __slots__ = ("begin",)
    begin: Callable[..., AsyncCollectiveTensor | None]

    def __init__(self, name: str) -> None:
        def first(*args: Any) -> AsyncCollectiveTensor | None:  # by now the ops are loaded
            compiled = _native.loaded()
            if compiled is None:
                self.begin = _starting(kernel_call(getattr(torch.ops.phalanx, name).default))
            else:
                self.begin = compiled.start(name, AsyncCollectiveTensor)
            return self.begin(*args)

        self.begin = first


class InPlace:
    """An op that writes into its first argument.

    Attributes:
        run: run(tensor, *the op's other arguments) gives the tensor when the result is in it; None if the fast
            path is closed.
    """

    __slots__ = ("run",)
    run: Callable[..., torch.Tensor | None]

    def __init__(self, name: str) -> None:
        def first(*args: Any) -> torch.Tensor | None:
            compiled = _native.loaded()
            if compiled is None:
                self.run = _running(kernel_call(getattr(torch.ops.phalanx, name).default))
            else:
                self.run = compiled.in_place(name)
            return self.run(*args)

        self.run = first


def _starting(kernel: Callable[..., Any]) -> Callable[..., AsyncCollectiveTensor | None]:
    def begin(tensor: torch.Tensor, *args: Any) -> AsyncCollectiveTensor | None:
        if not is_plain(tensor):
            return None
        try:
            return start(kernel(CPU_KEY, tensor, *args))
        except RuntimeError as error:
            if _is_wrong_type(error):
                return None
            raise

    return begin


def _running(kernel: Callable[..., Any]) -> Callable[..., torch.Tensor | None]:
    def run(tensor: torch.Tensor, *args: Any) -> torch.Tensor | None:
        if not is_plain(tensor):
            return None
        try:
            kernel(CPU_KEY, tensor, *args)
        except RuntimeError as error:
            if _is_wrong_type(error):
                return None
            raise
        increment_version(tensor)
        wait_plain(tensor)
        return tensor

    return run


def _is_wrong_type(error: RuntimeError) -> bool:
    """Whether torch refused the type of an argument. The checks of the caller have a better text."""
    return "Expected a value of type" in str(error)
