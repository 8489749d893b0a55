"""Random numbers that do not depend on the mesh: where their keys come from.

Every random op on DTensors takes one 64-bit *key* from torch's generator, the same on every rank, and each element is a
function of that key and of its index in the whole tensor (phalanx.core.random). So any mesh and any placements give the
same tensor, and `torch.manual_seed`, `torch.random.fork_rng`, `torch.get_rng_state` and checkpoints of that state work
as ever. The values are not those that torch draws for a plain tensor from the same seed.

That ranks agree on the key rests on equal states of their generators. The first random op on a mesh (without a
generator of its own) makes them so, as torch's tracker does: the state of the mesh's first rank is sent to all, with a
warning where one had another. `manual_seed(seed, mesh)` sets a seed and spares that. Afterwards, every rank of a mesh
must draw the same numbers in the same order: use a torch.Generator for a stream of one rank.

Ranks that are threads of one process (torch's "threaded" backend) have a stream each, in the place of torch's default
generator, that begins as a copy of it.

Names follow torch.distributed.tensor._random of torch 2.13.
"""

import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.dtensor._mesh import Mesh, coordinate_of, describe, mesh_id

__all__ = ["is_rng_supported_mesh", "manual_seed"]

TAG: Final = "parallel-rng"
_MASK: Final = (1 << 64) - 1


class _OfThread(threading.local):
    """The generator of a rank that is a thread, and the seed of torch's from which it began."""

    generator: torch.Generator | None = None
    seed: int = 0


_thread = _OfThread()
# Where the ranks agree: the process groups of meshes. Mesh objects come and go, on each rank at another time; groups
# end on all ranks at once. Under the first group of a mesh are the names of all of its groups.
_agreed: "weakref.WeakKeyDictionary[Any, set[tuple[str, ...]]]" = weakref.WeakKeyDictionary()
_agreed_mesh_ids: set[int] = set()  # of living meshes: what is asked first


# ---- generators -----------------------------------------------------------------------------------------------------


def generator_of_ranks(have_groups: bool) -> torch.Generator:
    """The generator from which random ops take their keys if they are given none: ranks have process groups, or not."""
    if not (have_groups and _are_threads()):
        return torch.default_generator
    seed = torch.default_generator.initial_seed()
    if _thread.generator is None or _thread.seed != seed:  # the first, or torch.manual_seed was called since
        _thread.generator = torch.Generator().manual_seed(seed)
        _thread.seed = seed
    return _thread.generator


def _are_threads() -> bool:
    """Whether ranks are threads of one process."""
    return dist.is_initialized() and dist.get_backend() == "threaded"


def draw_key(mesh: Mesh, generator: torch.Generator | None = None) -> int:
    """64 bits from a generator: the key of one random op. Collective when it is the first on a mesh.

    A generator that the op was given must have the same state on every rank of the mesh.
    """
    if generator is None:
        agree(mesh)
        generator = generator_of_ranks(isinstance(mesh, DeviceMesh))
    return key_of(generator)


def key_of(generator: torch.Generator) -> int:
    """64 bits from a generator, which moves on. Where it is a device's, nothing waits for the device."""
    if generator.device.type == "cpu":
        return int(torch.empty((), dtype=torch.int64).random_(-(1 << 63), None, generator=generator).item()) & _MASK
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return _mixed(_mixed(generator.initial_seed() & _MASK) ^ offset)


def _mixed(value: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): spreads each bit over all."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def agree(mesh: Mesh) -> None:
    """Give every rank of a mesh the generator state of its first rank, once for each mesh. Collective the first time.

    Source: what OffsetBasedRNGTracker of torch does when it is made, there for all ranks at once.
    """
    if mesh_id(mesh) in _agreed_mesh_ids:
        return
    _agreed_mesh_ids.add(mesh_id(mesh))
    groups = _groups_to_agree(mesh)
    if groups:
        agree_among(groups, mesh.device_type, describe(mesh))


def agree_among(groups: Sequence[Any], device_type: str, where: str | None = None) -> None:
    """As `agree`, for the process groups of a mesh, one for each mesh dim. Collective the first time.

    `where` is the mesh in words, for a warning.
    """
    if not _mark_groups(groups):
        generator = generator_of_ranks(True)
        mine = generator.get_state()
        state = mine.to(device_type)
        if state is mine:
            state = mine.clone()
        # Along one mesh dim after the other: the first rank of each has the state by then.
        for group in groups:
            dist.broadcast(state, dist.get_global_rank(group, 0), group=group)
        state = state.cpu()
        if not torch.equal(state, mine):
            where = where or f"of the process groups {[group.group_name for group in groups]}"
            warnings.warn(
                f"the random state of this rank differed from that of the first rank of the mesh {where}, and was set "
                "to it: the ranks of a mesh draw random numbers together, so call torch.manual_seed with the same "
                "seed on all of them, or phalanx.dtensor.random.manual_seed(seed, mesh)",
                stacklevel=2,
            )
            generator.set_state(state)


def _groups_to_agree(mesh: Mesh) -> list[Any]:
    """The process groups of a mesh; none if its ranks have nothing to agree on."""
    if not isinstance(mesh, DeviceMesh) or mesh.size() == 1 or coordinate_of(mesh) is None:
        return []
    return list(mesh.get_all_groups())


def _mark_groups(groups: Sequence[Any]) -> bool:
    """Count the ranks of a mesh as agreed. Returns whether they were."""
    names = tuple(group.group_name for group in groups)
    known = _agreed.setdefault(groups[0], set())
    if names in known:
        return True
    known.add(names)
    return False


# ---- the public functions -------------------------------------------------------------------------------------------


def is_rng_supported_mesh(device_mesh: Mesh) -> bool:
    """Whether random ops work on DTensors of a mesh: they do on every device, and on CPU meshes, unlike torch's.

    Args:
        device_mesh: The mesh.

    Returns:
        True; numbers for other devices than the CPU and GPUs that the core can use are made on the CPU and copied.

    Example:
        >>> is_rng_supported_mesh(mesh)
        True
    """
    return True


def manual_seed(seed: int, device_mesh: Mesh) -> None:
    """Seed the generator of this rank, and count the ranks of the mesh as agreed. Not collective.

    Every rank of the mesh must call it, with the same seed: that is not checked.

    Args:
        seed: The seed.
        device_mesh: The mesh; this rank must be part of it.

    Raises:
        RuntimeError: This rank is not part of the mesh.

    Source: torch.distributed.tensor._random.manual_seed, which does nothing for a CPU mesh.

    Example:
        >>> manual_seed(0, mesh)
        >>> x = rand(4, device_mesh=mesh)
        >>> manual_seed(0, mesh)
        >>> torch.equal(x.full_tensor(), rand(4, device_mesh=mesh, placements=[Shard(0)]).full_tensor())
        True
    """
    if coordinate_of(device_mesh) is None:
        raise RuntimeError(
            f"manual_seed: this rank is not part of the mesh {describe(device_mesh)}: call it on the ranks of the mesh "
            "only (device_mesh.get_coordinate() is not None there)"
        )
    if isinstance(device_mesh, DeviceMesh) and _are_threads():
        _thread.generator = torch.Generator().manual_seed(seed)
        _thread.seed = torch.default_generator.initial_seed()
    else:
        torch.manual_seed(seed)
    _agreed_mesh_ids.add(mesh_id(device_mesh))
    groups = _groups_to_agree(device_mesh)
    if groups:
        _mark_groups(groups)
