"""Functions that make a DTensor of a shape: every rank makes its own part, and nothing is sent.

    mesh = torch.distributed.init_device_mesh("cpu", (4,))
    zeros(8, 3, device_mesh=mesh, placements=[Shard(0)])        # every rank has two rows
    randn((8, 3), device_mesh=mesh, placements=[Shard(1)])      # the same numbers for every placement and mesh

Names, signatures and semantics follow torch.distributed.tensor of torch 2.13, and 2.14 for `linspace` and `logspace`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from phalanx.core.random import Kind
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._local_spec import local_part
from phalanx.dtensor._random.fill import Distribution, fill_local
from phalanx.dtensor._random.state import draw_key
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import current_mesh
from phalanx.dtensor.placement_types import Placement, Replicate

__all__ = ["empty", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"]


def _made(
    who: str,
    fill: Callable[[torch.Tensor, DTensorSpec], object],
    requires_grad: bool,
    size: Sequence[Any],
    dtype: torch.dtype | None,
    layout: torch.layout,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensor:
    """The DTensor that the function `who` returns; fill(local tensor, spec) gives it its values."""
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
    local = torch.empty_strided(spec.local_shape, spec.local_stride, dtype=dtype, device=mesh.device_type)
    fill(local, spec)
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
    return _made("zeros", lambda local, _: local.zero_(), requires_grad, size, dtype, layout, device_mesh, placements)


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
    return _made("ones", lambda local, _: local.fill_(1), requires_grad, size, dtype, layout, device_mesh, placements)


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
    return _made("empty", lambda local, _: None, requires_grad, size, dtype, layout, device_mesh, placements)


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
    size = size if isinstance(size, Sequence) else (size,)
    fill = lambda local, _: local.fill_(fill_value)  # noqa: E731
    return _made("full", fill, requires_grad, size, dtype, layout, device_mesh, placements)


def linspace(
    start: complex | torch.Tensor,
    end: complex | torch.Tensor,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of one dim whose values go from one to another in equal steps; else as for `zeros`. Not collective.

    The values are those of torch.linspace, whatever the placements are: each rank makes all of them for a moment.

    Args:
        start, end: The first value and the last: numbers, or tensors without dims, which are the same on all ranks.
        steps: How many values there are.
        dtype: By default torch's default dtype, or the complex one where a value is complex.
        layout, requires_grad, device_mesh, placements: As for `zeros`.

    Raises:
        ValueError: A tensor has dims. Else as for `zeros`.

    Example:
        >>> linspace(0, 1, 5, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000])
    """
    whole = torch.linspace(_number("linspace", start), _number("linspace", end), steps, dtype=dtype)
    return _made("linspace", _part_of(whole), requires_grad, (steps,), whole.dtype, layout, device_mesh, placements)


def logspace(
    start: complex | torch.Tensor,
    end: complex | torch.Tensor,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of powers of a number, whose exponents are as for `linspace`. Not collective.

    Args:
        start, end: The first exponent and the last, as for `linspace`.
        steps: How many values there are.
        base: The number.
        dtype, layout, requires_grad, device_mesh, placements: As for `linspace`.

    Example:
        >>> logspace(0, 3, 4, 2.0, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        tensor([1., 2., 4., 8.])
    """
    whole = torch.logspace(_number("logspace", start), _number("logspace", end), steps, base, dtype=dtype)
    return _made("logspace", _part_of(whole), requires_grad, (steps,), whole.dtype, layout, device_mesh, placements)


def _number(who: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim():
        raise ValueError(f"{who}: the first value and the last are numbers, or tensors without dims, not {value.shape}")
    return value.item()


def _part_of(whole: torch.Tensor) -> Callable[[torch.Tensor, DTensorSpec], object]:
    return lambda local, spec: local.copy_(local_part(whole, spec, None))


def _random(who: str, kind: Kind) -> Callable[[torch.Tensor, DTensorSpec], object]:
    def fill(local: torch.Tensor, spec: DTensorSpec) -> None:
        if not (spec.dtype.is_floating_point or (spec.dtype.is_complex and kind is Kind.NORMAL)):
            raise RuntimeError(
                f"{who}: random numbers of {spec.dtype} are not implemented: write dtype=torch.float32, and convert "
                "the result"
            )
        fill_local(local, spec, Distribution(kind, 0.0, 1.0), draw_key(spec.mesh))

    return fill


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
    fill = _random("rand", Kind.UNIFORM)
    return _made("rand", fill, requires_grad, size, dtype, layout, device_mesh, placements)


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
    fill = _random("randn", Kind.NORMAL)
    return _made("randn", fill, requires_grad, size, dtype, layout, device_mesh, placements)
