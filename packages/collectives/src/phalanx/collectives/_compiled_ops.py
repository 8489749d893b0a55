"""Ops that only compiled graphs call: their fake kernels, and arenas of groups whose ranks have not met yet.

`phalanx_ordered` has every collective of `phalanx`, complete on return, with one argument more: a tensor that stands
for the order of what a graph sends. Each op claims to write it, so a compiler keeps them in the order of the graph,
which is the same on all ranks. The others keep results in symmetric memory (arenas), or write them there. The kernels
are native, in core/torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.collectives import _torch_compat, bits
from phalanx.collectives._autograd import COLLECTIVES


def _fake_arena(nbytes: Any, plan: str, group_name: str, gpu: int = -1) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64)


def _fake_view(
    arena: torch.Tensor, offset: Any, size: Sequence[Any], dtype: torch.dtype, gpu: int = -1
) -> torch.Tensor:
    return arena.new_empty(size, dtype=dtype, device=torch.device("cuda", gpu) if gpu >= 0 else arena.device)


def _fake_nothing(*_: Any, **__: Any) -> None:
    return None


def _fake_mm_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, group_size: int, group_name: str, pieces: Any
) -> torch.Tensor:
    return a.new_empty([a.size(0) // group_size, b.size(1)])


def _fake_all_gather_mms(
    shard: torch.Tensor, bs: Sequence[torch.Tensor], group_size: int, group_name: str
) -> list[torch.Tensor]:
    return [shard.new_empty([shard.size(0) * group_size, b.size(1)]) for b in bs]


FAKES: dict[str, Any] = {
    "symm_arena": _fake_arena,
    "arena_view": _fake_view,
    "arena_release_": _fake_nothing,
    "mm_into_": _fake_nothing,
    "bmm_into_": _fake_nothing,
    "addmm_into_": _fake_nothing,
    "mm_reduce_scatter": _fake_mm_reduce_scatter,
    "all_gather_mms": _fake_all_gather_mms,
}

_libraries: list[Any] = []  # what is registered lives as long as these


def _symm_arena(nbytes: int, plan: int, group_name: int, gpu: int = -1) -> torch.Tensor:
    """The arena of a group that the native ops do not serve yet: a graph from a cache runs before its group is ready.

    Args:
        nbytes: Size of the arena in bytes.
        plan: Its plan, as an interned string.
        group_name: The name of the group, as an interned string.
        gpu: The GPU of its memory, or -1 for the host.
    """
    from phalanx.collectives import _errors, _ops, _registry  # they need this module

    try:
        name = _ops.text(group_name)
        entry = _registry.entry_named(name)
        if gpu < 0 and not entry.decided:
            entry.decide()
        if gpu >= 0 and not entry.decided_on_gpus:
            entry.decide_on_gpus(torch.device("cuda", gpu))
        if gpu < 0 and (entry.core is None or (nbytes and entry.core.hosts > 1)):
            raise RuntimeError(
                f"symm_arena on group '{name}': this graph was compiled for ranks that share the memory of a host, and "
                "the ranks of this group do not; compile it again with this group"
            )
        if gpu >= 0 and not entry.on_gpus:
            raise RuntimeError(
                f"symm_arena on group '{name}': this graph was compiled for ranks whose GPUs the core serves, and it "
                "does not serve those of this group; compile it again with this group"
            )
        arena: torch.Tensor = torch.ops.phalanx.symm_arena(nbytes, _ops.text(plan), name, gpu)
        return arena
    except BaseException as error:
        _errors.keep(_errors.better(error))
        raise


def _without_order(fake: Any, op: Any) -> Any:
    """The fake kernel of a collective that takes `order` and `start` as its last arguments."""
    before = len(op._schema.arguments) - 2

    def ordered(*args: Any, **kwargs: Any) -> Any:
        return fake(*args[:before], **{name: given for name, given in kwargs.items() if name not in ("order", "start")})

    return ordered


def register(fakes: Mapping[str, Any]) -> None:
    """Make the ops known to compilers.

    Args:
        fakes: The fake kernels of `phalanx`, by name.
    """
    ours, ordered, roads = (_torch_compat.fragment(one) for one in ("phalanx", "phalanx_ordered", "phalanx_c10d"))
    _libraries.extend((ours, ordered, roads))
    for name, fake in FAKES.items():
        torch.library.register_fake(f"phalanx::{name}", fake, lib=ours)
        if name.endswith("_"):
            _torch_compat.keep_in_graphs(getattr(torch.ops.phalanx, name).default)
    every = {name: getattr(torch.ops.phalanx_ordered, name).default for name in COLLECTIVES}
    bits.register(ordered, every)
    for name, op in every.items():
        torch.library.register_fake(f"phalanx_ordered::{name}", _without_order(fakes[name], op), lib=ordered)
        _torch_compat.keep_in_graphs(op)
    _torch_compat.implement(roads, "symm_arena", _symm_arena, "CompositeExplicitAutograd")
