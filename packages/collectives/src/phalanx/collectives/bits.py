"""Ops that write an argument, for tensors with the conjugate or the negative bit.

Such a tensor is read as the conjugate, or the negative, of the values in its memory. Torch's own rule for it copies the
argument, calls the op and copies the value that the op *returns* back. The ops of this package return nothing, or
return before they have written, so they need the rule of this module: they work on a plain copy, which is complete when
it is copied back.
"""

from collections.abc import Callable
from typing import Any

import torch

from phalanx.collectives import _torch_compat

_KEYS = ("Conjugate", "Negative")


def register(library: Any, ops: dict[str, Any], waits: tuple[str, ...] = ()) -> None:
    """Register the rule for ops that write arguments and return nothing.

    Args:
        library: The torch.library.Library of the namespace of the ops.
        ops: The OpOverload of each op, by name. Ops that write no argument are ignored.
        waits: The names of ops that only wait for writes: they take the tensor as it is.
    """
    for name, op in ops.items():
        if op._schema.returns or not any(_writes(argument) for argument in op._schema.arguments):
            continue
        for key in _KEYS:
            if name in waits:
                _torch_compat.fall_through(library, name, key)
            else:
                _torch_compat.implement(library, name, _on_plain(op), key)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _on_plain(op: Any) -> Callable[..., None]:
    arguments = op._schema.arguments
    by_name = {argument.name: _writes(argument) for argument in arguments}
    by_position = [_writes(argument) for argument in arguments]

    def kernel(*args: Any, **kwargs: Any) -> None:
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        plain = [_plain(value, writes, written) for value, writes in zip(args, by_position, strict=False)]
        op(*plain, **{name: _plain(value, by_name[name], written) for name, value in kwargs.items()})
        for tensor, copy in written:
            tensor.copy_(torch.ops.phalanx.wait_tensor(copy))

    return kernel


def _plain(value: Any, writes: bool, written: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each, writes, written) for each in value]
    if not isinstance(value, torch.Tensor) or not (value.is_conj() or value.is_neg()):
        return value
    torch.ops.phalanx.wait_tensor_(value)  # for what is still to be written there
    copy = value.resolve_conj().resolve_neg()
    if writes:
        written.append((value, copy))
    return copy
