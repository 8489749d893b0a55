"""The private or recent parts of torch that this package relies on. Nothing else here imports any.

Read in torch 2.13.0. `test_torch_compat.py` fails with a plain text when torch moves them.
"""

from typing import Any

import torch.distributed as dist

# Public, but torch.distributed does not list it for type checkers.
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]

# Private, read in 2.13. The first returns the store that a ProcessGroup was made with, as torch's own symmetric memory
# takes it (ProcessGroup.get_group_store() has none for groups of threads). The second returns the ProcessGroup of a
# name, and raises RuntimeError when there is none.
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _get_process_group_store,
    _resolve_process_group,
)


def process_group_named(name: str) -> dist.ProcessGroup | None:
    """The torch process group of this name, or None.

    Args:
        name: As `ProcessGroup.group_name` gives it.
    """
    try:
        found: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return None
    return found


def store_of(group: dist.ProcessGroup) -> Any:
    """The torch Store of a process group, with the group's own prefix.

    Args:
        group: Any torch process group.
    """
    return _get_process_group_store(group)
