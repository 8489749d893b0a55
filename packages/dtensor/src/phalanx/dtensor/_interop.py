"""To and from torch's own DTensor: the same local tensor under another wrapper.

    ours = from_torch(theirs)       # nothing is copied, nothing is sent
    theirs = to_torch(ours)

Both are differentiable. In the backward pass a gradient is wrapped as it is, and redistributed to the placements that a
gradient of the tensor has: its own, with Replicate for Partial.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import describe
from phalanx.dtensor._redistribute.comm import wait_if_pending
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import torch_dtensor
from phalanx.dtensor.placement_types import as_torch_placement, without_partial

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor


def from_torch(tensor: "TorchDTensor") -> DTensor:
    """A DTensor of this package over the memory of torch's. Differentiable. Not collective.

    Args:
        tensor: Any DTensor of torch; a parameter gives a DTensor whose gradient reaches it.

    Returns:
        A DTensor with the same mesh, placements, shape, stride and dtype; its local tensor has the same memory.

    Raises:
        TypeError: The tensor is not a DTensor of torch.

    Example:
        >>> theirs = torch.distributed.tensor.ones(4, device_mesh=mesh, placements=[Shard(0)])
        >>> from_torch(theirs).placements
        (Shard(dim=0),)
    """
    if not isinstance(tensor, torch_dtensor()):
        raise TypeError(
            f"from_torch: a torch.distributed.tensor.DTensor is needed, not {type(tensor).__name__}: make a DTensor "
            "of a plain tensor with DTensor.from_local or distribute_tensor"
        )
    is_recorded = tensor.requires_grad and torch.is_grad_enabled()
    made: DTensor = _FromTorch.apply(tensor) if is_recorded else _ours(tensor)  # type: ignore[no-untyped-call]
    return made


def to_torch(tensor: DTensor) -> "TorchDTensor":
    """torch's DTensor over the memory of one of this package. Differentiable. Not collective.

    Args:
        tensor: A DTensor of this package on a DeviceMesh, of which no part is a SizedShard.

    Returns:
        A DTensor of torch with the same mesh, placements, shape, stride and dtype.

    Raises:
        TypeError: The tensor is not a DTensor of this package.
        ValueError: torch has no such placement, or the mesh is an AbstractMesh, which has no ranks.

    Example:
        >>> theirs = to_torch(ones(4, device_mesh=mesh, placements=[Shard(0)]))
        >>> isinstance(theirs, torch.distributed.tensor.DTensor)
        True
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(f"to_torch: a phalanx.dtensor.DTensor is needed, not {type(tensor).__name__}")
    if not isinstance(tensor._spec.mesh, DeviceMesh):
        raise ValueError(
            f"to_torch: the tensor is on an AbstractMesh {describe(tensor._spec.mesh)}, which torch does not know: "
            "make it on a DeviceMesh"
        )
    is_recorded = tensor.requires_grad and torch.is_grad_enabled()
    made: TorchDTensor = _ToTorch.apply(tensor) if is_recorded else _theirs(tensor)  # type: ignore[no-untyped-call]
    return made


def _ours(tensor: Any) -> Any:
    with torch.no_grad():
        local = tensor.to_local()
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), tensor.dtype)
    return DTensor._wrap(local, spec)


def _theirs(tensor: Any) -> Any:
    spec: DTensorSpec = tensor._spec
    placements = [as_torch_placement(one) for one in spec.placements]
    local = wait_if_pending(tensor._local_tensor).detach()
    return torch_dtensor().from_local(
        local, spec.mesh, placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


def _placed(grad: Any, like: DTensorSpec) -> Any:
    """A gradient, ours or torch's, in the placements of a gradient of a tensor."""
    wanted = without_partial(like.placements)
    if isinstance(grad, torch_dtensor()):
        theirs = [as_torch_placement(one) for one in wanted]
        return grad if tuple(grad.placements) == tuple(theirs) else grad.redistribute(placements=theirs)
    return grad if grad._spec.placements == wanted else grad.redistribute(placements=wanted)


class _FromTorch(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        made = _ours(tensor)
        ctx.spec = made._spec
        ctx.set_materialize_grads(False)
        return DTensor._wrap(made._local_tensor.view_as(made._local_tensor), made._spec)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None if grads[0] is None else to_torch(_placed(grads[0], ctx.spec))


class _ToTorch(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        ctx.spec = tensor._spec
        ctx.set_materialize_grads(False)
        return _theirs(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None if grads[0] is None else from_torch(_placed(grads[0], ctx.spec))
