"""Random ops on DTensors: every rank makes its own elements of what one process would make, whatever the mesh.

    RANDOM_OPS[op](op, args, kwargs)        # what the op returns; args and kwargs as dispatch got them

Which ops are here, and how what they read and write is placed:

    written into (normal_, uniform_, ...)    any placement. What was there is not read. A Partial gets terms whose
                                             reduction is the value: all of it on the first rank of the mesh dim and
                                             nothing on the others, or, where the reduction allows it, all on each
    read elementwise (dropout, bernoulli(p)) any placement; a Partial is reduced first
    read by rows (multinomial)               the last dim is brought together first
    random_like(x)                           the placements of x, with Replicate for Partial

The other ops with torch.Tag.nondeterministic_seeded that take a tensor go through `seeded_fallback`: poisson, binomial,
_standard_gamma, _sample_dirichlet (their numbers of draws differ from element to element), attention with dropout and
recurrent layers with dropout (composites of one kernel). Every rank computes the whole from one key, which is right, and
dear. Ops that torch decomposes before they arrive (dropout, alpha_dropout, feature_dropout, rrelu) arrive as those
above. Those without a tensor (rand, randperm) are never asked of a DTensor: factories.py has what makes one. Variants
with `out=` are written back by dispatch.

Values are exact: on CPU and CUDA, whichever shard they are in, the bits are the same.
"""

from collections.abc import Callable, Sequence
from math import isfinite, log1p
from typing import Any

import torch

from phalanx.core.random import Kind
from phalanx.dtensor import api, fallback
from phalanx.dtensor.filling import Law, fill_local, integers
from phalanx.dtensor.placements import Partial, Replicate, split_dim
from phalanx.dtensor.plan import bound, call_bound
from phalanx.dtensor.random import draw_key, key_of
from phalanx.dtensor.redistribute import transfer
from phalanx.dtensor.spec import Spec

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
aten = torch.ops.aten

RANDOM_OPS: dict[Any, Handler] = {}


def _handles(*ops: Any) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        RANDOM_OPS.update(dict.fromkeys(ops, function))
        return function

    return register


def _arguments(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument by its name."""
    return {one.name: value for one, value in zip(op._schema.arguments, bound(op, args, kwargs), strict=True)}


def _distributed(op: Any, value: Any) -> Any:
    if not isinstance(value, api.DTensor):
        raise RuntimeError(
            f"{op}: got mixed distributed and non-distributed tensors: every tensor among its arguments must be a "
            "DTensor; make one with distribute_tensor, or with DTensor.from_local of what ranks have alike"
        )
    return value


# ---- specs ----------------------------------------------------------------------------------------------------------


def _whole_values(spec: Spec) -> Spec:
    """The spec with Replicate for Partial."""
    if not spec.is_partial:
        return spec
    return spec.replace(placements=[Replicate() if one.is_partial() else one for one in spec.placements])


def _read(value: Any, spec: Spec | None = None) -> torch.Tensor:
    """The local values of a DTensor, whole ones, placed as another spec says."""
    target = _whole_values(value._spec) if spec is None else spec.replace(dtype=value.dtype)
    if target.shape != value.shape:
        target = Spec(target.mesh, target.placements, value.shape, None, value.dtype)
    return transfer(value._spec, target).run(value._local_tensor)


def _empty(spec: Spec, device: torch.device) -> torch.Tensor:
    """A local tensor of a spec, in the order of its dims."""
    return torch.empty_strided(spec.local_shape, spec.local_stride, dtype=spec.dtype, device=device)


def _spec_like(spec: Spec, dtype: torch.dtype | None, memory_format: torch.memory_format | None) -> Spec:
    """The spec of a new tensor like that of `spec`, as torch.empty_like chooses dtype and stride."""
    like = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    made = torch.empty_like(like, dtype=dtype, memory_format=memory_format or torch.preserve_format)
    return _whole_values(spec).replace(stride=made.stride(), dtype=made.dtype)


# ---- tensors that are filled ----------------------------------------------------------------------------------------

# What a Partial's other ranks have when the first one has the value.
_NOTHING = {"sum": 0, "bxor": 0, "product": 1}
# Reductions of equal values that give that value.
_ALIKE = ("min", "max", "band", "bor")


def _fill(op: Any, tensor: Any, law: Law, generator: torch.Generator | None) -> Any:
    """Fill a DTensor that exists."""
    spec: Spec = tensor._spec
    fallback.check_writable(op, tensor)
    terms = _terms(op, spec)
    key = draw_key(spec.mesh, generator)
    if terms is None:
        fill_local(tensor._local_tensor, spec, law, key)
    else:
        tensor._local_tensor.fill_(terms)
    return tensor


def _terms(op: Any, spec: Spec) -> int | None:
    """What this rank has of a Partial in the place of the value; None if it has the value itself."""
    coordinate = spec.mesh.get_coordinate() or (0,) * spec.mesh.ndim
    terms: list[int] = []
    for placement, index in zip(spec.placements, coordinate, strict=True):
        if type(placement) is not Partial or placement.reduce_op in _ALIKE:
            continue
        if placement.reduce_op not in _NOTHING:
            raise RuntimeError(
                f"{op}: a tensor that is {placement!r} cannot be filled, since no terms are sure to give the value "
                "exactly: redistribute it to Replicate first"
            )
        if index:
            terms.append(_NOTHING[placement.reduce_op])
    return terms[-1] if terms else None


def _random(op: Any, spec: Spec, law: Law, generator: torch.Generator | None, device: torch.device) -> torch.Tensor:
    """A new local tensor of a spec, with random elements."""
    local = _empty(spec, device)
    fill_local(local, spec, law, draw_key(spec.mesh, generator))
    return local


# ---- laws -----------------------------------------------------------------------------------------------------------


def _uniform(op: Any, dtype: torch.dtype, low: float, high: float) -> Law:
    _need(op, dtype.is_floating_point, f"the tensor must have a floating-point dtype, not {dtype}")
    limits = torch.finfo(dtype)
    _need(
        op,
        limits.min <= low <= high <= limits.max and high - low <= limits.max,
        f"from={low} and to={high} must be numbers of {dtype}, from <= to, and to - from too",
    )
    return Law(Kind.UNIFORM, low, high)


def _normal(op: Any, dtype: torch.dtype, mean: float, std: float) -> Law:
    _need(op, dtype.is_floating_point or dtype.is_complex, f"the dtype must be floating-point or complex, not {dtype}")
    _need(op, std >= 0, f"expects std >= 0.0, but found std {std}")
    return Law(Kind.NORMAL, mean, std)


def _bernoulli(op: Any, dtype: torch.dtype, p: float) -> Law:
    _need(op, 0 <= p <= 1, f"expects p to be in [0, 1], but got p={p}")
    return Law(Kind.BERNOULLI, p, 0.0)


_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _whole_range(dtype: torch.dtype) -> tuple[int, int]:
    """The smallest and the largest integer that random_ without arguments may give, for `from` and for `to`."""
    if dtype == torch.bool:
        return 0, 1
    if dtype in _DIGITS:
        return -(1 << _DIGITS[dtype]), 1 << _DIGITS[dtype]
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _integers(op: Any, dtype: torch.dtype, low: int | None, high: int | None) -> Law:
    """random_: [low, high), or up to the largest integer of the dtype; from 0 on if there is no low."""
    _need(op, dtype in _DIGITS or not (dtype.is_complex or dtype.is_floating_point), f"not implemented for {dtype}")
    least, most = _whole_range(dtype)
    first = 0 if low is None else low
    last = most if high is None else high - 1
    _need(op, first <= last, f"expects 'from' to be less than 'to', but got from={first} >= to={last + 1}")
    if dtype in _DIGITS:
        most = int(torch.finfo(dtype).max)
        least = -most
        _need(op, least <= first and last <= most, f"from={first} or to={last + 1} is out of bounds for {dtype}")
        first, last = _inward(first, _DIGITS[dtype], up=True), _inward(last, _DIGITS[dtype], up=False)
    else:
        _need(op, least <= first and last <= most, f"from={first} or to - 1={last} is out of bounds for {dtype}")
    return integers(first, max(last - first, 0) + 1)


def _inward(value: int, digits: int, *, up: bool) -> int:
    """The next integer that a float of so many digits has: rounding then never leaves the range."""
    extra = max(abs(value).bit_length() - digits, 0)
    return -(-value >> extra << extra) if up else value >> extra << extra


def _need(op: Any, truth: bool, what: str) -> None:
    if not truth:
        name = op._schema.name.split("::")[1]
        raise RuntimeError(f"{name}: {what}")


# ---- in place -------------------------------------------------------------------------------------------------------


@_handles(aten.normal_.default)
def _normal_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, mean, std, generator = bound(op, args, kwargs)
    return _fill(op, tensor, _normal(op, tensor.dtype, mean, std), generator)


@_handles(aten.uniform_.default)
def _uniform_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, low, high, generator = bound(op, args, kwargs)
    return _fill(op, tensor, _uniform(op, tensor.dtype, low, high), generator)


@_handles(aten.random_.default, aten.random_.to, getattr(aten.random_, "from"))
def _random_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = _arguments(op, args, kwargs)
    tensor = given["self"]
    return _fill(op, tensor, _integers(op, tensor.dtype, given.get("from"), given.get("to")), given["generator"])


@_handles(aten.bernoulli_.float)
def _bernoulli_float_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, p, generator = bound(op, args, kwargs)
    return _fill(op, tensor, _bernoulli(op, tensor.dtype, p), generator)


@_handles(aten.exponential_.default)
def _exponential_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, rate, generator = bound(op, args, kwargs)
    _need(op, rate > 0, f"expects lambda > 0.0, but found lambda={rate}")
    _need(op, tensor.dtype.is_floating_point, f"only supports floating-point dtypes, not {tensor.dtype}")
    return _fill(op, tensor, Law(Kind.EXPONENTIAL, rate, 0.0), generator)


@_handles(aten.cauchy_.default)
def _cauchy_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, median, scale, generator = bound(op, args, kwargs)
    _need(op, scale > 0, f"expects sigma > 0.0, but found sigma={scale}")
    _need(op, tensor.dtype.is_floating_point, f"only supports floating-point dtypes, not {tensor.dtype}")
    return _fill(op, tensor, Law(Kind.CAUCHY, median, scale), generator)


@_handles(aten.log_normal_.default)
def _log_normal_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, mean, std, generator = bound(op, args, kwargs)
    _need(op, std > 0, f"expects std > 0.0, but found std={std}")
    _need(op, tensor.dtype.is_floating_point, f"only supports floating-point dtypes, not {tensor.dtype}")
    return _fill(op, tensor, Law(Kind.LOG_NORMAL, mean, std), generator)


def _put(op: Any, tensor: Any, make: Callable[[Spec], torch.Tensor]) -> Any:
    """Fill a DTensor that exists with values that are made elsewhere."""
    spec: Spec = tensor._spec
    fallback.check_writable(op, tensor)
    terms = _terms(op, spec)
    values = make(_whole_values(spec))
    if terms is None:
        tensor._local_tensor.copy_(values)
    else:
        tensor._local_tensor.fill_(terms)
    return tensor


@_handles(aten.geometric_.default)
def _geometric_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, p, generator = bound(op, args, kwargs)
    _need(op, 0 < p < 1, f"expects p to be in (0, 1), but got p={p}")

    def make(spec: Spec) -> torch.Tensor:
        # The first success is in the trial in which an exponential clock of that rate strikes.
        law = Law(Kind.EXPONENTIAL, -log1p(-p), 0.0)
        return _random(op, spec.replace(dtype=torch.float64), law, generator, tensor._local_tensor.device).ceil_()

    return _put(op, tensor, make)


@_handles(aten.bernoulli_.Tensor)
def _bernoulli_tensor_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, p, generator = bound(op, args, kwargs)
    return _put(op, tensor, lambda spec: _of_probabilities(op, _broadcast(op, p, spec), spec, generator))


# ---- new tensors ----------------------------------------------------------------------------------------------------


def _like(op: Any, args: Sequence[Any], kwargs: dict[str, Any], law: Callable[[torch.dtype], Law]) -> Any:
    given = _arguments(op, args, kwargs)
    like = _distributed(op, given["self"])
    spec = _spec_like(like._spec, given["dtype"], given["memory_format"])
    device = given["device"] or like._local_tensor.device
    return api.DTensor._wrap(_random(op, spec, law(spec.dtype), given.get("generator"), device), spec)


@_handles(aten.rand_like.default, aten.rand_like.generator)
def _rand_like(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _like(op, args, kwargs, lambda dtype: _uniform(op, dtype, 0.0, 1.0))


@_handles(aten.randn_like.default, aten.randn_like.generator)
def _randn_like(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _like(op, args, kwargs, lambda dtype: _normal(op, dtype, 0.0, 1.0))


@_handles(
    aten.randint_like.default, aten.randint_like.generator, aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype
)
def _randint_like(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = _arguments(op, args, kwargs)
    return _like(op, args, kwargs, lambda dtype: _integers(op, dtype, given.get("low", 0), given["high"]))


@_handles(aten.randint_like.Tensor, aten.randint_like.Tensor_generator)
def _randint_like_tensor(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    values = bound(op, args, kwargs)
    high = int(values[1].item())
    return _like(op, args, kwargs, lambda dtype: _integers(op, dtype, 0, high))


def _of_probabilities(op: Any, p: torch.Tensor, spec: Spec, generator: torch.Generator | None) -> torch.Tensor:
    """Local zeros and ones of the dtype of a spec; p is local, too."""
    draws = _random(op, spec.replace(dtype=torch.float64), Law(Kind.UNIFORM, 0.0, 1.0), generator, p.device)
    return torch.lt(draws, p).to(spec.dtype)


def _broadcast(op: Any, value: Any, spec: Spec) -> torch.Tensor:
    """The local values of a DTensor, or of a number, that is broadcast to the shape of a spec."""
    if value.ndim == 0 and not isinstance(value, api.DTensor):
        plain: torch.Tensor = value
        return plain
    value = _distributed(op, value)
    if value.shape == spec.shape:
        return _read(value, spec)
    wide = value.expand(spec.shape)
    return _read(wide, spec)


@_handles(aten.bernoulli.default)
def _bernoulli_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    p, generator = bound(op, args, kwargs)
    spec = _spec_like(p._spec, None, None)
    return api.DTensor._wrap(_of_probabilities(op, _read(p), spec, generator), spec)


@_handles(aten.bernoulli.Tensor)
def _bernoulli_tensor(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    like, p, generator = bound(op, args, kwargs)
    spec = _spec_like(_distributed(op, like)._spec, None, None)
    return api.DTensor._wrap(_of_probabilities(op, _broadcast(op, p, spec), spec, generator), spec)


@_handles(aten.bernoulli.p)
def _bernoulli_p(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    like, p, generator = bound(op, args, kwargs)
    return _new_like(op, like, lambda dtype: _bernoulli(op, dtype, p), generator)


def _new_like(op: Any, like: Any, law: Callable[[torch.dtype], Law], generator: torch.Generator | None) -> Any:
    spec = _spec_like(like._spec, None, None)
    return api.DTensor._wrap(_random(op, spec, law(spec.dtype), generator, like._local_tensor.device), spec)


@_handles(aten.normal.float_Tensor, aten.normal.Tensor_float, aten.normal.Tensor_Tensor)
def _normal_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = _arguments(op, args, kwargs)
    mean, std = given["mean"], given["std"]
    tensors = [one for one in (mean, std) if isinstance(one, torch.Tensor)]
    if len(tensors) == 2 and tensors[0].shape != tensors[1].shape:
        tensors = list(torch.broadcast_tensors(*[_distributed(op, one) for one in tensors]))
        mean, std = tensors
    spec = _whole_values(_distributed(op, tensors[0])._spec)
    _need(op, spec.dtype.is_floating_point or spec.dtype.is_complex, f"the dtype must be floating-point, not {spec.dtype}")
    if len(tensors) == 1 and std is not tensors[0]:
        _need(op, std >= 0, f"expects std >= 0.0, but found std {std}")
    mean, std = [_read(_distributed(op, one), spec) if isinstance(one, torch.Tensor) else one for one in (mean, std)]
    spec = spec.replace(shape=spec.shape)  # without gaps, whatever the stride of what is read
    drawn = _random(op, spec, Law(Kind.NORMAL, 0.0, 1.0), given["generator"], tensors[0]._local_tensor.device)
    # Two steps: a fused one would round differently where the processor has it.
    return api.DTensor._wrap(drawn.mul_(std).add_(mean), spec)


# ---- dropout --------------------------------------------------------------------------------------------------------


def _mask(op: Any, x: Any, keep: float, generator: torch.Generator | None = None) -> tuple[torch.Tensor, Spec]:
    _need(op, 0 <= keep <= 1, f"dropout probability has to be between 0 and 1, but got {1 - keep}")
    spec = _whole_values(x._spec).replace(shape=x.shape, dtype=torch.bool)
    return _random(op, spec, Law(Kind.BERNOULLI, keep, 0.0), generator, x._local_tensor.device), spec


@_handles(aten.native_dropout.default)
def _native_dropout(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, p, train = bound(op, args, kwargs)
    keep = 1.0 - p
    if train is False:
        mask_spec = x._spec.replace(
            placements=_whole_values(x._spec).placements, shape=x.shape, dtype=torch.bool
        )
        ones = _empty(mask_spec, x._local_tensor.device).fill_(True)
        return api.DTensor._wrap(x._local_tensor.clone(), x._spec), api.DTensor._wrap(ones, mask_spec)
    mask, mask_spec = _mask(op, x, keep)
    local = _read(x)
    out = local.mul(mask).mul_(0.0 if keep == 0 else 1.0 / keep)
    return api.DTensor._wrap(out, _whole_values(x._spec)), api.DTensor._wrap(mask, mask_spec)


@_handles(aten._fused_dropout.default)
def _fused_dropout(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, keep, generator = bound(op, args, kwargs)  # the probability to keep, of this one
    mask, mask_spec = _mask(op, x, keep, generator)
    out = _read(x).mul(mask).mul_(0.0 if keep == 0 else 1.0 / keep)
    byte = mask_spec.replace(dtype=torch.uint8)
    return api.DTensor._wrap(out, _whole_values(x._spec)), api.DTensor._wrap(mask.to(torch.uint8), byte)


@_handles(aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default)
def _rrelu_with_noise(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, noise, lower, upper, training, generator = bound(op, args, kwargs)
    lower, upper = float(lower), float(upper)
    written = op is aten.rrelu_with_noise_.default
    if written and x._spec.is_partial:
        raise RuntimeError(f"{op}: what is Partial cannot be written into by parts: redistribute it to Replicate first")
    spec = _whole_values(x._spec)
    local = _read(x)
    if training:
        slopes = _random(op, spec, _uniform(op, spec.dtype, lower, upper), generator, local.device)
        slopes = torch.where(local <= 0, slopes, torch.ones((), dtype=slopes.dtype, device=slopes.device))
        made = local * slopes
        noise = _distributed(op, noise)
        target: Spec = noise._spec
        noise._local_tensor.copy_(transfer(spec, target.replace(dtype=spec.dtype)).run(slopes))
    else:
        made = torch.nn.functional.leaky_relu(local, (lower + upper) / 2)
    if written:
        x._local_tensor.copy_(made)
        return x
    return api.DTensor._wrap(made, spec)


# ---- rows -----------------------------------------------------------------------------------------------------------


@_handles(aten.multinomial.default)
def _multinomial(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Without replacement: the largest p / e, e exponential, are a sample (Efraimidis and Spirakis, 2006). With it: the
    first category at which the running sum is above a uniform number."""
    p, count, replacement, generator = bound(op, args, kwargs)
    _need(op, p.ndim in (1, 2), f"the probabilities must have 1 or 2 dims, not {p.ndim}")
    _need(op, p.dtype.is_floating_point, f"the probabilities must be floating-point, not {p.dtype}")
    _need(op, count > 0, "cannot sample n_sample <= 0 samples")
    categories = p.shape[-1]
    _need(op, replacement or count <= categories, "cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    last = p.ndim - 1
    rows = [Replicate() if one.is_partial() or split_dim(one) == last else one for one in p._spec.placements]
    spec = p._spec.replace(placements=rows)
    local = _read(p, spec)
    _check_probabilities(op, p, local)
    out = Spec(spec.mesh, rows, (*spec.shape[:-1], count), None, torch.int64)
    if replacement:
        sums = local.double().cumsum(-1)
        draws = _random(op, out.replace(dtype=torch.float64), Law(Kind.UNIFORM, 0.0, 1.0), generator, local.device)
        # Below the last sum whatever the rounding: there is a category above it, and one that is not impossible.
        draws = torch.minimum(draws * sums[..., -1:], torch.nextafter(sums[..., -1:], torch.zeros_like(sums[..., -1:])))
        chosen = torch.searchsorted(sums.contiguous(), draws, right=True)
    else:
        flat = spec.replace(shape=spec.shape, dtype=torch.float64)
        clocks = _random(op, flat, Law(Kind.EXPONENTIAL, 1.0, 0.0), generator, local.device)
        chosen = (local.double() / clocks).topk(count, dim=-1).indices
    return api.DTensor._wrap(chosen, out)


def _check_probabilities(op: Any, p: Any, local: torch.Tensor) -> None:
    """What torch checks, of the rows of all ranks, so that all raise."""
    if coordinate_is_outside(p._spec):
        return
    sound = bool(((local >= 0) & local.isfinite()).all()) and bool((local.sum(-1) > 0).all())
    spec: Spec = p._spec
    verdict = Spec(spec.mesh, (Partial("min"),) * spec.mesh.ndim, (), (), torch.int32)
    whole = transfer(verdict, fallback.whole_spec(verdict)).run(torch.tensor(int(sound), dtype=torch.int32))
    _need(op, bool(whole), "the probabilities must be finite and not negative, and no row may have a sum of 0")


def coordinate_is_outside(spec: Spec) -> bool:
    """Whether this rank is outside the mesh of a spec."""
    return spec.mesh.get_coordinate() is None


# ---- the rest -------------------------------------------------------------------------------------------------------


def seeded_fallback(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a random op with every input whole on every rank, from one key: ranks get the same, whatever the mesh.

    Collective. Results are replicated; a tensor that the op writes into is brought back where it was.
    """
    names = [one.name for one in op._schema.arguments]
    values = bound(op, args, kwargs)
    mesh = next(
        one._spec.mesh
        for value in values
        for one in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(one, api.DTensor)
    )
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
    return fallback.replicated(op, values[:count], keyword)


_OTHERS = (
    "poisson.default",
    "binomial.default",
    "_standard_gamma.default",
    "_sample_dirichlet.default",
)
for _name in _OTHERS:
    _packet, _overload = _name.split(".")
    RANDOM_OPS[getattr(getattr(aten, _packet), _overload)] = seeded_fallback
