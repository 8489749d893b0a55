"""The parts of torch that it keeps private, or does not list as public, and the tools use. Read in torch 2.13.

The OpInfo database (torch.testing._internal) imports the package expecttest.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

# Public, but torch.distributed does not list them for type checkers.
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

# Private, but described in torch's notes on extending it.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def op_database() -> list[Any]:
    """torch's OpInfo entries.

    Raises:
        ImportError: A package that torch's own tests need is missing.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch it has no types
    """Shows each op that reaches the dispatcher, with its arguments, before it runs."""

    def __init__(self, see: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense and an ordinary one."""
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_quantized


@contextmanager
def sample_sizes(sizes: Mapping[str, int]) -> Iterator[None]:
    """Within it, the samples of OpInfo entries have other sizes.

    Args:
        sizes: The sizes by the names under which torch's generators of samples know them: XS, S, M, L.
    """
    before: list[tuple[Any, str, int]] = []
    for name, module in list(sys.modules.items()):
        if name.startswith(("torch.testing._internal.opinfo", "torch.testing._internal.common_methods")):
            before += [(module, one, getattr(module, one)) for one in sizes if type(getattr(module, one, None)) is int]
    try:
        for module, one, _ in before:
            setattr(module, one, sizes[one])
        yield
    finally:
        for module, one, value in before:
            setattr(module, one, value)
