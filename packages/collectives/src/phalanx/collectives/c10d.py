"""The backend `phalanx` of torch.distributed: process groups of CPUs and GPUs on the core.

    import torch.distributed as dist

    dist.init_process_group("phalanx")                  # "cpu:phalanx,cuda:phalanx"; or "cpu:phalanx,cuda:nccl"

No import of phalanx is needed: torch finds the backend by an entry point, see `phalanx_torch_autoload`.

Everything that torch builds on process groups runs on it unchanged: DistributedDataParallel, fully_shard, DTensor,
checkpoints. It is a Backend in C++, compiled for the installed torch at the first use on a host, which takes about a
minute. If it cannot be compiled, init_process_group raises and says what to do.

Collectives on tensors of a GPU are put on its current stream, messages on another stream. They need the driver and the
kernels of the core on each rank (docs/howto/gpu.md).

init_process_group waits for all ranks, which tell each other on which hosts they are. (The hosts of later groups are
known if the default group is of this backend.) The ranks of a group on one host connect at its first collective or
message, those of a group on several hosts when it is made: the core serves it over UCX (docs/howto/hosts.md).

Tensors that the core cannot serve on several hosts go through torch's own backends: tensors of GPUs through NCCL, and
if a rank has no UCX, tensors of the CPU through gloo, which a warning says.
"""

from datetime import timedelta
from typing import Any

import phalanx_torch_autoload
import torch
import torch.distributed as dist

from phalanx.collectives import _registry, _torch_compat
from phalanx.collectives._c10d import BACKEND, _build, _make
from phalanx.collectives._c10d._connect import Options
from phalanx.collectives._registry import SymmetricMemory, connections
from phalanx.core.timeouts import milliseconds

__all__ = [
    "BACKEND",
    "Options",
    "SymmetricMemory",
    "changed_store",
    "load",
    "monitored_barrier",
    "process_group",
    "register",
    "set_symmetric_memory",
    "set_timeout",
    "window_get",
]


def register() -> None:
    """Register the backend with torch.distributed, so that it is in `Backend._plugins`.

    Importing phalanx.collectives does it. Does nothing the second time.
    """
    phalanx_torch_autoload.register()


def load() -> None:
    """Load the backend before a group needs it, and compile it if that was not done before. Not collective.

    Raises:
        RuntimeError: It cannot be compiled or loaded; the text says why, and what to do.
    """
    _build.module()


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names the ranks that did not reach it. Collective.

    As torch.distributed.monitored_barrier, which refuses every backend but gloo. The group can be used after a failure.

    Args:
        group: A group of this backend; None is the default group.
        timeout: How long to wait; None is the timeout of the group, and zero or less is over at once, as with gloo.
        wait_all_ranks: Whether to name all ranks that are missing, not just the first.

    Raises:
        ValueError: There is no default group.
        RuntimeError: The group has another backend.
        torch.distributed.DistBackendError: Ranks did not reach it in time. All that did get the same text.
    """
    made: Any = _group(group, "monitored_barrier")
    made.monitored_barrier(timeout=_torch_compat.UNSET if timeout is None else timeout, wait_all_ranks=wait_all_ranks)


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set how long later collectives and messages of this rank wait for others. Not collective.

    Args:
        timeout: The timeout of the start of each, and of its wait. Zero is 1 ms, as in init_process_group.
        group: A group of this backend; None is the default group.

    Raises:
        ValueError: The timeout is negative, or there is no default group.
        RuntimeError: The group has another backend.
    """
    found = _group(group, "set_timeout")
    _torch_compat.backend_of(found, BACKEND).set_timeout(timeout)
    if (connection := connections.get(found.group_name)) is not None:
        connection.set_timeout(milliseconds(timeout))


def process_group(
    store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=30), options: Options | None = None
) -> dist.ProcessGroup:
    """A process group that belongs to no default group, for managers that make and drop groups as ranks come and go.

    Not collective: the ranks meet at the first collective or message. It has ranks and a store of its own, whatever
    groups the process has besides. For torchft, as the body of `_create_pg` of a ProcessGroupWrapper.

    Args:
        store: A torch Store that the ranks share. Another group must have another one, or a PrefixStore of it.
        rank: Of the caller, from 0.
        size: How many ranks there are.
        timeout: Of collectives and messages.
        options: Of the backend; None is `Options()`.

    Raises:
        InvalidArgumentError: The rank is not in the group, or the timeout is negative.
        DistBackendError: The backend cannot be had; the text says why, and what to do.

    Example:
        >>> own = process_group(dist.HashStore(), 0, 1)
        >>> own.allreduce([torch.ones(2)]).wait()
        True
    """
    return _make.by_hand(store, rank, size, timeout, options or Options())


def set_symmetric_memory(memory: SymmetricMemory) -> None:
    """Say where windows of this backend find the memory of tensors. phalanx.symm_mem does it when it is imported.

    Args:
        memory: What finds the blocks of tensors.
    """
    _registry.symmetric_memory = memory


def window_get(window: Any, rank: int, out: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Copy from the window of a rank, without a call on its side: also from another host, unlike `map_remote_tensor`.

    Not collective. It sees what this rank has put there before. Windows came with torch 2.14.

    Args:
        window: A window of a group of this backend, with a tensor that is registered.
        rank: The rank of the group in whose window it reads.
        out: Where to copy it: a contiguous tensor on the CPU of the dtype of that window. Its number of elements is
            how many are copied.
        offset: The first element of the window.

    Returns:
        `out`.

    Raises:
        InvalidArgumentError: The rank, the dtype or the elements are not those of the window; nothing was sent.
        NotImplementedError: The installed torch has no windows.
        DistBackendError: The other rank died, has released its window, or did not answer within the timeout.
    """
    get = getattr(_build.module(), "window_get", None)
    if get is None:
        raise NotImplementedError(f"window_get: windows came with torch 2.14, and this is {torch.__version__}")
    get(window, out, rank, offset)
    return out


def changed_store(group: dist.ProcessGroup) -> Any:
    """The store that the ranks of a group share since its ranks changed, by `reconfigure`; None if they did not.

    For packages that bring the ranks of a group together. Torch keeps the store that the group was made with, which a
    process that joined later need not have. Not collective.

    Args:
        group: Any process group.
    """
    connection = connections.get(group.group_name)
    return None if connection is None else connection.changed_store


def _group(group: dist.ProcessGroup | None, operation: str) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError(f"{operation}: there is no default group; call torch.distributed.init_process_group first")
    return found
