"""Makes what serves a new process group."""

import atexit
import weakref
from typing import Any

from phalanx.collectives.c10d import _build
from phalanx.collectives.c10d._connect import Connection

_python_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def make(options: Any) -> Any:
    """A Backend in C++, or a ProcessGroup in Python.

    Args:
        options: Torch's description of the group. Without global ranks it is the default one.
    """
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    rank, store = int(options.group_rank), options.store
    timeout_ms = max(1, round(options.timeout.total_seconds() * 1000))
    compiled = _build.module()
    connection = Connection(options.group_id, ranks, rank)
    if compiled is not None:
        functions = _build.functions(compiled.functions)
        calls = (connection.address, connection.close)
        return compiled.create(functions, connection.name, rank, ranks, store, timeout_ms, *calls)
    from phalanx.collectives.c10d._python_group import PythonGroup

    group = PythonGroup(connection, store, timeout_ms)
    _python_groups.add(group)
    return group


@atexit.register
def _end_all() -> None:
    """Groups that were not destroyed: their threads must not outlive the interpreter."""
    for group in list(_python_groups):
        group.shutdown()
    compiled = _build.loaded()
    if compiled is not None:
        compiled.close_all()
