"""What every part of a Group needs: the handle of the core, and how collectives and messages are called."""

from collections.abc import Callable
from typing import Any

from phalanx.core._handle import Handle
from phalanx.core._issue import issue
from phalanx.core._operand import Operand
from phalanx.core.uncopied import Uncopied
from phalanx.core.work import Abandoned, Work


class GroupBase(Uncopied):
    """The part of a `Group` that the others build on."""

    _handle: Handle
    _abandoned: Abandoned
    group_rank: int
    group_size: int

    def _issue(
        self,
        function: Callable[..., int],
        arguments: tuple[Any, ...],
        operands: tuple[Operand, ...],
        blocking: bool,
    ) -> Work | None:
        whole = (self._handle.pointer, *arguments)
        return issue(function, whole, self._handle, self._abandoned, operands, blocking)
