"""parallelize_module: apply styles to the modules that a plan names. The semantics are those of torch 2.13."""

import warnings
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn

from phalanx.dtensor._mesh import Mesh, describe, mesh_id
from phalanx.dtensor._torch_compat import current_mesh
from phalanx.dtensor.parallel import _input_cache
from phalanx.dtensor.parallel.style import ParallelStyle

__all__ = ["parallelize_module"]


def parallelize_module(
    module: nn.Module,
    device_mesh: Mesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Shard a module over the ranks of a mesh as a plan says. Collective over the mesh.

    Args:
        module: The module; changed in place.
        device_mesh: A mesh of one dim; by default that of the enclosing `with mesh:`. Take one dim of a larger mesh by
            its name: mesh["tp"].
        parallelize_plan: A style for the module itself; or styles by the names of submodules, each part of a name a
            pattern of fnmatch ("layers.*.mlp.up"), and "" for the module itself.
        src_data_rank: The rank of the mesh whose parameters are used. None uses the parameters that each rank has,
            without communication: they must be the same.

    Returns:
        The module.

    Raises:
        TypeError: The plan, or an entry of it, has another type.
        ValueError: The mesh has several dims.
        RuntimeError: There is no mesh.
        NotImplementedError: A style is not for a module that the plan gives it to.

    Source: torch.distributed.tensor.parallel.parallelize_module.

    Example:
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> mlp = parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        >>> mlp[0].weight.placements, mlp[2].weight.placements
        ((Shard(dim=0),), (Shard(dim=1),))
    """
    mesh = current_mesh("parallelize_module") if device_mesh is None else device_mesh
    mesh_id(mesh)  # refuses a value that is not a mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"parallelize_module: the mesh must have one dim, and {describe(mesh)} has {mesh.ndim}: take one by its "
            'name, as in mesh["tp"]'
        )
    if parallelize_plan is None:
        warnings.warn("parallelize_module: no parallelize_plan was given, so nothing is done", stacklevel=2)
        return module
    _check(parallelize_plan)
    _apply(module, mesh, parallelize_plan, src_data_rank)
    if not isinstance(parallelize_plan, ParallelStyle):
        # Modules within this one share conversions of inputs in a forward, and nothing is kept after it.
        module.register_forward_pre_hook(_input_cache.begin_forward)
        module.register_forward_hook(_input_cache.end_forward, always_call=True)
    return module


def _check(plan: Any) -> None:
    if isinstance(plan, ParallelStyle):
        return
    if not isinstance(plan, Mapping):
        raise TypeError(
            "parallelize_module: parallelize_plan must be a ParallelStyle or a dict of them by module name, not "
            f"{type(plan).__module__}.{type(plan).__name__}: {_HINT}"
        )
    for name, style in plan.items():
        if not isinstance(name, str) or not isinstance(style, ParallelStyle):
            raise TypeError(
                f"parallelize_module: the entry {name!r} of parallelize_plan must be a ParallelStyle under a name, not "
                f"{type(style).__module__}.{type(style).__name__}: {_HINT}"
            )


_HINT = (
    "write {'mlp.up': ColwiseParallel()} with the styles of phalanx.dtensor.parallel, since torch's make torch's "
    "DTensors"
)


def _apply(
    module: nn.Module, mesh: Mesh, plan: ParallelStyle | Mapping[str, ParallelStyle], source: int | None
) -> None:
    if isinstance(plan, ParallelStyle):
        plan.src_data_rank = source
        plan._apply(module, mesh)
        return
    for name, style in plan.items():
        found = [module] if name == "" else _matching(module, name)
        if not found:
            warnings.warn(
                f"parallelize_module: no submodule of {type(module).__name__} matches {name!r} of the plan, so "
                f"the entry is ignored; its children are {[child for child, _ in module.named_children()]}",
                stacklevel=3,
            )
        for one in found:
            _apply(one, mesh, style, source)


def _matching(module: nn.Module, name: str) -> list[nn.Module]:
    """The submodules that a name matches, part by part."""
    found = [module]
    for part in name.split("."):
        found = [child for one in found for key, child in one.named_children() if fnmatch(key, part)]
    return found
