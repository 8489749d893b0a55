"""Calling the core: what every collective and every message has in common."""

from collections.abc import Callable
from typing import Any

from phalanx.core._handle import Handle
from phalanx.core._lib import ffi
from phalanx.core._operand import Operand
from phalanx.core.errors import check
from phalanx.core.work import Abandoned, Work


def issue(
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    owner: Handle,
    abandoned: Abandoned,
    operands: tuple[Operand, ...],
    blocking: bool,
) -> Work | None:
    """Call a function of the core whose last argument is a phx_work, and make a Work of it unless it blocks."""
    abandoned.sweep()
    if blocking:
        check(function(*arguments, ffi.NULL))
        return None
    out = ffi.new("phx_work **")
    check(function(*arguments, out))
    keep = tuple(each.keep for each in operands if each.keep is not None)
    return Work(out[0], f"a work of {owner.what}", owner, keep, abandoned.add)
