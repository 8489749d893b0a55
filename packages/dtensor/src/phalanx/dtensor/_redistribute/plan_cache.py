"""Plans from one spec to another, ready to run on this rank, and the cache of them."""

from contextlib import suppress

import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._graph_agreement import Sent
from phalanx.dtensor._mesh import AbstractMesh, Mesh, coordinate_of, describe, mesh_id
from phalanx.dtensor._redistribute.comm import Run, chain, order_of, outside, ranks_of, sent_of
from phalanx.dtensor._redistribute.local_steps import Action, Place, Side, Uneven, action, exchange
from phalanx.dtensor._redistribute.planner import LOCAL, Planner, Step
from phalanx.dtensor._rules.cost import default_model
from phalanx.dtensor._torch_compat import hint, surely_equal
from phalanx.dtensor.placement_types import on_dim, split_dim, without_partial

# Plans that are kept; when there are more, the older half goes.
_MOST_KEPT = 4096
_kept: dict[tuple[DTensorSpec, DTensorSpec], "RedistributePlan"] = {}


class RedistributePlan:
    """How this rank brings the local tensor of one spec to that of another.

    Attributes:
        source: What the local tensors are of.
        target: What they become.
        steps: The steps, in order; the same on every rank.
        cost_us: The estimate of all.
        bytes_moved: Bytes that a rank sends in all, on average.
        run: run(local, async_op=False) gives the local tensor of the target. Collective among the ranks of the meshes.
            It never writes into `local`, and gives `local` itself where its values stay. With async_op=True and a
            collective that needs no local work after it, the result may be an AsyncCollectiveTensor, whose first use
            waits. On a rank outside the target's mesh it is empty; there and outside the source's, `local` is not read.
    """

    __slots__ = ("bytes_moved", "cost_us", "run", "source", "steps", "target")
    run: Run

    def __init__(self, source: DTensorSpec, target: DTensorSpec, steps: tuple[Step, ...], run: Run) -> None:
        self.source = source
        self.target = target
        self.steps = steps
        self.run = run
        self.cost_us = sum(step.cost_us for step in steps)
        self.bytes_moved = sum(step.bytes_per_rank for step in steps)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) or "nothing to do"

    def __repr__(self) -> str:
        steps = ", ".join(step.collective for step in self.steps)
        return f"RedistributePlan({self.source} -> {self.target}: {steps or 'nothing'})"


def plan_redistribute(source: DTensorSpec, target: DTensorSpec) -> RedistributePlan:
    """The cheapest way from one spec to another, whose mesh may be another one. Not collective; the same on every rank.

    The plan is kept for the next call. A ValueError: shapes or dtypes differ, or a Partial cannot be reduced.
    """
    found = _kept.get((source, target))
    return found if found is not None else _make(source, target)


def _make(source: DTensorSpec, target: DTensorSpec) -> RedistributePlan:
    same_shape = source.ndim == target.ndim and all(map(surely_equal, source.shape, target.shape))
    if not same_shape or source.dtype != target.dtype:
        raise ValueError(
            f"redistribute: {source} cannot become {target}: shape and dtype must be the same; reshape or convert the "
            "tensor before or after it"
        )
    if not all(type(size) is int for spec in (source, target) for size in (*spec.shape, *spec.stride)):
        return _make_symbolic(source, target)
    if _on_one_mesh(source, target):
        steps = _planner(source).plan(source.placements, target.placements)
        order = sorted(range(source.ndim), key=lambda dim: -int(source.stride[dim]))
        if steps and order != list(range(source.ndim)):
            run = _in_memory_order(source, target, order)
        else:
            run = _runner(source, steps)
        made = RedistributePlan(source, target, steps, run)
    else:
        made = _across(source, target)
    if len(_kept) >= _MOST_KEPT:
        for key in list(_kept)[: _MOST_KEPT // 2]:
            _kept.pop(key, None)
    return _kept.setdefault((source, target), made)


def _in_memory_order(source: DTensorSpec, target: DTensorSpec, order: list[int]) -> Run:
    """The plan for a tensor whose dims lie in memory in this order, the outermost first: so does what arrives."""
    place = {dim: number for number, dim in enumerate(order)}

    def turned(spec: DTensorSpec) -> DTensorSpec:
        placements = [one if (dim := split_dim(one)) is None else on_dim(one, place[dim]) for one in spec.placements]
        return DTensorSpec(spec.mesh, placements, torch.Size([spec.shape[dim] for dim in order]), None, spec.dtype)

    inner = plan_redistribute(turned(source), turned(target)).run
    back = [place[dim] for dim in range(source.ndim)]

    def run(local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
        if local.ndim != len(order):  # on a rank outside the mesh
            return inner(local, async_op)
        return inner(local.permute(order), async_op).permute(back)

    return run


def _make_symbolic(source: DTensorSpec, target: DTensorSpec) -> RedistributePlan:
    """A plan in a graph with dynamic sizes: for all sizes where no symbol is cut unevenly, else for those of now.

    The steps are those that are cheapest for the sizes that the graph was traced with.
    """
    if _on_one_mesh(source, target):
        steps = _planner(source).plan(source.placements, target.placements)
        with suppress(Uneven):
            return RedistributePlan(source, target, steps, _runner(source, steps))
    # The result of int() becomes a guard.
    fixed = [
        spec.replace(shape=tuple(map(int, spec.shape)), stride=tuple(map(int, spec.stride)))
        for spec in (source, target)
    ]
    made = plan_redistribute(*fixed)
    return RedistributePlan(source, target, made.steps, made.run)


def _on_one_mesh(source: DTensorSpec, target: DTensorSpec) -> bool:
    return source.mesh is target.mesh or mesh_id(source.mesh) == mesh_id(target.mesh)


def _planner(spec: DTensorSpec) -> Planner:
    sizes = tuple(map(hint, spec.shape))
    return Planner(sizes, spec.dtype, spec.mesh.shape, default_model(spec.mesh.shape))


def _runner(spec: DTensorSpec, steps: tuple[Step, ...]) -> Run:
    if coordinate_of(spec.mesh) is None:
        return outside
    return chain(_actions(spec, steps), sent_of(spec.mesh, steps))


def _actions(spec: DTensorSpec, steps: tuple[Step, ...]) -> list[tuple[Action, Mesh | None]]:
    """The work of this rank in steps on the mesh of a spec."""
    mesh, coordinate = spec.mesh, coordinate_of(spec.mesh)
    if coordinate is None or not steps:
        return []
    used = {mesh_dim for step in steps if step.collective not in LOCAL for mesh_dim in step.mesh_dims}
    orders = tuple(
        order_of(mesh, mesh_dim) if mesh_dim in used else tuple(range(size)) for mesh_dim, size in enumerate(mesh.shape)
    )
    place = Place(tuple(spec.shape), spec.dtype, tuple(mesh.shape), coordinate, orders, ranks_of(mesh))
    return [(action(step, place), mesh) for step in steps]


# ---- to another mesh -------------------------------------------------------------------------------------------------


def _across(source: DTensorSpec, target: DTensorSpec) -> RedistributePlan:
    for mesh in (source.mesh, target.mesh):
        if isinstance(mesh, AbstractMesh):
            raise ValueError(
                f"redistribute: from mesh {describe(source.mesh)} to mesh {describe(target.mesh)}: an AbstractMesh has "
                "no ranks, so nothing can be sent to or from it: give both tensors a DeviceMesh"
            )
    given = source.replace(without_partial(source.placements))
    wanted = target.replace(without_partial(target.placements))
    first = _planner(source).plan(source.placements, given.placements)
    last = _planner(target).plan(wanted.placements, target.placements)
    here = Side(source.shape, source.mesh.shape, ranks_of(source.mesh), given.placements)
    there = Side(target.shape, target.mesh.shape, ranks_of(target.mesh), wanted.placements)
    sent = here.bytes_sent(there, source.dtype.itemsize)
    model = default_model((1,))
    cost = model.mesh[0].latency_us * 1.5 + sent / model.mesh[0].bytes_per_us
    middle = Step("move", (), given.placements, wanted.placements, round(sent), cost)
    me = dist.get_rank()
    ranks = {*here.coordinates, *there.coordinates}
    actions = _actions(source, first)
    if me in ranks:
        actions.append((exchange(here, there, me, sorted(ranks)), None))
    actions += _actions(target, last)
    shown = *sent_of(source.mesh, first), Sent("move between meshes", (), "cpu"), *sent_of(target.mesh, last)
    run = chain(actions, shown) if me in ranks else _bystander(len(ranks))
    return RedistributePlan(source, target, (*first, middle, *last), run)


def _bystander(ranks: int) -> Run:
    """On a rank of neither mesh: it comes to the first meeting of the world's group, which all ranks must."""

    def run(local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
        if ranks > 1:
            world = dist.group.WORLD
            assert world is not None
            pc.enable_group(world)
        return outside(local)

    return run
