"""What the backend relies on that torch keeps private or does not list. Read in 2.13."""

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from phalanx.collectives._torch_compat import is_watched

ReduceOp: Any = _c10d.ReduceOp

# Where the classes of options are, such as AllgatherOptions; not all are in torch.distributed.
options: Any = torch._C._distributed_c10d

# Bases of the group in Python and of its works. Their stubs give torch's own signatures, with more forms than it calls.
GroupBase: Any = dist.ProcessGroup

# C++ calls the wait and get_future of this one.
WorkBase: Any = torch._C._distributed_c10d.Work

# What an options object has where nobody gave a timeout: kUnsetTimeout, the default of the group.
UNSET = timedelta(milliseconds=-1)

CUSTOM: Any = dist.ProcessGroup.BackendType.CUSTOM


_kept: list[Any] = []  # what is registered lives as long as it


def give_tensors_as_they_are() -> None:
    """Let torch's ops of process groups give tensors with the conjugate or negative bit to a backend. Read in 2.13.

    Torch's own rule for these bits gives the backend a plain copy, and does not copy the result back: what is called in
    place would write nothing. Does nothing the second time.
    """
    if _kept:
        return
    make: Any = torch.library.Library  # public, without types
    library = make("c10d", "IMPL")
    _kept.append(library)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::"):
            for key in ("Conjugate", "Negative"):
                library.impl(name.removeprefix("c10d::"), torch.library.fallthrough_kernel, key)


def group_named(name: str) -> dist.ProcessGroup | None:
    """The process group that this rank has under a name, or None."""
    for group, known in _c10d._world.pg_names.items():
        if known == name:
            return group
    return None


def backend_of(group: dist.ProcessGroup, name: str) -> Any:
    """The Backend of that name that a group has, or the group itself where it is a Python class.

    Raises:
        RuntimeError: It has none.
    """
    if type(group) is not dist.ProcessGroup:
        return group
    for device, backend in dist.BackendConfig(dist.Backend(dist.get_backend_config(group))).device_backend_map.items():
        if backend == name:
            return cast(Any, group)._get_backend(torch.device(device))
    raise RuntimeError(f"the process group has no backend '{name}'")


def claim_devices(group: Any, devices: list[str]) -> None:
    """Say for which device types a Python group is, as torch asks it."""
    for device in devices:
        group._register_backend(torch.device(device), CUSTOM, None)


def premultiplied_by(op: Any) -> float:
    """The factor of a ReduceOp.PREMUL_SUM."""
    factor = op.__getstate__()[1]
    return float(factor.item() if isinstance(factor, torch.Tensor) else factor)


def new_future(device: torch.device | None = None) -> Any:
    """A future of tensors on the CPU, or on that GPU."""
    return torch.futures.Future() if device is None else torch.futures.Future(devices=[device])


def event(what: str, tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """What a profiler sees of a call of the back end in Python: its name and the shapes. Read in 2.11 to 2.13."""
    if not is_watched():
        return contextlib.nullcontext()
    made: contextlib.AbstractContextManager[Any] = torch._C._profiler._RecordFunctionFast(
        f"phalanx:{what}", list(tensors), {}
    )
    return made
