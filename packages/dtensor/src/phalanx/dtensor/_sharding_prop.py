"""From a call of an op to its OpPlan: the rule, the choice by cost, what moves, and what the results are.

The order in which a call is looked at:

1. handlers: ops that do not depend on values alone (random, item, equal), lists (foreach, fused optimizers);
2. a rule, and the cheapest of its strategies; an algorithm of our own where that costs less than to bring the inputs
   together;
3. a decomposition into ops that have rules;
4. the fallback: every rank works on the whole, with a warning.
"""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor import _custom_handlers, _fallback, _mode, _tensor_meta
from phalanx.dtensor._dtensor_spec import DTensorSpec, TensorMeta
from phalanx.dtensor._index_bounds import bounds_of
from phalanx.dtensor._mesh import Mesh, coordinate_of, describe, mesh_id
from phalanx.dtensor._op_plan import VIEW, Move, OpPlan, RulePlan, bound, is_list, mixed, viewed, written_arguments
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor._rules import tables as _tables  # noqa: F401  (fills the registry)
from phalanx.dtensor._rules.constraints import Aligned, AllOne, EachHas, Even
from phalanx.dtensor._rules.cost import Choice, choose, default_model
from phalanx.dtensor._rules.local_adjustments import LocalWork, local_work
from phalanx.dtensor._rules.registry import Match, find
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import bare, in_decomposition, is_torch_dtensor
from phalanx.dtensor.placement_types import AnyPlacement, Placement, Replicate, Shard, SizedShard, StridedShard, on_dim

_WHOLE = Replicate()


def plan(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> OpPlan:
    """The OpPlan of a call, with at least one DTensor among its arguments."""
    handler = _custom_handlers.find(op)
    if handler is not None:
        return OpPlan(handler, text="handled by itself")
    values = bound(op, args, kwargs)
    leaves = tensor_leaves(values)
    mesh = common_mesh(op, leaves)
    specs = [spec_of(op, leaf, mesh) for _, _, leaf in leaves]
    found = by_rule(op, values, leaves, specs, mesh)
    if found is not None:
        return found
    algorithm = _custom_handlers.algorithm(op, None, (), values)
    if algorithm is not None:
        return OpPlan(algorithm, text="an algorithm of its own")
    _tensor_meta.refuse(op, values, specs)
    return _fallback.plan(op)


# ---- what goes in ---------------------------------------------------------------------------------------------------

Leaf = tuple[int, int | None, torch.Tensor]
"""(argument, place in it if it is a list, tensor)."""


def tensor_leaves(values: Sequence[Any]) -> list[Leaf]:
    """The tensors among the arguments of an op, as rules count them."""
    found: list[Leaf] = []
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            found.append((index, None, value))
        elif is_list(value):
            found += [(index, place, one) for place, one in enumerate(value) if isinstance(one, torch.Tensor)]
    return found


def common_mesh(op: Any, leaves: Sequence[Leaf]) -> Mesh:
    """The mesh of all DTensors among the arguments."""
    mesh, *others = (tensor._spec.mesh for _, _, tensor in leaves if isinstance(tensor, DTensor))
    for other in others:
        if other is not mesh and mesh_id(other) != mesh_id(mesh):
            raise RuntimeError(
                f"{op}: its arguments are on two meshes, {describe(mesh)} and {describe(other)}: move one to the "
                "other mesh with redistribute(mesh, placements)"
            )
    return mesh


def spec_of(op: Any, tensor: torch.Tensor, mesh: Mesh) -> DTensorSpec:
    """The spec of an argument. A plain tensor of one element counts as replicated, as in torch; others are refused."""
    if isinstance(tensor, DTensor):
        return tensor._spec
    # Tensors that torch makes from shapes while it decomposes an op are the same on all ranks.
    accepted = tensor.numel() == 1 or _mode.replicates() or in_decomposition()
    if not accepted or is_torch_dtensor(tensor):
        raise mixed(
            op,
            tensor,
            f"mixed torch.Tensor and DTensor; the plain tensor has shape {tuple(tensor.shape)}. Write "
            "distribute_tensor(tensor, mesh, placements), or DTensor.from_local(tensor, mesh) if every rank has the "
            "same values, or call it under implicit_replication()",
        )
    return DTensorSpec(mesh, (_WHOLE,) * mesh.ndim, tensor.shape, tensor.stride(), tensor.dtype)


# ---- by a rule ------------------------------------------------------------------------------------------------------


def by_rule(
    op: Any, values: Sequence[Any], leaves: Sequence[Leaf], specs: Sequence[DTensorSpec], mesh: Mesh
) -> OpPlan | None:
    """The OpPlan that the op's rule gives, or None: it has none for this call."""
    match = find(op, values)
    if match is None:
        return None
    try:
        choice, special = chosen(match, specs, mesh)
    except ValueError:
        if match.in_place:
            return OpPlan(_fallback.write_back, text=f"{match.rule.text}, out of place and written back")
        raise
    shown = _tensor_meta.results(op, values, specs)
    if shown is None:
        return None
    tensors, shape = shown
    if len(tensors) != len(choice.outputs) or not _has_dims(match, tensors):
        return None
    moves = moves_of(leaves, specs, choice, special)
    algorithm = _custom_handlers.algorithm(op, choice, moves, values)
    if algorithm is not None:
        return OpPlan(algorithm, text=f"an algorithm of its own instead of '{match.rule.text}'")
    outputs = tuple(
        DTensorSpec(mesh, renamed(placements, choice, special), one.shape, one.stride, one.dtype)
        for placements, one in zip(choice.outputs, tensors, strict=True)
    )
    coordinate = coordinate_of(mesh)
    work = None
    if coordinate is not None:
        sizes = [tuple(one.shape) for one in tensors]
        work = local_work(match.rule, choice.strategies, match.facts, sizes, tuple(mesh.shape), coordinate)
        if any(special):
            known = dict(match.rule.size_args)
            changed = tuple(
                (argument, list(outputs[known[argument]].local_shape) if argument in known else value)
                for argument, value in work.sizes
            )
            work = LocalWork(changed, work.scales, work.fills, tuple(tuple(one.local_shape) for one in outputs))
    moved = {(move.argument, move.place): move.plan.target for move in moves}
    used = [moved.get((leaf[0], leaf[1]), spec) for leaf, spec in zip(leaves, specs, strict=True)]
    bounds = bounds_of(op, values, leaves, specs, [*used, *outputs])
    made = RulePlan(op, moves, work, outputs, shape, match.rule.text, bounds)
    make_direct(op, made, values)
    return made


def _has_dims(match: Match, tensors: Sequence[TensorMeta]) -> bool:
    """Whether what comes out has as many dims as the rule says: some kernels return another rank for empty inputs."""
    return all(
        dims is None or len(dims) == len(one.shape) for dims, one in zip(match.expanded.outputs, tensors, strict=True)
    )


def make_direct(op: Any, made: RulePlan, values: Sequence[Any]) -> None:
    """Say in the plan what is called and what comes out, if the op on the local tensors is all there is to do."""
    work = made.work
    if made.moves or made.bounds or made.shape is None or work is None or work.scales or work.fills:
        return
    if any(
        one.kwarg_only and isinstance(value, torch.Tensor)
        for one, value in zip(op._schema.arguments, values, strict=True)
    ):
        return
    kind, entries = made.shape
    written = written_arguments(op)
    if written == (0,) and kind is None and made.returned == (0,):
        made.in_place = True
    elif written:
        return
    elif kind is None and entries == (0,):
        made.direct = made.specs[0]
    elif kind is not None:
        made.several = kind, tuple(None if entry is None else made.specs[entry] for entry in entries)
    else:
        return
    made.sizes = work.sizes
    made.call = viewed if op is VIEW else bare(op)


def moves_of(
    leaves: Sequence[Leaf], specs: Sequence[DTensorSpec], choice: Choice, special: Sequence[AnyPlacement | None]
) -> tuple[Move, ...]:
    """The inputs that are redistributed before the op."""
    moves: list[Move] = []
    for (argument, place, _), spec, wanted in zip(leaves, specs, choice.inputs, strict=True):
        kept = tuple(now if one is None else one for now, one in zip(spec.placements, wanted, strict=True))
        target = renamed(kept, choice, special)
        if target != spec.placements:
            moves.append(Move(argument, place, plan_redistribute(spec, spec.replace(placements=target))))
    return tuple(moves)


# ---- shards of other sizes ------------------------------------------------------------------------------------------
#
# Rules know Shard alone. Where all that a strategy cuts on a mesh dim may be cut in another way as well (no chunk
# arithmetic in it), Shard there stands for the SizedShard or StridedShard that the inputs have.


def chosen(match: Match, specs: Sequence[DTensorSpec], mesh: Mesh) -> tuple[Choice, tuple[AnyPlacement | None, ...]]:
    """The cheapest strategies, and for each mesh dim the placement that Shard stands for, or None: itself."""
    model = default_model(tuple(mesh.shape))
    special = special_of(specs, mesh)
    if any(special):
        sources = [tuple(map(_as_shard, spec.placements, special)) for spec in specs]
        choice = choose(match, sources, model)
        used = tuple(kind if _is_kept(choice, index, sources) else None for index, kind in enumerate(special))
        if all(
            (kind is None) == (keep is None) or choice.strategies[index].factor is None
            for index, (kind, keep) in enumerate(zip(special, used, strict=True))
        ):
            return choice, used
    return choose(match, [spec.placements for spec in specs], model), (None,) * mesh.ndim


def special_of(specs: Sequence[DTensorSpec], mesh: Mesh) -> tuple[AnyPlacement | None, ...]:
    """For each mesh dim the one way other than Shard in which inputs are cut, or None."""
    found: list[AnyPlacement | None] = []
    for mesh_dim in range(mesh.ndim):
        kinds = {
            on_dim(spec.placements[mesh_dim], 0)
            for spec in specs
            if type(spec.placements[mesh_dim]) in (SizedShard, StridedShard)
        }
        found.append(kinds.pop() if len(kinds) == 1 else None)
    return tuple(found)


# Stands for a Shard among inputs that are cut in another way: equal to nothing that a strategy wants.
_OTHER_CUT = 1 << 30


def _as_shard(placement: AnyPlacement, special: AnyPlacement | None) -> AnyPlacement:
    if special is None:
        return placement
    if isinstance(placement, Shard):
        return StridedShard(placement.dim, _OTHER_CUT)
    if isinstance(placement, (SizedShard, StridedShard)) and on_dim(placement, 0) == special:
        return Shard(placement.dim)
    return placement


def _is_kept(choice: Choice, mesh_dim: int, sources: Sequence[Sequence[AnyPlacement]]) -> bool:
    """Whether a strategy cuts just what the inputs have cut in the other way, without chunk arithmetic."""
    strategy = choice.strategies[mesh_dim]
    if strategy.factor is None or strategy.scale or strategy.fill:
        return False
    if any(isinstance(one, (Aligned, AllOne, EachHas, Even)) for one in strategy.conditions):
        return False
    return any(
        isinstance(wanted, Shard) and own[mesh_dim] == wanted
        for wanted, own in zip(strategy.inputs, sources, strict=True)
    )


def renamed(
    placements: Sequence[Placement], choice: Choice, special: Sequence[AnyPlacement | None]
) -> tuple[AnyPlacement, ...]:
    """Placements with what Shard stands for."""
    return tuple(
        on_dim(kind, one.dim) if kind is not None and type(one) is Shard else one  # type: ignore[misc]
        for one, kind in zip(placements, special, strict=True)
    )
