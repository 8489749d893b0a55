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
from math import log1p
from typing import Any

import torch

from phalanx.core.random import Kind
from phalanx.dtensor import _fallback
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._op_plan import bound
from phalanx.dtensor._random.common import (
    arguments_of,
    distributed,
    empty_local,
    fill,
    key_for,
    new_local,
    read,
    spec_like,
    terms,
    whole_values,
)
from phalanx.dtensor._random.distributions import bernoulli, need, normal, uniform, whole_numbers
from phalanx.dtensor._random.fill import Distribution
from phalanx.dtensor._random.replicated import multinomial, seeded_fallback
from phalanx.dtensor._redistribute import plan_redistribute
from phalanx.dtensor._tensor import DTensor

__all__ = ["RANDOM_OPS", "seeded_fallback"]

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
aten = torch.ops.aten

RANDOM_OPS: dict[Any, Handler] = {}


def _handles(*ops: Any) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        RANDOM_OPS.update(dict.fromkeys(ops, function))
        return function

    return register


def _fill(op: Any, tensor: Any, distribution: Distribution, generator: torch.Generator | None) -> Any:
    """Fill a DTensor that exists."""
    spec: DTensorSpec = tensor._spec
    _fallback.check_writable(op, tensor)
    share = terms(op, spec)
    key = key_for(spec.mesh, generator)
    if share is None:
        fill(tensor._local_tensor, spec, distribution, key)
    else:
        tensor._local_tensor.fill_(share)
    return tensor


# ---- in place -------------------------------------------------------------------------------------------------------


@_handles(aten.normal_.default)
def _normal_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, mean, std, generator = bound(op, args, kwargs)
    return _fill(op, tensor, normal(op, tensor.dtype, mean, std), generator)


@_handles(aten.uniform_.default)
def _uniform_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, low, high, generator = bound(op, args, kwargs)
    return _fill(op, tensor, uniform(op, tensor.dtype, low, high), generator)


@_handles(aten.random_.default, aten.random_.to, getattr(aten.random_, "from"))
def _random_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = arguments_of(op, args, kwargs)
    tensor = given["self"]
    return _fill(op, tensor, whole_numbers(op, tensor.dtype, given.get("from"), given.get("to")), given["generator"])


@_handles(aten.bernoulli_.float)
def _bernoulli_float_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, p, generator = bound(op, args, kwargs)
    return _fill(op, tensor, bernoulli(op, tensor.dtype, p), generator)


@_handles(aten.exponential_.default)
def _exponential_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, rate, generator = bound(op, args, kwargs)
    need(op, rate > 0, f"expects lambda > 0.0, but found lambda={rate}")
    need(op, tensor.dtype.is_floating_point, f"only supports floating-point dtypes, not {tensor.dtype}")
    return _fill(op, tensor, Distribution(Kind.EXPONENTIAL, rate, 0.0), generator)


@_handles(aten.cauchy_.default)
def _cauchy_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, median, scale, generator = bound(op, args, kwargs)
    need(op, scale > 0, f"expects sigma > 0.0, but found sigma={scale}")
    need(op, tensor.dtype.is_floating_point, f"only supports floating-point dtypes, not {tensor.dtype}")
    return _fill(op, tensor, Distribution(Kind.CAUCHY, median, scale), generator)


@_handles(aten.log_normal_.default)
def _log_normal_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, mean, std, generator = bound(op, args, kwargs)
    need(op, std > 0, f"expects std > 0.0, but found std={std}")
    need(op, tensor.dtype.is_floating_point, f"only supports floating-point dtypes, not {tensor.dtype}")
    return _fill(op, tensor, Distribution(Kind.LOG_NORMAL, mean, std), generator)


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
def _geometric_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, p, generator = bound(op, args, kwargs)
    need(op, 0 < p < 1, f"expects p to be in (0, 1), but got p={p}")

    def make(spec: DTensorSpec) -> torch.Tensor:
        # The first success is in the trial in which an exponential clock of that rate strikes.
        distribution = Distribution(Kind.EXPONENTIAL, -log1p(-p), 0.0)
        return new_local(
            spec.replace(dtype=torch.float64), distribution, generator, tensor._local_tensor.device
        ).ceil_()

    return _put(op, tensor, make)


@_handles(aten.bernoulli_.Tensor)
def _bernoulli_tensor_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, p, generator = bound(op, args, kwargs)
    return _put(op, tensor, lambda spec: _of_probabilities(op, _broadcast(op, p, spec), spec, generator))


# ---- new tensors ----------------------------------------------------------------------------------------------------


def _like(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], distribution: Callable[[torch.dtype], Distribution]
) -> Any:
    given = arguments_of(op, args, kwargs)
    like = distributed(op, given["self"])
    spec = spec_like(like._spec, given["dtype"], given["memory_format"])
    device = given["device"] or like._local_tensor.device
    return DTensor._wrap(new_local(spec, distribution(spec.dtype), given.get("generator"), device), spec)


@_handles(aten.rand_like.default, aten.rand_like.generator)
def _rand_like(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _like(op, args, kwargs, lambda dtype: uniform(op, dtype, 0.0, 1.0))


@_handles(aten.randn_like.default, aten.randn_like.generator)
def _randn_like(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _like(op, args, kwargs, lambda dtype: normal(op, dtype, 0.0, 1.0))


@_handles(
    aten.randint_like.default,
    aten.randint_like.generator,
    aten.randint_like.low_dtype,
    aten.randint_like.low_generator_dtype,
)
def _randint_like(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = arguments_of(op, args, kwargs)
    return _like(op, args, kwargs, lambda dtype: whole_numbers(op, dtype, given.get("low", 0), given["high"]))


@_handles(aten.randint_like.Tensor, aten.randint_like.Tensor_generator)
def _randint_like_tensor(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    values = bound(op, args, kwargs)
    high = int(values[1].item())
    return _like(op, args, kwargs, lambda dtype: whole_numbers(op, dtype, 0, high))


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
    if value.shape == spec.shape:
        return read(value, spec)
    wide = value.expand(spec.shape)
    return read(wide, spec)


@_handles(aten.bernoulli.default)
def _bernoulli_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    p, generator = bound(op, args, kwargs)
    spec = spec_like(p._spec, None, None)
    return DTensor._wrap(_of_probabilities(op, read(p), spec, generator), spec)


@_handles(aten.bernoulli.Tensor)
def _bernoulli_tensor(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    like, p, generator = bound(op, args, kwargs)
    spec = spec_like(distributed(op, like)._spec, None, None)
    return DTensor._wrap(_of_probabilities(op, _broadcast(op, p, spec), spec, generator), spec)


@_handles(aten.bernoulli.p)
def _bernoulli_p(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    like, p, generator = bound(op, args, kwargs)
    return _new_like(op, like, lambda dtype: bernoulli(op, dtype, p), generator)


def _new_like(
    op: Any, like: Any, distribution: Callable[[torch.dtype], Distribution], generator: torch.Generator | None
) -> Any:
    spec = spec_like(like._spec, None, None)
    return DTensor._wrap(new_local(spec, distribution(spec.dtype), generator, like._local_tensor.device), spec)


@_handles(aten.normal.float_Tensor, aten.normal.Tensor_float, aten.normal.Tensor_Tensor)
def _normal_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = arguments_of(op, args, kwargs)
    mean, std = given["mean"], given["std"]
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
    drawn = new_local(spec, Distribution(Kind.NORMAL, 0.0, 1.0), given["generator"], tensors[0]._local_tensor.device)
    # Two steps: a fused one would round differently where the processor has it.
    return DTensor._wrap(drawn.mul_(std).add_(mean), spec)


# ---- dropout --------------------------------------------------------------------------------------------------------


def _mask(op: Any, x: Any, keep: float, generator: torch.Generator | None = None) -> tuple[torch.Tensor, DTensorSpec]:
    need(op, 0 <= keep <= 1, f"dropout probability has to be between 0 and 1, but got {1 - keep}")
    spec = whole_values(x._spec).replace(shape=x.shape, dtype=torch.bool)
    return new_local(spec, Distribution(Kind.BERNOULLI, keep, 0.0), generator, x._local_tensor.device), spec


@_handles(aten.native_dropout.default)
def _native_dropout(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, p, train = bound(op, args, kwargs)
    keep = 1.0 - p
    if train is False:
        mask_spec = x._spec.replace(placements=whole_values(x._spec).placements, shape=x.shape, dtype=torch.bool)
        ones = empty_local(mask_spec, x._local_tensor.device).fill_(True)
        return DTensor._wrap(x._local_tensor.clone(), x._spec), DTensor._wrap(ones, mask_spec)
    mask, mask_spec = _mask(op, x, keep)
    local = read(x)
    out = local.mul(mask).mul_(0.0 if keep == 0 else 1.0 / keep)
    return DTensor._wrap(out, whole_values(x._spec)), DTensor._wrap(mask, mask_spec)


@_handles(aten._fused_dropout.default)
def _fused_dropout(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, keep, generator = bound(op, args, kwargs)  # the probability to keep, of this one
    mask, mask_spec = _mask(op, x, keep, generator)
    out = read(x).mul(mask).mul_(0.0 if keep == 0 else 1.0 / keep)
    byte = mask_spec.replace(dtype=torch.uint8)
    return DTensor._wrap(out, whole_values(x._spec)), DTensor._wrap(mask.to(torch.uint8), byte)


@_handles(aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default)
def _rrelu_with_noise(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, noise, lower, upper, training, generator = bound(op, args, kwargs)
    lower, upper = float(lower), float(upper)
    written = op is aten.rrelu_with_noise_.default
    if written and x._spec.is_partial:
        raise RuntimeError(f"{op}: an op cannot write into a Partial tensor: redistribute it to Replicate first")
    spec = whole_values(x._spec)
    local = read(x)
    if training:
        slopes = new_local(spec, uniform(op, spec.dtype, lower, upper), generator, local.device)
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


# ---- the rest -------------------------------------------------------------------------------------------------------

RANDOM_OPS[aten.multinomial.default] = multinomial
RANDOM_OPS.update(
    dict.fromkeys(
        (
            aten.poisson.default,
            aten.binomial.default,
            aten._standard_gamma.default,
            aten._sample_dirichlet.default,
        ),
        seeded_fallback,
    )
)
