"""What the backend relies on that torch keeps private or does not list. Read in 2.13."""

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from phalanx.collectives._torch_compat import PrefixStore

# What an options object has where nobody gave a timeout: kUnsetTimeout, the default of the group.
UNSET = timedelta(milliseconds=-1)

_c10d: Any = torch._C._distributed_c10d
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


def backend_of(group: dist.ProcessGroup, name: str) -> Any:
    """The Backend that serves the devices for which a group has a backend of that name.

    Raises:
        RuntimeError: It has none.
    """
    for device, backend in dist.BackendConfig(dist.Backend(dist.get_backend_config(group))).device_backend_map.items():
        if backend == name:
            return cast(Any, group)._get_backend(torch.device(device))
    raise RuntimeError(f"the process group has no backend '{name}'")


# ---- torch's own backends --------------------------------------------------------------------------------------------


def has_nccl() -> bool:
    """Whether this torch and this host can serve tensors of GPUs by NCCL."""
    return dist.is_nccl_available() and torch.cuda.is_available()


def join_backends(options: Any, cpu: Any, nccl_options: Any) -> Any:
    """A process group with one backend for the CPU, and NCCL for GPUs where this host has it. Read in 2.13.

    Torch takes it as it is for the group that it makes, and asks no other backend of it: so NCCL is in it whether or
    not the caller named it.

    Args:
        options: Torch's description of the group.
        cpu: A Backend; None: torch's gloo, which is made here. Collective then.
        nccl_options: What the caller gave for NCCL; None for torch's defaults.
    """
    kinds = dist.ProcessGroup.BackendType
    group: Any = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    kind = kinds.GLOO if cpu is None else kinds.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, _make_gloo(options) if cpu is None else cpu)
    if has_nccl():
        group._register_backend(torch.device("cuda"), kinds.NCCL, _make_nccl(options, nccl_options))
    return group


def _make_gloo(options: Any) -> Any:
    store = PrefixStore("gloo", options.store)
    made = _c10d.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=options.timeout)
    _describe(made.options, options)
    made._set_sequence_number_for_group()
    return made


def _make_nccl(options: Any, given: Any) -> Any:
    own = _c10d.ProcessGroupNCCL.Options() if given is None else given
    own._timeout = options.timeout
    _describe(own, options)
    store = PrefixStore("nccl", options.store)
    made = _c10d.ProcessGroupNCCL(store, options.group_rank, options.group_size, own)
    made._set_sequence_number_for_group()
    return made


def _describe(own: Any, options: Any) -> None:
    own.global_ranks_in_group, own.group_name = options.global_ranks_in_group, options.group_id
