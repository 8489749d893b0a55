"""How large the signal pads are."""

from phalanx.symm_mem._context import current


def set_signal_pad_size(size: int) -> None:
    """Set the least size of this rank's signal pads. Not collective, but all ranks must set the same.

    As `torch.distributed._symmetric_memory.set_signal_pad_size`. Here a pad has one word of 4 bytes for each rank of
    its group in each channel, those of one rank in cache lines of their own, and all groups of a rank have the same
    number of channels. So the size gives that number, size / 8 rounded up, with which the pad of each group of two
    ranks or more has at least `size` bytes.
    `SymmetricMemory.signal_pad_size` is what a pad has, `SymmetricMemory.signal_channels` the number.

    It holds for this rank's memory from its first allocation on, so it must be called before that; `finalize` or a
    new `rank_context` begin anew. A rendezvous of ranks that set different sizes names the odd one.

    Args:
        size: In bytes, at most 524288. 0 goes back to the default, 64 channels.

    Raises:
        InvalidArgumentError: The size is no number of bytes, or too large.
        InUseError: This rank has allocated before, with another number of channels.
    """
    current().set_signal_pad_size(size)


def get_signal_pad_size() -> int:
    """The least size of this rank's signal pads in groups of two ranks or more, in bytes. Not collective.

    As `torch.distributed._symmetric_memory.get_signal_pad_size`.

    Returns:
        What `set_signal_pad_size` was given, or what the default number of channels gives.
    """
    return current().signal_pad_size
