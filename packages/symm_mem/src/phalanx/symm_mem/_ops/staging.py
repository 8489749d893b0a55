"""Memory in which the fused ops leave their parts for the other ranks of a group: two halves, used in turn.

In a turn a rank fills its half, tells the others, and reads theirs when they have told it. Nobody waits at the end for
those who still read: before the half is filled again comes a turn in the other one, in which every rank has heard of
every other, and who has told anything of that turn is through with the one before it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from phalanx.core import MismatchError, RevokedError
from phalanx.symm_mem._alloc import empty
from phalanx.symm_mem._groups import RankGroup
from phalanx.symm_mem._handle import SymmetricMemory
from phalanx.symm_mem._rendezvous import rendezvous

_SMALLEST = 1 << 20  # bytes of a half
_NOTE_BYTES = 256  # after each half: what the rank does in the turn
_CHANNEL = 1
_PLACE = "staging"  # in the attributes of a RankGroup, with which it goes


class Staging:
    """The staging of a group, as this rank has it.

    Args:
        handle: Of a block with two halves and their notes.
        half_bytes: Of one half, without its note.
    """

    def __init__(self, handle: SymmetricMemory, half_bytes: int) -> None:
        self.handle = handle
        self.half_bytes = half_bytes
        self.turns = 0
        self.failure = ""  # after which the ranks may be out of step
        self.blocks = [handle.symm.buffer(rank) for rank in range(handle.world_size)]


class Turn:
    """One use of the staging by all ranks of the group. Made by `turn`.

    Attributes:
        handle: Of the block.
        offset: Bytes from the start of every rank's block to the half of this turn.
    """

    def __init__(self, staging: Staging, what: str) -> None:
        self.handle = staging.handle
        self.offset = (staging.turns % 2) * (staging.half_bytes + _NOTE_BYTES)
        self._blocks = staging.blocks
        self._notes = slice(self.offset + staging.half_bytes, self.offset + staging.half_bytes + _NOTE_BYTES)
        self._what = what.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES)
        self._blocks[self.handle.rank][self._notes] = self._what

    def view(self, rank: int, shape: Sequence[int], dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """What a rank has in its half, from an element on."""
        return self.handle.get_buffer(rank, shape, dtype, self.offset // dtype.itemsize + start)

    def tell(self, rank: int) -> None:
        """Let a rank read what it needs of this one's half."""
        self.handle.put_signal(rank, _CHANNEL)

    def expect(self, rank: int) -> None:
        """Wait until a rank has told this one.

        Raises:
            MismatchError: It does something else in this turn.
            PhalanxError: As `SymmetricMemory.wait_signal`.
        """
        self.handle.wait_signal(rank, _CHANNEL)
        theirs = bytes(self._blocks[rank][self._notes])
        if theirs != self._what:
            raise MismatchError(
                f"rank {rank} of group {self.handle.group_name!r} called {theirs.decode(errors='replace').rstrip()} "
                f"while rank {self.handle.rank} called {self._what.decode(errors='replace').rstrip()}. Every rank must "
                "call the same ops in the same order with the same shapes and dtypes.",
                group=self.handle.group_name,
            )

    def close(self) -> None:
        """Wait until everybody has read: what they read is not the staging, and may be written after this."""
        self.handle.barrier(_CHANNEL)


@contextmanager
def turn(members: RankGroup, nbytes: int, what: str) -> Iterator[Turn]:
    """Take the next turn in the staging of a group. Collective, also because it grows to what is asked for.

    Every rank must be told once by every other in a turn, or come to a barrier with all of them.

    Args:
        members: The group.
        nbytes: That each rank needs, alike on all.
        what: The call, with all that must be alike.

    Raises:
        RevokedError: An earlier turn failed, so that the ranks may be out of step.
        PhalanxError: As `rendezvous`.
    """
    staging = _staging_of(members, nbytes, what)
    staging.turns += 1
    try:
        yield Turn(staging, what)
    except BaseException as error:
        staging.failure = f"{what}: {type(error).__name__}: {error}"
        raise


def _staging_of(members: RankGroup, nbytes: int, what: str) -> Staging:
    found: Staging | None = vars(members).get(_PLACE)
    if found is not None and found.failure:
        raise RevokedError(
            f"{what} on group {members.name!r}: an earlier call failed, so the ranks may be out of step; make a new "
            f"group. The first failure was: {found.failure}",
            group=members.name,
        )
    if found is None or found.half_bytes < nbytes:
        half = _SMALLEST
        while half < nbytes:
            half *= 2
        block = empty(2 * (half + _NOTE_BYTES), dtype=torch.uint8, device="cpu")
        found = Staging(rendezvous(block, members.name), half)
        vars(members)[_PLACE] = found
    return found
