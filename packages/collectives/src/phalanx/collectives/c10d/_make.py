"""Makes what serves a new process group."""

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from phalanx.collectives import _registry
from phalanx.collectives._meeting import Meeting
from phalanx.collectives._registry import members
from phalanx.collectives._torch_compat import PrefixStore, backends_of
from phalanx.collectives.c10d import BACKEND, _build
from phalanx.collectives.c10d._connect import Connection, Facts, default_ms
from phalanx.core import PhalanxError, WaitTimeoutError, World

_python_groups: weakref.WeakSet[Any] = weakref.WeakSet()
_hosts: dict[str, list[str]] = {}  # of the ranks of a default group, by its name


def make(options: Any) -> Any:
    """A Backend in C++, or a ProcessGroup in Python. Collective where nobody knows the hosts of the ranks.

    Args:
        options: Torch's description of the group. Without global ranks it is the default one.

    Raises:
        DistBackendError: Ranks did not come in time; the text names them.
        ValueError: The timeout is negative.
    """
    default = dist.group.WORLD
    # new_group gives the global ranks, and only the default group has none; but so has one that was made by hand, as by
    # frameworks that join processes of several default groups.
    by_hand = default is not None and not options.global_ranks_in_group
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    rank, store, name = int(options.group_rank), options.store, options.group_id
    timeout_ms = default_ms(name, options.timeout)
    try:
        hosts = _hosts_of(name, ranks, rank, store, timeout_ms, by_hand)
    except WaitTimeoutError as error:
        late = str(error).partition(" to call ")[0]
        raise dist.DistBackendError(f"{late} to make it too, by init_process_group or new_group") from None
    except PhalanxError as error:
        raise dist.DistBackendError(f"group '{name}': {error}") from error
    group: Any
    facts = Facts(store, timeout_ms, by_hand)
    if len(set(hosts)) > 1:
        from phalanx.collectives.c10d._hosts_group import HostsConnection, HostsGroup

        group = HostsGroup(HostsConnection(name, ranks, rank, hosts, facts), store, timeout_ms)
        _python_groups.add(group)
        return group
    compiled = _build.module()
    connection = Connection(name, ranks, rank, hosts, facts)
    if compiled is not None:
        functions = _build.functions(compiled.functions)
        calls = (connection.address, connection.close)
        return compiled.create(functions, name, rank, ranks, store, timeout_ms, *calls)
    from phalanx.collectives.c10d._python_group import PythonGroup

    group = PythonGroup(connection, store, timeout_ms)
    _python_groups.add(group)
    return group


def _hosts_of(name: str, ranks: Sequence[int], rank: int, store: Any, timeout_ms: int, by_hand: bool) -> list[str]:
    """What the ranks of a group call their hosts, in order."""
    default = dist.group.WORLD
    if default is not None and BACKEND in backends_of(default) and not by_hand:
        return [_hosts[default.group_name][each] for each in ranks]
    found = [""]
    if len(ranks) > 1:
        with World(0, 1) as alone:
            host = f"{alone.host_id:x}"
        own = PrefixStore(f"phalanx/hosts/{members(ranks)}", store)
        found = Meeting(own, name, ranks, rank, timeout_ms).hold("", host).hosts
    if default is None:
        _hosts[name] = found
    return found


os.register_at_fork(after_in_child=_python_groups.clear)  # a child leaves its parent's groups alone


def _end_all() -> None:
    """Groups that were not destroyed: their threads must not outlive the interpreter."""
    for group in list(_python_groups):
        group.shutdown()
    compiled = _build.loaded()
    if compiled is not None:
        compiled.close_all()


_registry.before_end.append(_end_all)
