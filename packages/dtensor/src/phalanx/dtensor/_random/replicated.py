"""Random ops that need more than the elements of a shard: multinomial, which needs rows; the rest, on every rank."""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.core.random import Kind
from phalanx.dtensor import _fallback
from phalanx.dtensor._compile import is_traced
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._op_plan import bound, flat
from phalanx.dtensor._random.common import empty_local, is_outside, key_for, new_local, read
from phalanx.dtensor._random.distributions import need
from phalanx.dtensor._random.fill import Distribution
from phalanx.dtensor._random.state import draw_key
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.placement_types import Partial, Replicate, split_dim


def multinomial(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Samples of rows of probabilities.

    Without replacement: the largest p / e, e exponential, are a sample (Efraimidis and Spirakis, 2006). With it: the
    first category at which the running sum is above a uniform number.
    """
    p, count, replacement, generator = bound(op, args, kwargs)
    need(op, p.ndim in (1, 2), f"the probabilities must have 1 or 2 dims, not {p.ndim}")
    need(op, p.dtype.is_floating_point, f"the probabilities must be floating-point, not {p.dtype}")
    need(op, count > 0, "cannot sample n_sample <= 0 samples")
    categories = p.shape[-1]
    what = "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
    need(op, replacement or count <= categories, what)
    last = p.ndim - 1
    rows = [Replicate() if one.is_partial() or split_dim(one) == last else one for one in p._spec.placements]
    spec = p._spec.replace(placements=rows)
    out = DTensorSpec(spec.mesh, rows, (*spec.shape[:-1], count), None, torch.int64)
    local = read(p, spec)
    if is_outside(spec):
        key_for(spec.mesh, generator)
        return DTensor._wrap(empty_local(out, local.device), out)
    if not is_traced():
        _check_probabilities(op, p, local)
    if replacement:
        sums = local.double().cumsum(-1)
        draws = new_local(
            out.replace(dtype=torch.float64), Distribution(Kind.UNIFORM, 0.0, 1.0), generator, local.device
        )
        # Below the last sum whatever the rounding: there is a category above it, and one that is not impossible.
        draws = torch.minimum(draws * sums[..., -1:], torch.nextafter(sums[..., -1:], torch.zeros_like(sums[..., -1:])))
        chosen = torch.searchsorted(sums.contiguous(), draws, right=True)
    else:
        flat = spec.replace(shape=spec.shape, dtype=torch.float64)
        clocks = new_local(flat, Distribution(Kind.EXPONENTIAL, 1.0, 0.0), generator, local.device)
        chosen = (local.double() / clocks).topk(count, dim=-1).indices
    return DTensor._wrap(chosen, out)


def _check_probabilities(op: Any, p: Any, local: torch.Tensor) -> None:
    """The checks that torch makes, for the rows of all ranks, so that all ranks raise."""
    sound = bool(((local >= 0) & local.isfinite()).all()) and bool((local.sum(-1) > 0).all())
    spec: DTensorSpec = p._spec
    verdict = DTensorSpec(spec.mesh, (Partial("min"),) * spec.mesh.ndim, (), (), torch.int32)
    whole = plan_redistribute(verdict, _fallback.whole_spec(verdict)).run(
        torch.tensor(int(sound), dtype=torch.int32, device=local.device)
    )
    need(op, bool(whole), "the probabilities must be finite and not negative, and no row may have a sum of 0")


def seeded_fallback(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a random op with every input whole on every rank, from one key: ranks get the same, whatever the mesh.

    Collective. Results are replicated; a tensor that the op writes into keeps its placements.

    Raises:
        RuntimeError: It is called in a compiled function.
    """
    if is_traced():
        raise RuntimeError(
            f"{op}: a compiled function cannot draw these numbers for a DTensor: draw them outside of the function, "
            "and pass the result to it"
        )
    names = [one.name for one in op._schema.arguments]
    values = bound(op, args, kwargs)
    mesh = next(one._spec.mesh for one in flat(values) if isinstance(one, DTensor))
    given = values[names.index("generator")] if "generator" in names else None
    key = draw_key(mesh, given)
    if "generator" in names:
        device = next(one for one in values if isinstance(one, torch.Tensor)).device
        values[names.index("generator")] = torch.Generator(device).manual_seed(key - (1 << 63))
        return _on_every_rank(op, values)
    with torch.random.fork_rng():
        torch.manual_seed(key - (1 << 63))
        return _on_every_rank(op, values)


def _on_every_rank(op: Any, values: list[Any]) -> Any:
    count = sum(not one.kwarg_only for one in op._schema.arguments)
    keyword = {one.name: value for one, value in zip(op._schema.arguments[count:], values[count:], strict=True)}
    return _fallback.replicated(op, values[:count], keyword)
