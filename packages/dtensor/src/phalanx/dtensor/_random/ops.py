"""Random ops on DTensors: every rank makes its own elements of what one process would make, whatever the mesh.

    RANDOM_OPS[op](op, args, kwargs)        # what the op returns; args and kwargs as dispatch got them

Which ops are here, and how what they read and write is placed:

    written into (normal_, uniform_, ...)    any placement. What was there is not read. A Partial gets terms whose
                                             reduction is the value: all of it on the first rank of the mesh dim and
                                             nothing on the others, or, where the reduction allows it, all on each
    read elementwise (dropout, bernoulli(p)) any placement; a Partial is reduced first
    read by rows (multinomial)               the last dim is gathered first
    random_like(x)                           the placements of x, with Replicate for Partial

The other ops with torch.Tag.nondeterministic_seeded that take a tensor go through `seeded_fallback`: poisson, binomial,
_standard_gamma, _sample_dirichlet (their numbers of draws differ from element to element), attention with dropout and
recurrent layers with dropout (composites of one kernel). Every rank computes the whole tensor from one key: always
correct, but expensive. Ops that torch decomposes before they arrive (dropout, alpha_dropout, feature_dropout, rrelu)
arrive as those above. Ops without a tensor (rand, randperm) are never dispatched to a DTensor: `_factories` makes one.
Variants with `out=` are written back by `_fallback`.

In a compiled function keys and values are ops of the graph (`traced`); ops of `seeded_fallback` cannot be there.

Values are exact: on CPU and CUDA, whichever shard they are in, the bits are the same.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import log1p
from typing import Any

import torch

from phalanx.core.random import Kind
from phalanx.dtensor import _fallback
from phalanx.dtensor._compile import is_traced
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import Mesh
from phalanx.dtensor._op_plan import bound, flat, mixed
from phalanx.dtensor._random import distributions, traced
from phalanx.dtensor._random.distributions import need
from phalanx.dtensor._random.fill import Distribution, fill_local
from phalanx.dtensor._random.state import draw_key
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.placement_types import Partial, Replicate, split_dim

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
aten = torch.ops.aten

RANDOM_OPS: dict[Any, Handler] = {}


def _handles(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that is called with the op and every argument of its schema."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            return function(op, *bound(op, args, kwargs))

        RANDOM_OPS.update(dict.fromkeys(ops, run))
        return function

    return register


def _by_name(op: Any, values: Sequence[Any]) -> dict[str, Any]:
    return {one.name: value for one, value in zip(op._schema.arguments, values, strict=True)}


def distributed(op: Any, value: Any) -> Any:
    if not isinstance(value, DTensor):
        raise mixed(
            op,
            value,
            "every tensor among its arguments must be a DTensor; make one with distribute_tensor, or with "
            "DTensor.from_local if every rank has the same values",
        )
    return value


# ---- specs ----------------------------------------------------------------------------------------------------------


def whole_values(spec: DTensorSpec) -> DTensorSpec:
    """The spec with Replicate for Partial."""
    if not spec.is_partial:
        return spec
    return spec.replace(placements=[Replicate() if one.is_partial() else one for one in spec.placements])


def read(value: Any, spec: DTensorSpec | None = None) -> torch.Tensor:
    """The local values of a DTensor, whole ones, placed as another spec says."""
    target = whole_values(value._spec) if spec is None else spec.replace(dtype=value.dtype)
    if target.shape != value.shape:
        target = DTensorSpec(target.mesh, target.placements, value.shape, None, value.dtype)
    return plan_redistribute(value._spec, target).run(value._local_tensor)


def empty_local(spec: DTensorSpec, device: torch.device) -> torch.Tensor:
    """A local tensor of a spec, in the order of its dims."""
    return torch.empty_strided(spec.local_shape, spec.local_stride, dtype=spec.dtype, device=device)


def spec_like(spec: DTensorSpec, dtype: torch.dtype | None, memory_format: torch.memory_format | None) -> DTensorSpec:
    """The spec of a new tensor like that of `spec`, as torch.empty_like chooses dtype and stride."""
    like = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    made = torch.empty_like(like, dtype=dtype, memory_format=memory_format or torch.preserve_format)
    return whole_values(spec).replace(stride=made.stride(), dtype=made.dtype)


# ---- tensors that are filled ----------------------------------------------------------------------------------------

# The terms of the other ranks of a Partial if the first rank has the value.
_NOTHING = {"sum": 0, "bxor": 0, "product": 1}
# Reductions of equal values that give that value.
_ALIKE = ("min", "max", "band", "bor")


def terms(op: Any, spec: DTensorSpec) -> int | None:
    """The term of this rank of a Partial in place of the value; None if the rank has the value itself."""
    coordinate = spec.mesh.get_coordinate() or (0,) * spec.mesh.ndim
    term: int | None = None
    for placement, index in zip(spec.placements, coordinate, strict=True):
        if type(placement) is not Partial or placement.reduce_op in _ALIKE:
            continue
        if placement.reduce_op not in _NOTHING:
            raise RuntimeError(
                f"{op}: a tensor that is {placement!r} cannot be filled, because the terms of the ranks might not "
                "give the exact value: redistribute it to Replicate first"
            )
        if index:
            term = _NOTHING[placement.reduce_op]
    return term


def key_for(mesh: Mesh, generator: torch.Generator | None) -> int | torch.Tensor:
    """The key of one random op; a tensor in a graph that is being made. Collective as `draw_key` is."""
    return traced.key(mesh, generator) if is_traced() else draw_key(mesh, generator)


def new_local(
    spec: DTensorSpec, distribution: Distribution, generator: torch.Generator | None, device: torch.device
) -> torch.Tensor:
    """A new local tensor of a spec, with random elements."""
    key = key_for(spec.mesh, generator)
    if isinstance(key, torch.Tensor) and not is_outside(spec):
        return traced.values(spec, distribution, key, device)
    local = empty_local(spec, device)
    if not isinstance(key, torch.Tensor):
        fill_local(local, spec, distribution, key)
    return local


def is_outside(spec: DTensorSpec) -> bool:
    """Whether this rank is outside the mesh of a spec."""
    return spec.mesh.get_coordinate() is None


def _fill(op: Any, tensor: Any, distribution: Distribution, generator: torch.Generator | None) -> Any:
    """Fill a DTensor that exists."""
    spec: DTensorSpec = tensor._spec
    _fallback.check_writable(op, tensor)
    share, local = terms(op, spec), tensor._local_tensor
    key = key_for(spec.mesh, generator)
    if share is not None:
        local.fill_(share)
    elif not isinstance(key, torch.Tensor):
        fill_local(local, spec, distribution, key)
    elif not is_outside(spec):
        local.copy_(traced.values(spec.replace(dtype=local.dtype), distribution, key, local.device))
    return tensor


# ---- in place -------------------------------------------------------------------------------------------------------

# Called with (op, dtype, the arguments between the tensor and the generator).
_IN_PLACE: dict[Any, Callable[..., Distribution]] = {
    aten.normal_.default: distributions.normal,
    aten.uniform_.default: distributions.uniform,
    aten.random_.default: distributions.whole_numbers,
    aten.random_.to: lambda op, dtype, high: distributions.whole_numbers(op, dtype, None, high),
    getattr(aten.random_, "from"): distributions.whole_numbers,
    aten.bernoulli_.float: distributions.bernoulli,
    aten.exponential_.default: partial(distributions.scaled, Kind.EXPONENTIAL, "lambda"),
    aten.cauchy_.default: partial(distributions.scaled, Kind.CAUCHY, "sigma"),
    aten.log_normal_.default: partial(distributions.scaled, Kind.LOG_NORMAL, "std"),
}


@_handles(*_IN_PLACE)
def _in_place(op: Any, tensor: Any, *rest: Any) -> Any:
    *given, generator = rest
    return _fill(op, tensor, _IN_PLACE[op](op, tensor.dtype, *given), generator)


def _put(op: Any, tensor: Any, make: Callable[[DTensorSpec], torch.Tensor]) -> Any:
    """Fill a DTensor that exists with values that are made elsewhere."""
    spec: DTensorSpec = tensor._spec
    _fallback.check_writable(op, tensor)
    share = terms(op, spec)
    values = make(whole_values(spec))
    if share is None:
        tensor._local_tensor.copy_(values)
    else:
        tensor._local_tensor.fill_(share)
    return tensor


@_handles(aten.geometric_.default)
def _geometric_(op: Any, tensor: Any, p: float, generator: torch.Generator | None) -> Any:
    need(op, 0 < p < 1, f"expects p to be in (0, 1), but got p={p}")

    def make(spec: DTensorSpec) -> torch.Tensor:
        # The first success is in the trial in which an exponential clock of that rate strikes.
        distribution, wide = Distribution(Kind.EXPONENTIAL, -log1p(-p), 0.0), spec.replace(dtype=torch.float64)
        return new_local(wide, distribution, generator, tensor._local_tensor.device).ceil_()

    return _put(op, tensor, make)


@_handles(aten.bernoulli_.Tensor)
def _bernoulli_tensor_(op: Any, tensor: Any, p: Any, generator: torch.Generator | None) -> Any:
    return _put(op, tensor, lambda spec: _of_probabilities(op, _broadcast(op, p, spec), spec, generator))


# ---- new tensors ----------------------------------------------------------------------------------------------------


def _whole_number_like(op: Any, dtype: torch.dtype, given: dict[str, Any]) -> Distribution:
    high = int(given["high"].item()) if isinstance(given["high"], torch.Tensor) else given["high"]
    return distributions.whole_numbers(op, dtype, given.get("low", 0), high)


# Called with (op, dtype of the result, arguments by name).
_LIKE: dict[Any, Callable[[Any, torch.dtype, dict[str, Any]], Distribution]] = {
    aten.rand_like: lambda op, dtype, given: distributions.uniform(op, dtype, 0.0, 1.0),
    aten.randn_like: lambda op, dtype, given: distributions.normal(op, dtype, 0.0, 1.0),
    aten.randint_like: _whole_number_like,
    aten.bernoulli: lambda op, dtype, given: distributions.bernoulli(op, dtype, given["p"]),
}


@_handles(
    aten.rand_like.default,
    aten.rand_like.generator,
    aten.randn_like.default,
    aten.randn_like.generator,
    aten.randint_like.default,
    aten.randint_like.generator,
    aten.randint_like.low_dtype,
    aten.randint_like.low_generator_dtype,
    aten.randint_like.Tensor,
    aten.randint_like.Tensor_generator,
    aten.bernoulli.p,
)
def _like(op: Any, *values: Any) -> Any:
    given = _by_name(op, values)
    like = distributed(op, given["self"])
    spec = spec_like(like._spec, given.get("dtype"), given.get("memory_format"))
    distribution = _LIKE[op._overloadpacket](op, spec.dtype, given)
    device = given.get("device") or like._local_tensor.device
    return DTensor._wrap(new_local(spec, distribution, given.get("generator"), device), spec)


def _of_probabilities(op: Any, p: torch.Tensor, spec: DTensorSpec, generator: torch.Generator | None) -> torch.Tensor:
    """Local zeros and ones of the dtype of a spec; p is local, too."""
    draws = new_local(spec.replace(dtype=torch.float64), Distribution(Kind.UNIFORM, 0.0, 1.0), generator, p.device)
    return torch.lt(draws, p).to(spec.dtype)


def _broadcast(op: Any, value: Any, spec: DTensorSpec) -> torch.Tensor:
    """The local values of a DTensor, or of a number, that is broadcast to the shape of a spec."""
    if value.ndim == 0 and not isinstance(value, DTensor):
        plain: torch.Tensor = value
        return plain
    value = distributed(op, value)
    return read(value if value.shape == spec.shape else value.expand(spec.shape), spec)


@_handles(aten.bernoulli.default, aten.bernoulli.Tensor)
def _bernoulli_of(op: Any, *values: Any) -> Any:
    *tensors, generator = values
    spec = spec_like(distributed(op, tensors[0])._spec, None, None)
    return DTensor._wrap(_of_probabilities(op, _broadcast(op, tensors[-1], spec), spec, generator), spec)


@_handles(aten.normal.float_Tensor, aten.normal.Tensor_float, aten.normal.Tensor_Tensor)
def _normal_of(op: Any, mean: Any, std: Any, generator: torch.Generator | None) -> Any:
    tensors: list[Any] = [one for one in (mean, std) if isinstance(one, torch.Tensor)]
    if len(tensors) == 2 and tensors[0].shape != tensors[1].shape:
        tensors = list(torch.broadcast_tensors(*[distributed(op, one) for one in tensors]))  # type: ignore[no-untyped-call]
        mean, std = tensors
    spec = whole_values(distributed(op, tensors[0])._spec)
    need(
        op, spec.dtype.is_floating_point or spec.dtype.is_complex, f"the dtype must be floating-point, not {spec.dtype}"
    )
    if len(tensors) == 1 and std is not tensors[0]:
        need(op, std >= 0, f"expects std >= 0.0, but found std {std}")
    mean, std = [read(distributed(op, one), spec) if isinstance(one, torch.Tensor) else one for one in (mean, std)]
    spec = spec.replace(shape=spec.shape)  # without gaps, whatever the stride of what is read
    drawn = new_local(spec, Distribution(Kind.NORMAL, 0.0, 1.0), generator, tensors[0]._local_tensor.device)
    # Two steps: a fused one would round differently where the processor has it.
    return DTensor._wrap(drawn.mul_(std).add_(mean), spec)


@_handles(aten.native_dropout.default, aten._fused_dropout.default)
def _dropout(op: Any, x: Any, p: float, last: Any) -> Any:
    """(input, p, train), or (input, the probability to keep, generator) with a mask of bytes."""
    is_fused = op is aten._fused_dropout.default
    spec = whole_values(x._spec).replace(shape=x.shape, dtype=torch.bool)
    device = x._local_tensor.device
    if not is_fused and last is False:
        ones = empty_local(spec, device).fill_(True)
        return DTensor._wrap(x._local_tensor.clone(), x._spec), DTensor._wrap(ones, spec)
    keep = p if is_fused else 1.0 - p
    need(op, 0 <= keep <= 1, f"dropout probability has to be between 0 and 1, but got {1 - keep}")
    mask = new_local(spec, Distribution(Kind.BERNOULLI, keep, 0.0), last if is_fused else None, device)
    out = DTensor._wrap(read(x).mul(mask).mul_(0.0 if keep == 0 else 1.0 / keep), whole_values(x._spec))
    kind = torch.uint8 if is_fused else torch.bool
    return out, DTensor._wrap(mask.to(kind), spec.replace(dtype=kind))


@_handles(aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default)
def _rrelu_with_noise(
    op: Any, x: Any, noise: Any, lower: Any, upper: Any, training: bool, generator: torch.Generator | None
) -> Any:
    lower, upper = float(lower), float(upper)
    written = op is aten.rrelu_with_noise_.default
    if written and x._spec.is_partial:
        raise RuntimeError(f"{op}: an op cannot write into a Partial tensor: redistribute it to Replicate first")
    spec = whole_values(x._spec)
    local = read(x)
    if training:
        slopes = new_local(spec, distributions.uniform(op, spec.dtype, lower, upper), generator, local.device)
        slopes = torch.where(local <= 0, slopes, torch.ones((), dtype=slopes.dtype, device=slopes.device))
        made = local * slopes
        noise = distributed(op, noise)
        target: DTensorSpec = noise._spec
        noise._local_tensor.copy_(plan_redistribute(spec, target.replace(dtype=spec.dtype)).run(slopes))
    else:
        made = torch.nn.functional.leaky_relu(local, (lower + upper) / 2)
    if written:
        x._local_tensor.copy_(made)
        return x
    return DTensor._wrap(made, spec)


# ---- ops that need more than the elements of a shard -----------------------------------------------------------------


@_handles(aten.multinomial.default)
def _multinomial(op: Any, p: Any, count: int, replacement: bool, generator: torch.Generator | None) -> Any:
    """Samples of rows of probabilities.

    Without replacement: the largest p / e, e exponential, are a sample (Efraimidis and Spirakis, 2006). With it: the
    first category at which the running sum is above a uniform number.
    """
    need(op, p.ndim in (1, 2), f"the probabilities must have 1 or 2 dims, not {p.ndim}")
    need(op, p.dtype.is_floating_point, f"the probabilities must be floating-point, not {p.dtype}")
    need(op, count > 0, "cannot sample n_sample <= 0 samples")
    what = "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
    need(op, replacement or count <= p.shape[-1], what)
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
        wide = out.replace(dtype=torch.float64)
        draws = new_local(wide, Distribution(Kind.UNIFORM, 0.0, 1.0), generator, local.device)
        # Below the last sum whatever the rounding: there is a category above it, and one that is not impossible.
        draws = torch.minimum(draws * sums[..., -1:], torch.nextafter(sums[..., -1:], torch.zeros_like(sums[..., -1:])))
        chosen = torch.searchsorted(sums.contiguous(), draws, right=True)
    else:
        wide = spec.replace(shape=spec.shape, dtype=torch.float64)
        clocks = new_local(wide, Distribution(Kind.EXPONENTIAL, 1.0, 0.0), generator, local.device)
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


@_handles(aten.poisson.default, aten.binomial.default, aten._standard_gamma.default, aten._sample_dirichlet.default)
def seeded_fallback(op: Any, *values: Any) -> Any:
    """Run a random op with every input whole on every rank, from one key: ranks get the same, whatever the mesh.

    Collective. Results are replicated; a tensor that the op writes into keeps its placements.
    """
    if is_traced():
        raise RuntimeError(
            f"{op}: a compiled function cannot draw these numbers for a DTensor: draw them outside of the function, "
            "and pass the result to it"
        )
    given = _by_name(op, values)
    mesh = next(one._spec.mesh for one in flat(values) if isinstance(one, DTensor))
    seed = draw_key(mesh, given.get("generator")) - (1 << 63)
    if "generator" in given:
        device = next(one for one in values if isinstance(one, torch.Tensor)).device
        given["generator"] = torch.Generator(device).manual_seed(seed)
        return _fallback.replicated(op, (), given)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _fallback.replicated(op, (), given)
