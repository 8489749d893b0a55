"""Timeouts as the core takes them: how packages on top of it convert a `timedelta`, and word the error of one."""

from datetime import timedelta

LONGEST_MS = 2**40  # 34 years, the longest wait of the core

# Torch keeps timeouts in C++, where timedelta.max overflows into 185,000 years before now. Nobody means a negative
# timeout of that size.
_OVERFLOWED_MS = -(2**52)


def milliseconds(timeout: timedelta) -> int:
    """A timeout in whole milliseconds, rounded up. Never 0, which would mean the default.

    Args:
        timeout: Zero and less are 1 ms: over at once. `timedelta.max` is 34 years.

    Returns:
        1 to `LONGEST_MS`.

    Example:
        >>> milliseconds(timedelta(seconds=1.5)), milliseconds(timedelta(0))
        (1500, 1)
    """
    exact = -(timeout // timedelta(milliseconds=-1))  # towards the longer one
    return LONGEST_MS if exact < _OVERFLOWED_MS else min(max(exact, 1), LONGEST_MS)


def timed_out(timeout_ms: int, default_ms: int | None = None) -> str:
    """What the text of every WaitTimeoutError contains, as those of the core: "timed out after 500 ms (...)".

    Args:
        timeout_ms: How long it has waited.
        default_ms: The timeout of the group; None where `timeout_ms` is that.

    Example:
        >>> timed_out(500, 60_000)
        'timed out after 500 ms (the timeout of this call)'
    """
    origin = "the timeout of the group" if default_ms in (None, timeout_ms) else "the timeout of this call"
    return f"timed out after {timeout_ms} ms ({origin})"
