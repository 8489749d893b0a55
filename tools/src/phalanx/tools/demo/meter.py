"""Sees each collective that runs, in the forward and in the backward pass, and how long it takes."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from phalanx.dtensor import DTensor
from phalanx.tools._torch_compat import TorchDispatchMode


class Call(NamedTuple):
    """A collective and how much it moves.

    Attributes:
        name: "all_reduce", ...
        size_bytes: Of its input or output on one rank, whichever is larger.
        dtype: Of the elements.
    """

    name: str
    size_bytes: int
    dtype: torch.dtype


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of `torch.ops.phalanx` while it is entered. It slows every op down by microseconds.

    Attributes:
        calls: How often each was called.
        seconds: How long they took together; waiting for the other ranks is part of it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[Call] = Counter()
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as the ops that the ranks run
        if func.namespace != "phalanx":
            return func(*args, **(kwargs or {}))
        started = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - started
        name = func._schema.name.removeprefix("phalanx::")
        if name in _NAMES:
            size_bytes = max(args[0].nbytes, result.nbytes)
            self.calls[Call(_NAMES[name], size_bytes, result.dtype)] += 1
        return result


# The op: the function that calls it.
_NAMES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "broadcast": "broadcast",
}
