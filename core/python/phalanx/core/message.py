"""One of several messages that are sent and received at once."""

from dataclasses import dataclass
from typing import Any

from phalanx.core.dtypes import DTypeLike


@dataclass(slots=True, eq=False)
class Message:
    """One message of `Group.messages`, made by `send` or `recv`.

    They take what `Group.send` and `Group.recv` take, and check nothing: `Group.messages` does.

    Example:
        >>> out = array("i", [0])
        >>> group.messages([Message.send(array("i", [rank + 5]), 1 - rank), Message.recv(out, 1 - rank)])
        >>> out  # on rank 1
        array('i', [5])
    """

    sends: bool
    buffer: Any
    peer_group_rank: int
    count: int | None = None
    dtype: DTypeLike = None
    tag: int = 0

    @classmethod
    def send(
        cls, source: Any, peer_group_rank: int, count: int | None = None, dtype: DTypeLike = None, tag: int = 0
    ) -> "Message":
        """`Group.send`."""
        return cls(True, source, peer_group_rank, count, dtype, tag)

    @classmethod
    def recv(
        cls, out: Any, peer_group_rank: int, count: int | None = None, dtype: DTypeLike = None, tag: int = 0
    ) -> "Message":
        """`Group.recv`."""
        return cls(False, out, peer_group_rank, count, dtype, tag)

    @property
    def operation(self) -> str:
        """What it is called in error texts."""
        return "send" if self.sends else "recv"
