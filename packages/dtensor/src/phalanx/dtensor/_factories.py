"""Functions that make a DTensor of a shape: every rank makes its own part, and nothing is sent.

    mesh = torch.distributed.init_device_mesh("cpu", (4,))
    zeros(8, 3, device_mesh=mesh, placements=[Shard(0)])        # every rank has two rows
    randn((8, 3), device_mesh=mesh, placements=[Shard(1)])      # the same numbers for every placement and mesh

Names, signatures and semantics follow torch.distributed.tensor of torch 2.13.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from phalanx.core.random import Kind
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._random.fill import Distribution, fill_local
from phalanx.dtensor._random.state import draw_key
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import current_mesh
from phalanx.dtensor.placement_types import Placement, Replicate

__all__ = ["empty", "full", "ones", "rand", "randn", "zeros"]


def _spec(
    who: str,
    size: Sequence[Any],
    dtype: torch.dtype | None,
    layout: torch.layout,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensorSpec:
    if layout != torch.strided:
        raise ValueError(f"{who}: the layout of a DTensor is torch.strided, not {layout}: leave `layout` out")
    if mesh is None:
        mesh = current_mesh(who)
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = size[0]
    wrong = [one for one in size if isinstance(one, bool) or not isinstance(one, int | torch.SymInt)]
    if wrong:
        raise TypeError(f"{who}: sizes must be ints, not {wrong[0]!r}: write {who}(8, 4, ...) or {who}((8, 4), ...)")
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    dtype = torch.get_default_dtype() if dtype is None else dtype
    spec = DTensorSpec(mesh, placements, tuple(size), None, dtype)
    if spec.is_partial:
        raise ValueError(
            f"{who}: the placements are {list(spec.placements)}, and this function cannot make the terms of a Partial: "
            "write Replicate(), or DTensor.from_local with each rank's term"
        )
    return spec


def _made(spec: DTensorSpec, requires_grad: bool, fill: Callable[[torch.Tensor], Any]) -> DTensor:
    local = torch.empty_strided(spec.local_shape, spec.local_stride, dtype=spec.dtype, device=spec.mesh.device_type)
    fill(local)
    return DTensor._wrap(local, spec, requires_grad)


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of zeros. Not collective; on a rank outside the mesh its local tensor is empty.

    Args:
        size: The shape of the whole tensor: ints, or one sequence of them.
        requires_grad: Whether to record gradients for it.
        dtype: By default torch's default dtype.
        layout: torch.strided; there is no other.
        device_mesh: The mesh; by default that of the enclosing `with mesh:`.
        placements: One for each mesh dim; by default Replicate.

    Returns:
        The DTensor, whose local tensor is on the mesh's device type.

    Raises:
        ValueError: The placements do not fit the mesh, or have a Partial; a size is negative; or the layout is another.
        TypeError: A size is not an int.
        IndexError: A placement splits a dim that the tensor does not have.
        RuntimeError: There is no mesh.

    Source: torch.distributed.tensor.zeros.

    Example:
        >>> zeros(4, 3, device_mesh=mesh, placements=[Shard(0)]).to_local().shape  # over two ranks
        torch.Size([2, 3])
    """
    spec = _spec("zeros", size, dtype, layout, device_mesh, placements)
    return _made(spec, requires_grad, torch.Tensor.zero_)


def ones(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of ones. Not collective; on a rank outside the mesh its local tensor is empty.

    Args:
        size, requires_grad, dtype, layout, device_mesh, placements: As for `zeros`.

    Returns:
        The DTensor.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: As for `zeros`.

    Source: torch.distributed.tensor.ones.

    Example:
        >>> ones(2, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        tensor([1., 1.])
    """
    spec = _spec("ones", size, dtype, layout, device_mesh, placements)
    return _made(spec, requires_grad, lambda local: local.fill_(1))


def empty(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor whose memory is not initialized: its values differ between ranks. Not collective.

    Args:
        size, requires_grad, dtype, layout, device_mesh, placements: As for `zeros`.

    Returns:
        The DTensor.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: As for `zeros`.

    Source: torch.distributed.tensor.empty.

    Example:
        >>> empty(4, 3, device_mesh=mesh, placements=[Shard(1)]).shape
        torch.Size([4, 3])
    """
    spec = _spec("empty", size, dtype, layout, device_mesh, placements)
    return _made(spec, requires_grad, lambda local: None)


def full(
    size: Any,
    fill_value: complex,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor filled with one value. Not collective; on a rank outside the mesh its local tensor is empty.

    Args:
        size: The shape of the whole tensor.
        fill_value: The value; if no dtype is given, it decides the dtype, as for torch.full.
        requires_grad, dtype, layout, device_mesh, placements: As for `zeros`.

    Returns:
        The DTensor.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: As for `zeros`.

    Source: torch.distributed.tensor.full.

    Example:
        >>> full((2,), 7, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        tensor([7, 7])
    """
    dtype = torch.full((), fill_value).dtype if dtype is None else dtype
    spec = _spec("full", size if isinstance(size, Sequence) else (size,), dtype, layout, device_mesh, placements)
    return _made(spec, requires_grad, lambda local: local.fill_(fill_value))


def _random(distribution: Distribution, who: str, spec: DTensorSpec, requires_grad: bool) -> DTensor:
    if not (spec.dtype.is_floating_point or (spec.dtype.is_complex and distribution.kind is Kind.NORMAL)):
        raise RuntimeError(
            f"{who}: random numbers of {spec.dtype} are not implemented: write dtype=torch.float32, and convert the "
            "result"
        )
    key = draw_key(spec.mesh)
    return _made(spec, requires_grad, lambda local: fill_local(local, spec, distribution, key))


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of uniform numbers in [0, 1). Collective only if it is the first random op on the mesh.

    The numbers do not depend on mesh and placements (see `phalanx.dtensor.random`).

    Args:
        size, requires_grad, layout, device_mesh, placements: As for `zeros`.
        dtype: A floating dtype; by default torch's default dtype.

    Returns:
        The DTensor.

    Raises:
        ValueError, TypeError, IndexError: As for `zeros`.
        RuntimeError: There is no mesh, or the dtype is not a floating one.

    Source: torch.distributed.tensor.rand.

    Example:
        >>> x = rand(100, device_mesh=mesh, placements=[Shard(0)])
        >>> bool((0 <= x.min().full_tensor()) and (x.max().full_tensor() < 1))
        True
    """
    spec = _spec("rand", size, dtype, layout, device_mesh, placements)
    return _random(Distribution(Kind.UNIFORM, 0.0, 1.0), "rand", spec, requires_grad)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of standard normal numbers. Collective only if it is the first random op on the mesh.

    The numbers do not depend on mesh and placements (see `phalanx.dtensor.random`).

    Args:
        size, requires_grad, layout, device_mesh, placements: As for `zeros`.
        dtype: A floating or complex dtype; by default torch's default dtype.

    Returns:
        The DTensor.

    Raises:
        ValueError, TypeError, IndexError: As for `zeros`.
        RuntimeError: There is no mesh, or the dtype is neither a floating nor a complex one.

    Source: torch.distributed.tensor.randn.

    Example:
        >>> randn(4, 3, device_mesh=mesh, placements=[Shard(0)]).to_local().shape  # over two ranks
        torch.Size([2, 3])
    """
    spec = _spec("randn", size, dtype, layout, device_mesh, placements)
    return _random(Distribution(Kind.NORMAL, 0.0, 1.0), "randn", spec, requires_grad)
