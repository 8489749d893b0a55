"""Events for torch's profilers of collectives that Python calls, and the flight recorder of the same collectives.

The events are those of torch's NCCL backend (docs/howto/profile.md). The module that writes them is compiled with the
backend `phalanx`, and is loaded with the first process group of that backend, or by `phalanx.collectives.c10d.load()`.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.collectives import _registry
from phalanx.collectives._c10d import _build
from phalanx.collectives._torch_compat import is_watched
from phalanx.core import Group

_NOTHING = contextlib.nullcontext()


def is_shown() -> bool:
    """Whether a profiler, an observer or a mode of torch runs, so that `shown` may record an event."""
    return is_watched()


def shown(
    collective: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    group: Group | None,
    *,
    name: str = "",
    peer: int = -1,
    message: bool = False,
    numbered: bool = True,
) -> contextlib.AbstractContextManager[Any]:
    """A context in which one collective or message runs, or is started. It costs one check if no profiler runs.

    Args:
        collective: The name of the collective, as in torch's NCCL backend if that has it.
        inputs, outputs: The tensors that this rank reads and writes.
        group: The group; None if the core does not serve it: then nothing is recorded.
        name: The name of the group in torch, if it differs from the name of `group`.
        peer: The root or the other rank within the group; -1 if there is none.
        message: Whether it is a message, which has no number in the flight recorder.
        numbered: Whether it is one collective of the core, which the flight recorder counts.

    Returns:
        A context manager.
    """
    if group is None or not is_watched():
        return _NOTHING
    module = _build.loaded()
    if module is None or not module.is_recorded():
        return _NOTHING
    number = group.sequence + 1 if numbered and not message else -1
    who = (name or group.name, group.group_rank, list(group.ranks))
    made: contextlib.AbstractContextManager[Any] = module.Recording(
        collective, list(inputs), list(outputs), *who, number, peer, message
    )
    return made


def flight_record() -> str:
    """The flight recorders of this rank and of the ranks that it is connected to. Not collective.

    The collectives in it have the numbers that the events of a profile have ("Seq").

    Returns:
        JSON, which `phalanx trace` reads.

    Raises:
        RuntimeError: No group of the default group's ranks has run anything on the core yet.
    """
    rank = _registry.rank_of_default()
    if rank is None:
        raise RuntimeError(
            "flight_record: no group of this rank has run anything on the core yet; call init_process_group and a "
            "collective that Phalanx serves first"
        )
    return rank.world().dump()
