"""The functions that make DTensors, and the completion of the class.

    mesh = torch.distributed.init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])     # each rank keeps two rows
    y = (x @ w).relu()                                             # as on one process; ranks work on their rows
    y.full_tensor()                                                # the whole tensor, on every rank

Names, signatures and semantics follow torch.distributed.tensor of torch 2.13.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.dtensor import _autograd, _compile, _dispatch, _layout, _local_spec, _tensor
from phalanx.dtensor._dtensor_spec import DTensorSpec, normalize_placements
from phalanx.dtensor._mesh import Mesh, coordinate_of, describe, mesh_id
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import allow_in_graph, current_mesh, is_torch_dtensor, real_mesh
from phalanx.dtensor.placement_types import Placement, Replicate

_tensor.complete(_autograd, _dispatch.dispatch)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Mesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Shard or replicate a tensor over a mesh. Collective over the mesh, unless `src_data_rank` is None.

    Args:
        tensor: A leaf of the whole shape, which is the same on every rank; a DTensor is returned as it is if it has
            this mesh and these placements.
        device_mesh: The mesh; by default that of the enclosing `with mesh:`.
        placements: One for each mesh dim, Replicate by default. Shard splits into chunks of the sizes of torch.chunk,
            SizedShard into pieces of its sizes. Partial makes the tensor the term of the first rank, and gives the
            others neutral terms.
        src_data_rank: The rank within each mesh dim whose values are used. None uses the values that each rank has,
            without communication: they must be the same.

    Returns:
        A DTensor that requires gradients if the tensor does; a leaf. A rank outside the mesh gets an empty local
        tensor.

    Raises:
        ValueError: There is not one placement for each mesh dim, or a DTensor has other placements or another mesh.
        TypeError: The tensor is a DTensor of torch.
        RuntimeError: A placement is unknown, there is no mesh, or the tensor is not a leaf.

    Source: torch.distributed.tensor.distribute_tensor.

    Example:
        >>> x = distribute_tensor(torch.arange(4), mesh, [Shard(0)])  # over two ranks
        >>> x.to_local()  # on rank 0
        tensor([0, 1])
    """
    mesh = current_mesh("distribute_tensor") if device_mesh is None else real_mesh(device_mesh)
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    if isinstance(tensor, DTensor):
        return _same(tensor, mesh, placements)
    if is_torch_dtensor(tensor):
        raise TypeError("distribute_tensor: the tensor is a torch DTensor: convert it with from_torch(tensor)")
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor: the tensor is not a leaf but the result of an op that records gradients: write "
            "DTensor.from_local(tensor, mesh).redistribute(placements=...), which gradients pass through"
        )
    if tensor.requires_grad and _compile.is_traced():
        raise RuntimeError(
            "distribute_tensor: a compiled function cannot make a leaf that requires gradients: make it outside of the "
            "function, or write DTensor.from_local(tensor, mesh).redistribute(placements=...), which gradients pass "
            "through"
        )
    spec = DTensorSpec(mesh, normalize_placements(mesh, placements, tensor.ndim), tensor.shape, None, tensor.dtype)
    local = _local_spec.local_part(tensor.detach(), spec, src_data_rank)
    if coordinate_of(mesh) is not None:
        spec = spec.replace(stride=_layout.global_stride(spec.shape, local.shape, local.stride()))
    return DTensor._wrap(local, spec, tensor.requires_grad)


def _same(tensor: DTensor, mesh: Mesh, placements: Sequence[Placement]) -> DTensor:
    if mesh_id(tensor.device_mesh) != mesh_id(mesh):
        raise ValueError(
            f"distribute_tensor: the DTensor is on mesh {describe(tensor.device_mesh)}, not on {describe(mesh)}: "
            "move it to that mesh with redistribute(mesh, placements)"
        )
    if tensor.placements != normalize_placements(mesh, placements, tensor.ndim):
        raise ValueError(
            f"distribute_tensor: the DTensor has placements {list(tensor.placements)}, not {list(placements)}: change "
            "them with redistribute(placements=...)"
        )
    return tensor


def distribute_module(
    module: nn.Module,
    device_mesh: Mesh | None = None,
    partition_fn: Callable[[str, nn.Module, Any], None] | None = None,
    input_fn: Callable[[nn.Module, Any, Any], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, Any], Any] | None = None,
) -> nn.Module:
    """Make the parameters and buffers of a module DTensors. Collective over the mesh.

    Args:
        module: The module; changed in place.
        device_mesh: The mesh; by default that of the enclosing `with mesh:`.
        partition_fn: Called with (name, submodule, mesh) for each submodule, to make its parameters DTensors. The
            parameters and buffers that it leaves plain are replicated afterwards.
        input_fn: Called with (module, inputs, mesh) before forward; it returns the inputs of forward.
        output_fn: Called with (module, outputs, mesh) after forward; it returns the output.

    Returns:
        The module.

    Raises:
        RuntimeError: The module was distributed before, or there is no mesh.

    Source: torch.distributed.tensor.distribute_module.

    Example:
        >>> linear = distribute_module(torch.nn.Linear(2, 2), mesh)
        >>> linear.weight.placements
        (Replicate(),)
    """
    mesh = current_mesh("distribute_module") if device_mesh is None else device_mesh
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError("distribute_module: this module was distributed before: call it once for each module")
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate(submodule, mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda called, inputs: input_fn(called, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda called, _, outputs: output_fn(called, outputs, mesh))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _replicate(module: nn.Module, mesh: Mesh) -> None:
    whole = [Replicate()] * mesh.ndim
    for key, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter, DTensor):
            made = distribute_tensor(parameter.detach(), mesh, whole)
            module.register_parameter(key, nn.Parameter(made, requires_grad=parameter.requires_grad))
    for key, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            module._buffers[key] = distribute_tensor(buffer, mesh, whole)


allow_in_graph(DTensor.from_local)
allow_in_graph(distribute_tensor)
