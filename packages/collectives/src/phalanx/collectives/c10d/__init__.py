"""The backend `phalanx` of torch.distributed: process groups of CPUs and GPUs on the core.

    import torch.distributed as dist

    dist.init_process_group("phalanx")                  # "cpu:phalanx,cuda:phalanx"; or "cpu:phalanx,cuda:nccl"

No import of phalanx is needed: torch finds the backend by an entry point, see `phalanx_torch_autoload`.

Everything that torch builds on process groups runs on it unchanged: DistributedDataParallel, fully_shard, DTensor,
checkpoints. It is a Backend in C++, compiled for the installed torch at the first use on a host, which takes the better
part of a minute; where that cannot be, a process group in Python does the same, slower, and a warning says so; torch
then makes no other backend beside it. See `PHALANX_C10D` in `implementation`.

Collectives on tensors of a GPU are put on its current stream, messages on one beside it. They need the driver and the
kernels of the core on each rank, and NCCL where the ranks are on several hosts (docs/howto/gpu.md).

The ranks of a group meet at its first collective or message. To find out whether they share a host they tell each other
where they are, when the group is made: init_process_group waits for all ranks. (Later groups are known from the default
one, if that is of this backend.)

A group whose ranks are on several hosts is always served in Python: by the core within each host, and between them
over TCP, or by NCCL for tensors of GPUs. Torch 2.13 makes no other backend beside a group in Python, so with
"cpu:phalanx,cuda:nccl" such a group serves GPUs itself; use "cpu:gloo,cuda:nccl" where that is not wanted.
"""

import sys
import warnings
from datetime import timedelta
from typing import Any

import phalanx_torch_autoload
import torch.distributed as dist

from phalanx.collectives.c10d import _torch_compat

__all__ = ["BACKEND", "implementation", "monitored_barrier", "register", "set_timeout"]

BACKEND = "phalanx"


def register() -> None:
    """Register the backend with torch.distributed, so that it is in `Backend._plugins`.

    Importing phalanx.collectives does it. Does nothing the second time.
    """
    phalanx_torch_autoload.register()


def implementation() -> str:
    """What serves new process groups of the backend whose ranks share a host: "cpp" or "python".

    The environment variable PHALANX_C10D asks for one: "cpp" (an error where it cannot be had), "python", or "auto",
    which is the default and takes C++ where it can be had. Compiles it if it is not there.

    Raises:
        RuntimeError: PHALANX_C10D is "cpp", and there is no compiler, or it failed.
        ValueError: PHALANX_C10D is something else.
    """
    from phalanx.collectives.c10d import _build

    return "python" if _build.module() is None else "cpp"


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names the ranks that did not come. Collective.

    As torch.distributed.monitored_barrier, which refuses every backend but gloo. The group can be used after a failure.

    Args:
        group: Of this backend; None is the default group.
        timeout: How long to wait; None is the timeout of the group, and zero or less is over at once, as with gloo.
        wait_all_ranks: Whether to name all that are missing, not just the first.

    Raises:
        torch.distributed.DistBackendError: Ranks did not come in time. All that came get the same text.
    """
    made: Any = _group(group)
    made.monitored_barrier(timeout=_torch_compat.UNSET if timeout is None else timeout, wait_all_ranks=wait_all_ranks)


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set how long later collectives and messages of this rank wait for others. Not collective.

    Args:
        timeout: Of each, its start and its wait. Zero is 1 ms, as in init_process_group.
        group: Of this backend; None is the default group.

    Raises:
        ValueError: The timeout is negative.
    """
    from phalanx.collectives.c10d._connect import connections
    from phalanx.core.timeouts import milliseconds

    found = _group(group)
    _torch_compat.backend_of(found, BACKEND).set_timeout(timeout)
    if (connection := connections.get(found.group_name)) is not None:
        connection.set_timeout(milliseconds(timeout))


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("there are no process groups: call torch.distributed.init_process_group first")
    return found


def create(options: Any, _: Any) -> Any:
    """What serves a new group; torch calls it through `phalanx_torch_autoload`."""
    from phalanx.collectives.c10d import _make

    if "ignite.distributed" in sys.modules:
        warnings.warn(
            "ignite.distributed.auto_model does not wrap a model in DistributedDataParallel for the backend 'phalanx': "
            "the ranks would train without synchronising. Wrap the model in DistributedDataParallel yourself",
            stacklevel=2,
        )
    _torch_compat.give_tensors_as_they_are()
    return _make.make(options)
