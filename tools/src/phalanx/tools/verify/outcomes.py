"""Whether all ranks come to one outcome in every op: an error of one kind on all, or results of one description.

A mode in which ranks compare after each op what it came to. An op that raises on some ranks only leaves the others in a
collective that never ends, or with a tensor that is none, long after; here the ranks find out at once.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives import all_reduce_
from phalanx.dtensor import DTensor
from phalanx.dtensor._torch_compat import lazy_changes_made
from phalanx.tools._torch_compat import TorchDispatchMode


class OutcomesDiffer(RuntimeError):
    """An op came to one thing on this rank and to another on another one. Raised on every rank."""


class CompareOutcomes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it ranks compare the outcome of each op on DTensors. Collective: all ranks must run the same ops.

    Args:
        group: A group of all ranks that no DTensor uses, so that it works when a collective of these has failed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.group = group
        self.compared = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(issubclass(one, DTensor) for one in types):
            with lazy_changes_made():  # autograd gives zeros without memory for `sgn`
                return func(*args, **(kwargs or {}))
        error: Exception | None = None
        result: Any = None
        try:
            result = func(*args, **(kwargs or {}))
            text = describe(result)
        except Exception as raised:  # whatever it is, the others are to know of it
            error, text = raised, type(raised).__name__
        self.compared += 1
        self._compare(func, text)
        if error is not None:
            raise error
        return result

    def _compare(self, op: Any, text: str) -> None:
        digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
        own = int.from_bytes(digest, "big")
        seen = torch.tensor([own, -own])
        all_reduce_(seen, "max", self.group)
        if int(seen[0]) == -int(seen[1]):
            return
        texts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(texts, text, group=self.group)
        shown = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(texts))
        raise OutcomesDiffer(f"{op}: ranks came to different outcomes: {shown}")


def describe(result: Any) -> str:
    """What all ranks must agree on of a result: everything but values and local tensors."""
    if isinstance(result, DTensor):
        copied = ", a copied view" if getattr(result, "_is_view_of_copy", False) else ""
        return f"{result._spec.placements} {tuple(result.shape)} {result._spec.stride} {result.dtype}{copied}"
    if isinstance(result, (list, tuple)):
        return f"{type(result).__name__}({', '.join(map(describe, result))})"
    if isinstance(result, torch.Tensor):
        return f"a plain tensor of {tuple(result.shape)} {result.dtype}"
    return repr(result)
