"""Memory in which an op leaves a product for the other ranks of a group, who sum it up from there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from phalanx.core import RevokedError
from phalanx.symm_mem._alloc import empty
from phalanx.symm_mem._groups import RankGroup
from phalanx.symm_mem._handle import SymmetricMemory
from phalanx.symm_mem._rendezvous import rendezvous

_SMALLEST = 1 << 20  # bytes
_PLACE = "staging"  # in the attributes of a RankGroup, with which it goes


class Staging:
    """The staging of a group, as this rank has it.

    Attributes:
        handle: Of the block.
        failure: After which the ranks may be out of step.
    """

    def __init__(self, handle: SymmetricMemory) -> None:
        self.handle = handle
        self.failure = ""

    def own(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """This rank's block from its start on."""
        return self.handle.get_buffer(self.handle.rank, shape, dtype)


@contextmanager
def staging_of(members: RankGroup, nbytes: int, what: str) -> Iterator[Staging]:
    """Use the staging of a group, for one collective that nobody leaves while others read. Collective if it must grow.

    Args:
        members: The group.
        nbytes: That each rank needs, alike on all.
        what: The call, for error texts.

    Raises:
        RevokedError: An earlier call failed within, so that the ranks may be out of step.
        PhalanxError: As `rendezvous`.
    """
    staging: Staging | None = vars(members).get(_PLACE)
    if staging is not None and staging.failure:
        raise RevokedError(
            f"{what} on group {members.name!r}: an earlier call failed, so the ranks may be out of step; make a new "
            f"group. The first failure was: {staging.failure}",
            group=members.name,
        )
    if staging is None or staging.handle.buffer_size < nbytes:
        size = _SMALLEST
        while size < nbytes:
            size *= 2
        staging = Staging(rendezvous(empty(size, dtype=torch.uint8, device="cpu"), members.name))
        vars(members)[_PLACE] = staging
    try:
        yield staging
    except BaseException as error:
        staging.failure = f"{what}: {type(error).__name__}: {error}"
        raise
