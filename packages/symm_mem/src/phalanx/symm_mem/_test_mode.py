"""Whether a group supports symmetric memory, and a test mode in which this is pretended, for tests of compilers."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from phalanx.core import InvalidArgumentError, PhalanxError
from phalanx.symm_mem._process_group import resolve

# A tuple of the set of names, or of None for all names; None outside of the test mode.
_pretended: ContextVar[tuple[set[str] | None] | None] = ContextVar("phalanx.symm_mem test mode", default=None)


@contextmanager
def _test_mode(group_names: set[str] | None = None) -> Iterator[None]:
    """Make `is_symm_mem_enabled_for_group` say yes for groups that need not exist, on the calling thread.

    As `_test_mode` of `torch.distributed._symmetric_memory`, for tests of compilers. The ops are unchanged: to trace
    one, its group must exist.

    Args:
        group_names: The groups for which the answer is yes; None for all.
    """
    token = _pretended.set((group_names,))
    try:
        yield
    finally:
        _pretended.reset(token)


def is_symm_mem_enabled_for_group(group_name: str) -> bool:
    """Whether `rendezvous` takes this group. Not collective.

    As the function of this name in `torch.distributed._symmetric_memory`. Nothing needs to be enabled before. Whether
    the ranks of the group share memory is found out at the first rendezvous.

    Args:
        group_name: A name given to `set_group_info`, or the name of a torch process group.

    Raises:
        InvalidArgumentError: The name is not a string.

    Example:
        >>> is_symm_mem_enabled_for_group(group.group_name), is_symm_mem_enabled_for_group("none")
        (True, False)
    """
    if not isinstance(group_name, str):
        raise InvalidArgumentError(f"is_symm_mem_enabled_for_group: group_name is {group_name!r}; give a name")
    pretended = _pretended.get()
    if pretended is not None:
        return pretended[0] is None or group_name in pretended[0]
    try:
        resolve(group_name, "is_symm_mem_enabled_for_group")
    except PhalanxError:
        return False
    return True
