"""Softmax, log_softmax and negative log-likelihood along a sharded dim: the loss of a model whose classes are sharded.

No rank sees the scores of another one. What moves, for each line of scores: a maximum and a sum of its exponentials in
softmax; one sum in its gradient; one picked score in a loss without reduction, and with one a single number. The
gradient of the loss moves nothing. (Online softmax: Milakov and Gimelshein, arXiv 1805.02867.)

And the mean of such a loss with the batch sharded alone: weighted by what the targets pick on all ranks together. It
moves two numbers: the total weight, and whether a target is out of range.
"""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor._algorithms import common
from phalanx.dtensor._compile import is_traced
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import Mesh
from phalanx.dtensor._op_plan import call_bound
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import assert_async
from phalanx.dtensor.placement_types import Partial, Replicate, Shard

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's codes of the reduction of a loss


# ---- softmax --------------------------------------------------------------------------------------------------------


def _is_cut(spec: DTensorSpec, dim: int) -> bool:
    """Whether the classes are cut, and there are scores. Other dims may have symbolic sizes."""
    if not spec.ndim or any(type(size) is int and size == 0 for size in spec.shape):
        return False
    return common.is_cut_plainly(spec, [dim % spec.ndim], may_be_symbolic=True)


def _takes_softmax(scores: Any, dim: int, half_to_float: bool) -> bool:
    # half_to_float is for accelerators: on a CPU torch refuses it, and says so.
    return half_to_float is False and _is_cut(scores._spec, dim)


def _extent(local: torch.Tensor, spec: DTensorSpec, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(maximum, sum of exp(x - maximum)) of the lines of the whole tensor along a dim. Collective."""
    shape = [1 if index == dim else size for index, size in enumerate(local.shape)]
    if local.shape[dim]:
        high = local.amax(dim, keepdim=True)
        # A line of -inf alone counts nothing here, and its exponentials are not to be NaN for the other ranks.
        own = (local - high.masked_fill(high == -torch.inf, 0)).exp_().sum(dim, keepdim=True)
    else:
        high, own = local.new_full(shape, -torch.inf), local.new_zeros(shape)
    parts = common.gathered(torch.stack((high, own)), spec.mesh, spec.mesh_dims_of(dim))
    top = parts[:, 0].amax(0)
    return top, (parts[:, 1] * (parts[:, 0] - top).exp_()).sum(0)


@common.algorithm("aten._log_softmax.default", "aten._softmax.default", takes=_takes_softmax)
def softmax(op: Any, scores: Any, dim: int, half_to_float: bool) -> Any:
    """-> output, sharded as the scores."""
    spec: DTensorSpec = scores._spec
    local = common.computed(scores._local_tensor)
    top, total = _extent(local, spec, dim % spec.ndim)
    shifted = local - top
    result = shifted.sub_(total.log_()) if "log" in op._schema.name else shifted.exp_().div_(total)
    return common.as_before(result.to(spec.dtype), spec)


@common.algorithm(
    "aten._log_softmax_backward_data.default",
    "aten._softmax_backward_data.default",
    takes=lambda grad, output, dim, input_dtype: _is_cut(output._spec, dim),
)
def softmax_backward(op: Any, grad: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    """-> grad_input, sharded as output."""
    spec: DTensorSpec = output._spec
    dim = dim % spec.ndim
    is_log = "log" in op._schema.name
    gradient = common.computed(common.redistribute_local(grad, spec.placements))
    values = common.computed(output._local_tensor)
    weighted = gradient if is_log else gradient * values
    total = common.reduced(weighted.sum(dim, keepdim=True), "sum", spec.mesh, spec.mesh_dims_of(dim))
    return common.as_before((weighted - (values.exp() if is_log else values) * total).to(input_dtype), spec)


# ---- negative log-likelihood ----------------------------------------------------------------------------------------


def _takes_scores(scores: Any, *_: Any) -> bool:
    return _is_cut(scores._spec, min(1, scores.ndim - 1))


class _Picked:
    """The scores that targets select, where the classes are sharded. Collective where the target is redistributed."""

    def __init__(self, op: Any, spec: DTensorSpec, target: Any, weight: Any, ignored: int) -> None:
        self.dim = min(1, spec.ndim - 1)  # of the classes
        self.mesh_dims = spec.mesh_dims_of(self.dim)  # those that cut the classes; `others` cut something else
        # The target is as the scores, but replicated on the mesh dims that cut the classes.
        self.placements, self.shape = common.without_dims(spec, [self.dim], keepdim=False)
        self.others = [index for index, one in enumerate(self.placements) if isinstance(one, Shard)]
        local = common.redistribute_local(target, self.placements)
        self.counts = local != ignored  # where a target counts
        outside = self.counts & ((local < 0) | (local >= spec.shape[self.dim]))
        if is_traced():
            text = f"{op}: a target is out of bounds: there are {spec.shape[self.dim]} classes"
            assert_async(~outside.any(), text)
        else:
            # Ranks with another part of the batch do not see this one's targets.
            is_wrong = outside.any()
            if self.others:
                is_wrong = common.reduced(is_wrong.to(torch.int32), "max", spec.mesh, self.others)
            if bool(is_wrong):
                first = local[outside].flatten()[:1]
                target = f"target {int(first)}" if first.numel() else "a target of another rank"
                raise IndexError(
                    f"{op}: {target} is out of bounds: there are {spec.shape[self.dim]} classes, so targets are 0 to "
                    f"{spec.shape[self.dim] - 1}"
                )
        index = local - common.offset_of(spec, self.dim)
        self.here = self.counts & (index >= 0) & (index < spec.local_shape[self.dim])
        self.index = index.masked_fill_(~self.here, 0)  # its place among the classes of this rank
        self.weights: torch.Tensor | None = None  # of the class that each target picks; 0 where another rank has it
        if weight is not None:
            cut = [Shard(0) if index in self.mesh_dims else Replicate() for index in range(spec.mesh.ndim)]
            own = common.redistribute_local(weight, cut)
            weights = own[self.index] if own.numel() else own.new_zeros(self.index.shape)
            self.weights = weights.masked_fill_(~self.here, 0)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The score that each target picks; 0 where another rank has it, or it does not count."""
        if not values.shape[self.dim]:
            return values.new_zeros(self.index.shape)
        found = values.gather(self.dim, self.index.unsqueeze(self.dim)).squeeze(self.dim)
        return found.masked_fill_(~self.here, 0)


@common.algorithm("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default", takes=_takes_scores)
def nll_loss(op: Any, scores: Any, target: Any, weight: Any, reduction: int, ignored: int) -> tuple[Any, Any]:
    """-> (output, total_weight).

    The output is whole on the mesh dims that cut the classes, and on those that cut the batch: sharded without a
    reduction, else a Partial(sum).
    """
    spec: DTensorSpec = scores._spec
    mesh = spec.mesh
    picked = _Picked(op, spec, target, weight, ignored)
    local = scores._local_tensor
    loss, weights = picked.of(local).neg_(), picked.weights
    if weights is not None:
        loss = loss * weights
    if reduction == _NONE and spec.ndim > 1:
        loss = common.reduced(loss, "sum", mesh, picked.mesh_dims)
        return common.wrapped(loss, mesh, picked.placements, picked.shape), common.replicated(local.new_zeros(()), mesh)
    total = picked.counts.sum().to(local.dtype) if weights is None else weights.sum()
    loss = loss.sum()
    if weights is None:
        loss = common.reduced(loss, "sum", mesh, picked.mesh_dims)
    else:
        loss, total = common.reduced(torch.stack((loss, total)), "sum", mesh, picked.mesh_dims).unbind()
    total = common.reduced(total, "sum", mesh, picked.others)
    if reduction == _MEAN:
        loss = loss / total
    return _summed(loss, picked.others, mesh), common.replicated(total, mesh)


def _summed(loss: torch.Tensor, mesh_dims: Sequence[int], mesh: Mesh) -> DTensor:
    """The sum of the losses of the ranks of some mesh dims: a Partial there."""
    placements = [Partial("sum") if mesh_dim in mesh_dims else Replicate() for mesh_dim in range(mesh.ndim)]
    return common.wrapped(loss, mesh, placements, ())


@common.algorithm(
    "aten.nll_loss_backward.default",
    "aten.nll_loss2d_backward.default",
    takes=lambda grad, scores, *_: _takes_scores(scores),
)
def nll_loss_backward(
    op: Any, grad: Any, scores: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any
) -> Any:
    """-> grad_input, sharded as the scores."""
    spec: DTensorSpec = scores._spec
    picked = _Picked(op, spec, target, weight, ignored)
    whole = (Replicate(),) * spec.mesh.ndim
    gradient = common.redistribute_local(grad, picked.placements if grad.ndim else whole)
    if reduction == _MEAN:
        gradient = gradient / common.redistribute_local(total, whole)
    value = gradient.neg().expand(picked.index.shape) if picked.weights is None else -gradient * picked.weights
    result = torch.zeros_like(scores._local_tensor)
    if result.shape[picked.dim]:
        # Where another rank has the target, class 0 of this one would be written: with its 0.
        value = value.masked_fill(~picked.here, 0)
        result.scatter_(picked.dim, picked.index.unsqueeze(picked.dim), value.unsqueeze(picked.dim))
    return common.as_before(result, spec)


# ---- the mean over a sharded batch ----------------------------------------------------------------------------------


def _takes_batch(scores: Any, target: Any, weight: Any, reduction: int, ignored: int) -> bool:
    spec: DTensorSpec = scores._spec
    if reduction != _MEAN or spec.ndim < 2 or spec.shape.numel() == 0:
        return False
    return common.is_cut_plainly(spec, range(spec.ndim)) and not spec.mesh_dims_of(1)


@common.algorithm("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default", takes=_takes_batch)
def nll_loss_of_batch(op: Any, scores: Any, target: Any, weight: Any, reduction: int, ignored: int) -> tuple[Any, Any]:
    """-> (output, total_weight): output is a Partial(sum)."""
    spec: DTensorSpec = scores._spec
    placements, _ = common.without_dims(spec, [1], keepdim=False)
    cut = [mesh_dim for mesh_dim, one in enumerate(placements) if isinstance(one, Shard)]
    local_weight = None if weight is None else common.redistribute_local(weight, (Replicate(),) * spec.mesh.ndim)
    local = scores._local_tensor
    loss = total = local.new_zeros(())
    error: IndexError | None = None
    try:
        found = call_bound(op, [local, common.redistribute_local(target, placements), local_weight, _SUM, ignored])
        loss, total = found if local.numel() else (loss, total)
    except IndexError as refusal:
        error = refusal
    if type(local) is torch.Tensor and local.device.type == "cpu":
        # Ranks tell each other whether a target is out of range, so that all raise.
        both = torch.stack((total, total.new_full((), error is not None)))
        total, wrong = common.reduced(both, "sum", spec.mesh, cut).unbind()
        if bool(wrong):
            raise error or IndexError(
                f"{op}: a target of another rank is out of bounds: there are {spec.shape[1]} classes"
            )
    else:
        total = common.reduced(total, "sum", spec.mesh, cut)
    return _summed(loss / total, cut, spec.mesh), common.replicated(total, spec.mesh)
