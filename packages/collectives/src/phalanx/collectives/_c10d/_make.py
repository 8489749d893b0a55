"""Makes what serves a new process group of the backend."""

import itertools
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.collectives import _registry, _torch_compat
from phalanx.collectives._bootstrap import Bootstrap, BootstrapResult
from phalanx.collectives._c10d import BACKEND, _build
from phalanx.collectives._c10d._connect import Connection, Options, default_ms, host_name, hosts
from phalanx.collectives._c10d._membership import Membership, Unconnected, roster_of
from phalanx.collectives._group_state import tell
from phalanx.collectives._registry import members
from phalanx.collectives._torch_compat import PrefixStore, backends_of
from phalanx.core import InvalidArgumentError, PhalanxError, UnsupportedError, WaitTimeoutError


def create(options: Any, pg_options: Any) -> Any:
    """The backend of a new process group; or a whole process group, where torch has to serve a part of it.

    Torch calls it through `phalanx_torch_autoload`. Collective where the hosts of the ranks are not known yet, and
    where they are several.

    Args:
        options: Torch's description of the group. Without global ranks it is the default one.
        pg_options: What the caller gave: Options of this backend, or those of NCCL, if any.

    Returns:
        The backend in C++. For a group on several hosts it is a ProcessGroup: tensors of GPUs go through NCCL there, if
        this host has it, and where there is no UCX, those of the CPU go through gloo.

    Raises:
        DistBackendError: The backend cannot be had on a rank, or ranks did not come in time; the text says which.
        ValueError: The timeout is negative.
    """
    if "ignite.distributed" in sys.modules:
        warnings.warn(
            "ignite.distributed.auto_model does not wrap a model in DistributedDataParallel for the backend 'phalanx': "
            "the ranks would train without synchronising. Wrap the model in DistributedDataParallel yourself",
            stacklevel=2,
        )
    _torch_compat.give_tensors_as_they_are()
    default = dist.group.WORLD
    # new_group gives the global ranks, and only the default group has none; but so has one that was made by hand, as by
    # frameworks that join processes of several default groups.
    by_hand = default is not None and not options.global_ranks_in_group
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    rank, store, name = int(options.group_rank), options.store, options.group_id
    timeout_ms = default_ms(name, options.timeout)
    own, nccl_options = (pg_options, None) if isinstance(pg_options, Options) else (Options(), pg_options)
    if getattr(options, "enable_reconfigure", False):  # the other ranks come with the first `reconfigure`
        return _backend(Unconnected(name, ranks, rank, store, own), timeout_ms)
    spans_hosts = len(set(_hosts_of(name, ranks, rank, store, timeout_ms, by_hand))) > 1
    connection = Connection(name, ranks, rank, store, timeout_ms, own, by_hand=by_hand)
    if spans_hosts:  # whether the core can serve it is known when it is made, with the same result on all ranks
        try:
            connection.group(timeout_ms)
        except UnsupportedError as error:
            connection.close()
            if own.keeps_order_of_ranks:  # gloo adds in an order of its own
                raise dist.DistBackendError(f"group '{name}': reduction_order is 'ranks', but {error}") from error
            tell(name, rank, f"the backend 'phalanx' hands it to gloo: {error}")
            return _torch_compat.join_backends(options, cpu=None, nccl_options=nccl_options)
        except PhalanxError as error:
            connection.close()
            raise dist.DistBackendError(f"group '{name}': {error}") from error
    backend = _backend(connection, timeout_ms)
    if spans_hosts and _torch_compat.has_nccl():
        return _torch_compat.join_backends(options, cpu=backend, nccl_options=nccl_options)
    return backend


_numbers = itertools.count()
_BY_HAND = "by hand"  # what the ranks of such a group call it


def by_hand(store: Any, rank: int, size: int, timeout: timedelta, options: Options) -> dist.ProcessGroup:
    """See c10d.process_group."""
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"process_group: rank {rank} is not in a group of {size}")
    key, ranks = f"phalanx/by_hand/{next(_numbers)}", range(size)
    timeout_ms = default_ms(key, timeout)
    backend = _backend(Connection(_BY_HAND, ranks, rank, store, timeout_ms, options, key=key), timeout_ms)
    return _torch_compat.wrap_backend(backend, key, store, rank, size)


def _backend(connection: Connection | Unconnected, timeout_ms: int) -> Any:
    """A backend in C++ of these ranks. Not collective."""
    name = connection.name
    try:
        compiled = _build.module()
    except RuntimeError as error:
        raise dist.DistBackendError(f"group '{name}': {error}") from None
    membership = Membership(connection, timeout_ms, _backend)
    return compiled.create(_build.functions(compiled.functions), name, timeout_ms, roster_of(connection), membership)


def _hosts_of(name: str, ranks: Sequence[int], rank: int, store: Any, timeout_ms: int, by_hand: bool) -> list[str]:
    """The names of the hosts of the ranks of a group, in the order of the ranks."""
    default = dist.group.WORLD
    if default is not None and BACKEND in backends_of(default) and not by_hand:
        return [hosts[default.group_name][each] for each in ranks]
    refusal = _build.refusal()
    answer = BootstrapResult("", f"rank {ranks[0]}: {refusal}" if refusal else "", [""])
    if len(ranks) > 1:
        own = PrefixStore(f"phalanx/hosts/{members(ranks)}", store)
        try:
            answer = Bootstrap(own, name, ranks, rank, timeout_ms).run(refusal, host_name())
        except WaitTimeoutError as error:
            late = str(error).partition(" to call ")[0]
            raise dist.DistBackendError(
                f"{late} to make it too, by init_process_group or new_group. Check that all processes were started"
            ) from None
        except PhalanxError as error:
            raise dist.DistBackendError(f"group '{name}': {error}") from error
    if answer.refusal:
        raise dist.DistBackendError(f"group '{name}': {answer.refusal}")
    if default is None:
        hosts[name] = answer.hosts
    return answer.hosts


def _end_all() -> None:
    """Groups that were not destroyed: their threads must not outlive the interpreter."""
    compiled = _build.loaded()
    if compiled is not None:
        compiled.close_all()


_registry.before_end.append(_end_all)
