"""The private or recent parts of torch that this package relies on. Nothing else here imports any.

Read in torch 2.13.0. `test_torch_compat.py` fails with a plain text when torch moves them.
"""

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

# Public, but torch.distributed does not list it for type checkers.
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]

# Private, read in 2.13. The first returns the store that a ProcessGroup was made with, as torch's own symmetric memory
# takes it (ProcessGroup.get_group_store() has none for groups of threads). The second returns the ProcessGroup of a
# name, and raises RuntimeError when there is none. The third has what torch.distributed knows of its groups.
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _get_process_group_store,
    _resolve_process_group,
    _world,
)

from phalanx.core.timeouts import milliseconds


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
    try:
        return _get_process_group_store(group)
    except (KeyError, RuntimeError, ValueError):  # it was made by hand, and torch.distributed does not know it
        return cast(Any, group).get_group_store()


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks of a group, in order; its own numbers where nobody said the global ones. Read in 2.13."""
    known = _world.pg_group_ranks.get(group) or {}
    if len(known) != group.size():
        return tuple(range(group.size()))
    return tuple(sorted(known, key=lambda rank: known[rank]))


def timeout_ms_of(group: dist.ProcessGroup) -> int:
    """The timeout of a group in milliseconds, or 0 where it does not tell it. Read in 2.13."""
    for device in (torch.device("cpu"), *cast(Any, group)._device_types):
        try:
            timeout: timedelta = cast(Any, group)._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):  # it has no backend for that; or one whose options are not known
            continue
        return milliseconds(timeout)
    return 0


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether the other ranks of a group are fake. Read in 2.13."""
    config = _world.pg_backend_config.get(group)
    return config is not None and dist.get_backend(group) == "fake"
