"""The mean of a loss over classes, with the batch sharded: weighted by what the targets pick on all ranks together.

Moves two numbers: the total weight, and whether a target is out of range.
"""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor._algorithms.common import check_strict, is_cut_plainly, redistribute_local, reduced, wrapped
from phalanx.dtensor._algorithms.registry import algorithm
from phalanx.dtensor._op_plan import bound, call_bound
from phalanx.dtensor.placement_types import AnyPlacement, Partial, Replicate, Shard

_MEAN, _SUM = 1, 2


def _takes(values: Sequence[Any], choice: Any, moves: Sequence[Any]) -> bool:
    spec = values[0]._spec
    if values[3] != _MEAN or spec.ndim < 2 or spec.shape.numel() == 0:
        return False
    return is_cut_plainly(spec, range(spec.ndim)) and not spec.mesh_dims_of(1)


@algorithm("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default", takes=_takes)
def nll_loss(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """(self, target, weight, reduction, ignore_index) -> (output, total_weight): output is a Partial(sum)."""
    check_strict(op)
    scores, target, weight, _, ignored = bound(op, args, kwargs)
    spec = scores._spec
    whole = (Replicate(),) * spec.mesh.ndim
    # The target has the dims of the scores but for the classes.
    placements: list[AnyPlacement] = [
        Shard(one.dim - (one.dim > 1)) if isinstance(one, Shard) else Replicate() for one in spec.placements
    ]
    cut = [mesh_dim for mesh_dim, one in enumerate(placements) if isinstance(one, Shard)]
    local_weight = None if weight is None else redistribute_local(weight, whole)
    local = scores._local_tensor
    error: IndexError | None = None
    try:
        loss, total = call_bound(op, [local, redistribute_local(target, placements), local_weight, _SUM, ignored])
    except IndexError as found:
        error = found
    if error is not None or not local.numel():
        loss, total = local.new_zeros(()), local.new_zeros(())
    if type(local) is torch.Tensor and local.device.type == "cpu":
        # Ranks tell each other whether a target is out of range, so that all raise.
        total, wrong = reduced(
            torch.stack((total, total.new_full((), error is not None))), "sum", spec.mesh, cut
        ).unbind()
        if bool(wrong):
            raise error or IndexError(
                f"{op}: a target of another rank is out of bounds: there are {spec.shape[1]} classes"
            )
    else:
        total = reduced(total, "sum", spec.mesh, cut)
    outputs = [Partial("sum") if mesh_dim in cut else Replicate() for mesh_dim in range(spec.mesh.ndim)]
    return wrapped(loss / total, spec.mesh, outputs, ()), wrapped(total, spec.mesh, whole, ())
