"""The size of signal pads."""

from phalanx.symm_mem._state import current


def set_signal_pad_size(size: int) -> None:
    """Set the least size of this rank's signal pads. Not collective, but all ranks must set the same.

    As `torch.distributed._symmetric_memory.set_signal_pad_size`. Here a pad has one word of 4 bytes for each rank of
    its group in each channel, those of one rank in cache lines of their own, and all groups of a rank have the same
    number of channels. The size therefore sets that number, size / 8 rounded up: the pad of each group of two ranks or
    more has at least `size` bytes. `SymmetricMemory.signal_pad_size` is the size of a pad,
    `SymmetricMemory.signal_channels` the number of channels.

    The size applies to all memory of this rank, so it must be set before the first allocation, or after `finalize` or
    in a new `rank_context`. A rendezvous of ranks with different sizes names the rank that differs.

    Args:
        size: The size in bytes, at most 524288. 0 restores the default, 64 channels.

    Raises:
        InvalidArgumentError: The size is not a number of bytes, or too large.
        InUseError: This rank has allocated before, with another number of channels.

    Example:
        >>> with rank_context():
        ...     set_signal_pad_size(4096)
        ...     rendezvous(empty(4), group).signal_channels
        512
    """
    current().set_signal_pad_size(size)


def get_signal_pad_size() -> int:
    """The least size of this rank's signal pads in groups of two ranks or more, in bytes. Not collective.

    As `torch.distributed._symmetric_memory.get_signal_pad_size`.

    Returns:
        The argument of `set_signal_pad_size`, or the size of the default number of channels.

    Example:
        >>> get_signal_pad_size()
        512
    """
    return current().signal_pad_size
