"""Whether symmetric memory is to be had for a group, and a pretence of it for tests that only compile."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from phalanx.core import InvalidArgumentError, PhalanxError
from phalanx.symm_mem._groups import resolve

# The names in a tuple, and in place of them None for all names; None outside of the test mode.
_pretended: ContextVar[tuple[set[str] | None] | None] = ContextVar("phalanx.symm_mem test mode", default=None)


@contextmanager
def _test_mode(group_names: set[str] | None = None) -> Iterator[None]:
    """Make `is_symm_mem_enabled_for_group` say yes for groups that need not exist, on the calling thread.

    As `_test_mode` of `torch.distributed._symmetric_memory`, for tests of what a compiler makes of a program. The ops
    stay what they are: to trace one, its group must exist.

    Args:
        group_names: For these it says yes, for all others no. None: it says yes for all.
    """
    token = _pretended.set((group_names,))
    try:
        yield
    finally:
        _pretended.reset(token)


def is_symm_mem_enabled_for_group(group_name: str) -> bool:
    """Whether `rendezvous` takes this group. Not collective.

    As the function of this name in `torch.distributed._symmetric_memory`. Nothing needs to be enabled first. Whether
    the ranks of the group share memory shows when they meet, at the first rendezvous.

    Args:
        group_name: Given to `set_group_info`, or the name of a torch process group.

    Raises:
        InvalidArgumentError: It is no string.
    """
    if not isinstance(group_name, str):
        raise InvalidArgumentError(f"is_symm_mem_enabled_for_group: group_name is {group_name!r}; give a name")
    pretended = _pretended.get()
    if pretended is not None:
        return pretended[0] is None or group_name in pretended[0]
    try:
        resolve(group_name)
    except PhalanxError:
        return False
    return True
