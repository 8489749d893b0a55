"""The class DTensor, below everything that works with instances of it.

The class holds a local tensor and a spec, and declares its methods. What a method does needs modules that import this
one (`_autograd`, `_dispatch`), so `_api` hands these to `complete` once. No other module needs `_api` to know the type.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.types import IntLikeType

from phalanx.dtensor import _compile, _local_spec
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import Mesh, describe
from phalanx.dtensor._torch_compat import disabled_torch_function, make_wrapper, tensor_data
from phalanx.dtensor.placement_types import AnyPlacement, Placement, without_partial

_functions: Any = None  # the module that implements from_local, to_local, redistribute and full_tensor


class DTensor(torch.Tensor):
    """A tensor that is sharded or replicated over a mesh of ranks. Each rank holds a local tensor.

    `DTensor.from_local`, `distribute_tensor` and the factories make one. The constructor is for code that knows the
    local tensors of all ranks: it does not compare them and is not differentiable. Not collective.

    Args:
        local_tensor: The local tensor of this rank, of any shape that the placements allow.
        spec: The spec of the tensor; or its mesh, and then `placements` are needed, and `shape` if shards are uneven.
        placements: One for each mesh dim.
        shape: The shape of the whole tensor; by default as if all ranks had a local tensor of this shape.
        dtype: The dtype, which must be that of the local tensor.
        requires_grad: Whether to record gradients for it; by default as the local tensor does, with a warning if they
            differ.
        stride: The stride of the whole tensor.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The dtype is not that of the local tensor, or the spec does not fit (see `DTensorSpec`).
    """

    __slots__ = ("_local_tensor", "_spec")
    _local_tensor: torch.Tensor
    _spec: DTensorSpec

    # Ops are seen below autograd, one by one, and never by the functions of torch that call them.
    __torch_function__ = disabled_torch_function

    def __new__(
        cls,
        local_tensor: torch.Tensor,
        spec: DTensorSpec | Mesh,
        placements: Sequence[Placement] | None = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool | None = None,
        stride: Sequence[int] | None = None,
    ) -> "DTensor":
        if not isinstance(local_tensor, torch.Tensor) or isinstance(local_tensor, DTensor):
            raise TypeError(
                f"DTensor: the local tensor must be a plain torch.Tensor, not {type(local_tensor).__name__}"
            )
        if not isinstance(spec, DTensorSpec):
            if placements is None:
                raise TypeError("DTensor: a mesh was given without placements: write DTensor(local, mesh, [Shard(0)])")
            spec = _local_spec.spec_of_local(local_tensor, spec, placements, shape, stride)
        if local_tensor.dtype != spec.dtype or (dtype is not None and dtype != spec.dtype):
            raise ValueError(
                f"DTensor: the local tensor has dtype {local_tensor.dtype}, and the dtype asked for is "
                f"{dtype or spec.dtype}: convert the local tensor first"
            )
        if requires_grad is None:
            requires_grad = local_tensor.requires_grad
        elif requires_grad != local_tensor.requires_grad:
            warnings.warn(
                f"DTensor: requires_grad={requires_grad}, but the local tensor has {local_tensor.requires_grad}: use "
                "DTensor.from_local, through which gradients reach the local tensor",
                stacklevel=2,
            )
        made: DTensor = make_wrapper(cls, local_tensor.detach(), spec, requires_grad)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @staticmethod
    def _wrap(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> "DTensor":
        """A DTensor of parts that are known to fit together."""
        made: DTensor = make_wrapper(DTensor, local, spec, requires_grad)
        return made

    # ---- what it is --------------------------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which the tensor is sharded or replicated. Read only."""
        return self._spec.mesh  # type: ignore[return-value]

    @property
    def placements(self) -> tuple[AnyPlacement, ...]:
        """The placement for each mesh dim. Read only."""
        return self._spec.placements

    @property
    def data(self) -> "DTensor":
        """The tensor without its history, with the same memory. To set it gives this tensor another one's values."""
        return tensor_data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DTensor):
            raise TypeError(
                f"data: a DTensor can be set to a DTensor only, not to a {type(value).__name__}: write "
                "distribute_tensor(value, mesh, placements) or DTensor.from_local, or copy into it with copy_()"
            )
        tensor_data.__set__(self, value)
        self._spec, self._local_tensor = value._spec, value._local_tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The local tensor of this rank and the spec, without communication."""
        grad = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        grad = grad or (", requires_grad=True" if self.requires_grad else "")
        return (
            f"DTensor(local_tensor={self._local_tensor}, shape={tuple(self.shape)}, "
            f"mesh={describe(self._spec.mesh)}, placements={self._spec.placements}{grad})"
        )

    # ---- torch.compile -----------------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], _compile.Context]:
        spec = self._spec
        return ["_local_tensor"], _compile.Context(spec.mesh, spec.placements, spec.dtype, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor],
        context: _compile.Context,
        outer_size: Sequence[IntLikeType],
        outer_stride: Sequence[IntLikeType],
    ) -> "DTensor":
        local = inner["_local_tensor"]
        shape, stride = _compile.settled(context.mesh, context.placements, local, outer_size, outer_stride)
        spec = DTensorSpec(context.mesh, context.placements, shape, stride, context.dtype)
        return DTensor._wrap(local, spec, context.requires_grad)

    def _stable_hash_for_caching(self) -> str:
        """For AOTAutograd: what its cache on disk knows a DTensor by."""
        return _compile.cache_key(self)

    def __coerce_tangent_metadata__(self) -> "DTensor":
        """For AOTAutograd: a tangent is never Partial."""
        if not self._spec.is_partial:
            return self
        return self.redistribute(placements=without_partial(self._spec.placements))

    def __coerce_same_metadata_as_tangent__(self, context: _compile.Context, expected_type: type | None = None) -> Any:
        """For AOTAutograd: a tangent with the placements that were seen while tracing."""
        if expected_type is not None:
            return self.to_local() if expected_type is torch.Tensor else None
        return self.redistribute(placements=context.placements)

    # ---- local tensors -----------------------------------------------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: Mesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> "DTensor":
        """A DTensor of the local tensors of the ranks. Differentiable; collective only with `run_check`.

        The gradient of the local tensor is a plain tensor in these placements (with Replicate for Partial: the gradient
        of each term is that of the sum).

        Args:
            local_tensor: The local tensor of this rank, a plain tensor; the DTensor shares its memory. On a rank
                outside the mesh it counts as empty.
            device_mesh: The mesh; by default that of the enclosing `with mesh:`.
            placements: One for each mesh dim; Replicate by default.
            run_check: Whether to compare shapes and dtypes among the ranks, and to give replicated tensors the values
                of the first rank of the mesh dim. This communicates.
            shape: The shape of the whole tensor. It is needed if shards are uneven: by default it is computed as if all
                ranks had a local tensor of this shape.
            stride: The stride of the whole tensor; by default contiguous, or with the order of dims of the local
                tensor. The ranks must agree on that order: if a rank has 0 or 1 elements along a dim and the tensors of
                the others are transposed, give the stride.
            grad_placements: The placements of the gradient, if they differ.

        Returns:
            The DTensor.

        Raises:
            TypeError: The local tensor is not a plain tensor.
            ValueError: The local tensor does not have the shape of this rank's part of `shape`; there is not one
                placement for each mesh dim; or with `run_check`, shapes or dtypes of ranks do not fit together.
            RuntimeError: There is no mesh.

        Source: torch.distributed.tensor.DTensor.from_local.
        """
        return _functions.from_local(  # type: ignore[no-any-return]
            local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The local tensor of this rank, with the same memory. Differentiable. Not collective.

        Args:
            grad_placements: The placements of the gradients that the ranks give for their local tensors; by default
                those of this tensor, with Replicate for Partial: then every rank must give the same gradient.

        Returns:
            The local tensor; empty on a rank outside the mesh. If a collective still writes it, its first use waits.

        Raises:
            ValueError: With `grad_placements` a gradient would have another shape than the local tensor.

        Source: torch.distributed.tensor.DTensor.to_local.
        """
        return _functions.to_local(self, grad_placements)  # type: ignore[no-any-return]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank of the mesh. Differentiable. Collective over the mesh.

        Args:
            grad_placements: The placements of the gradients that the ranks give; by default Replicate: each rank gives
                the whole gradient.

        Returns:
            A plain tensor; on a rank outside the mesh it is empty.

        Raises:
            ValueError: With `grad_placements` a gradient would have another shape.
            PhalanxError: A rank failed, or did not call it in time.

        Source: torch.distributed.tensor.DTensor.full_tensor.
        """
        return _functions.full_tensor(self, grad_placements)  # type: ignore[no-any-return]

    def redistribute(
        self,
        device_mesh: Mesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> "DTensor":
        """The same tensor in other placements, or on another mesh. Differentiable, out of place. Collective.

        The gradient has the placements of this tensor, with Replicate for Partial.

        Args:
            device_mesh: The mesh of the result; by default that of this tensor.
            placements: One for each mesh dim; a Partial only if this tensor has the same for that mesh dim.
            async_op: Whether to return before the communication is complete: the first use of the result waits.
            forward_dtype: A dtype to convert to before the communication.
            backward_dtype: A dtype to convert the gradient to before it is redistributed.

        Returns:
            The redistributed DTensor.

        Raises:
            RuntimeError: Placements are missing, or one is a Partial that the tensor does not have.
            ValueError: There is not one placement for each mesh dim.

        Source: torch.distributed.tensor.DTensor.redistribute.
        """
        made: DTensor = _functions.redistribute(self, device_mesh, placements, async_op, forward_dtype, backward_dtype)
        return made


def _refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """A method that torch would run on memory, of which a DTensor has none: the process would crash."""

    def refuse(self: DTensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{name}: a DTensor has no memory of its own, only local tensors on its ranks: {instead}")

    refuse.__name__ = name
    refuse.__doc__ = "Refused: the memory is that of the local tensors.\n\nRaises:\n    RuntimeError: Always."
    return refuse


for _name, _instead in {
    "share_memory_": "write to_local().share_memory_() for that of this rank",
    "apply_": "write to_local().apply_(function) for the elements of this rank",
    "map_": "write to_local().map_(other.to_local(), function) for the elements of this rank",
    "map2_": "write to_local().map2_(x.to_local(), y.to_local(), function) for the elements of this rank",
}.items():
    setattr(DTensor, _name, _refused(_name, _instead))


def complete(functions: Any, dispatch: Callable[..., Any]) -> None:
    """Give the class what needs modules above this one: a module with from_local, to_local, redistribute and
    full_tensor, and what runs an op on DTensors. Called once, by `_api`.
    """
    global _functions
    _functions = functions
    DTensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]
