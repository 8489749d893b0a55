"""cumsum, cumprod and logcumsumexp along a sharded dim: each rank scans its piece and takes in the totals before it.

Moves one total of each piece instead of the tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.dtensor._algorithms.common import (
    check_strict,
    gathered,
    is_cut_plainly,
    number_of,
    without_partial,
    wrapped,
)
from phalanx.dtensor._algorithms.registry import algorithm
from phalanx.dtensor._op_plan import bound, call_bound
from phalanx.dtensor._tensor import DTensor


def _takes(values: Sequence[Any], choice: Any, moves: Sequence[Any]) -> bool:
    spec = values[0]._spec
    return spec.ndim > 0 and spec.shape.numel() > 0 and is_cut_plainly(spec, [values[1] % spec.ndim])


@algorithm("aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default", takes=_takes)
def scan(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> DTensor:
    """(self, dim, *, dtype)."""
    check_strict(op)
    values = bound(op, args, kwargs)
    local, spec = without_partial(values[0])
    dim = values[1] % spec.ndim
    mesh_dims = spec.mesh_dims_of(dim)
    name = op._schema.name.split("::")[1]
    out = call_bound(op, [local, *values[1:]])
    if name == "logcumsumexp":
        total = local.logsumexp(dim, keepdim=True)
    else:
        total = (local.sum if name == "cumsum" else local.prod)(dim, keepdim=True, dtype=out.dtype)
    totals = gathered(total, spec.mesh, mesh_dims)[: number_of(spec, mesh_dims)]
    if totals.shape[0]:
        if name == "logcumsumexp":
            out = torch.logaddexp(totals.logsumexp(0), out)
        elif name == "cumsum":
            out += totals.sum(0, dtype=out.dtype)
        else:
            out *= totals.prod(0, dtype=out.dtype)
    return wrapped(out, spec.mesh, spec.placements, spec.shape, spec)
