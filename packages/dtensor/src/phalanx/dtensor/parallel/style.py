"""Styles for single modules: by columns, by rows, and on pieces of the sequence.

Semantics of torch.distributed.tensor.parallel of torch 2.13. What differs: modules that share an input share its
conversion, and so the reduction of its gradient (see `joint`).
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from phalanx.dtensor._api import distribute_module, distribute_tensor
from phalanx.dtensor._mesh import Mesh
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.parallel._input_cache import Layouts, as_placed, convert, redistributed
from phalanx.dtensor.placement_types import AnyPlacement, Placement, Replicate, Shard, as_placement


class ParallelStyle(ABC):
    """How a module is spread over a mesh. Derive from it, and write `_apply`, for a style of your own.

    Attributes:
        src_data_rank: The rank of the mesh whose parameters count, or None: each rank's own. `parallelize_module` sets
            it.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        """Change the module in place and return it. Collective over the mesh."""

    def _spread(self, module: nn.Module, name: str, mesh: Mesh, placement: Placement) -> None:
        """Make a parameter a DTensor, if the module has it."""
        parameter = module._parameters.get(name)
        if parameter is not None:
            made = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(made, requires_grad=parameter.requires_grad))


def first_input(style: object, module: nn.Module, inputs: tuple[Any, ...]) -> torch.Tensor:
    """The tensor that a style converts: the first positional input."""
    if not inputs or not isinstance(inputs[0], torch.Tensor):
        seen = type(inputs[0]).__name__ if inputs else "no positional input"
        raise ValueError(
            f"{type(style).__name__}: the input of {module} must be a torch.Tensor or DTensor given by position, "
            f"not {seen}: for others, and for keyword inputs, use PrepareModuleInput on the module around it"
        )
    return inputs[0]


def layout_of(style: str, name: str, given: Placement | None, default: AnyPlacement) -> Layouts:
    """The layouts that an argument of a style means: one placement, for a mesh of one dim."""
    if given is None:
        return (default,)
    if not isinstance(given, Placement):
        raise TypeError(f"{style}: {name} must be one placement, not {given!r}: write {name}=Shard(1)")
    return (as_placement(given),)


class _LinearStyle(ParallelStyle):
    """What Colwise and Rowwise have in common."""

    desired_input_layouts: Layouts

    def __init__(self, input_layouts: Layouts, output_layouts: Layouts, use_local_output: bool) -> None:
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise NotImplementedError(
                f"{type(self).__name__} is for nn.Linear and nn.Embedding, not for {type(module).__name__}: name the "
                "Linear modules within it in the plan, or derive a ParallelStyle of your own"
            )
        desired = self._desired(module)
        # Nobody else needs a copy of what is not converted.
        is_shared = self.input_layouts != desired or desired == (Replicate(),)

        def prepare(called: nn.Module, inputs: Any, mesh: Mesh) -> DTensor:
            given = first_input(self, called, inputs)
            if is_shared:
                return as_placed(given, mesh, self.input_layouts, desired, called)
            return convert(given, mesh, self.input_layouts, desired)

        def finish(called: nn.Module, output: Any, mesh: Mesh) -> torch.Tensor:
            made = redistributed(output, self.output_layouts)
            return made.to_local() if self.use_local_output else made

        return distribute_module(module, device_mesh, self._partition, prepare, finish)

    @abstractmethod
    def _desired(self, module: nn.Module) -> Layouts:
        """The placement of the input that the module works on."""

    @abstractmethod
    def _partition(self, name: str, module: nn.Module, mesh: Mesh) -> None:
        """Make the module's parameters DTensors."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_LinearStyle):
    """An nn.Linear whose output features, or an nn.Embedding whose embedding dim, are spread over the ranks.

    Modules that get one input tensor one after the other (q, k, v) share its conversion: its gradient is reduced once.

    Args:
        input_layouts: The placement of the input, where it is a plain tensor; Replicate by default. It is brought to
            Replicate (gathered, if Shard).
        output_layouts: The placement of the output; sharded on the last dim by default.
        use_local_output: Whether the output is the local tensor, and not the DTensor.

    Raises:
        TypeError: A layout is no placement.

    Source: torch.distributed.tensor.parallel.ColwiseParallel.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            layout_of("ColwiseParallel", "input_layouts", input_layouts, Replicate()),
            layout_of("ColwiseParallel", "output_layouts", output_layouts, Shard(-1)),
            use_local_output,
        )
        self.desired_input_layouts = (Replicate(),)

    def _desired(self, module: nn.Module) -> Layouts:
        return self.desired_input_layouts

    def _partition(self, name: str, module: nn.Module, mesh: Mesh) -> None:
        # y = x W^T: the rows of a Linear's weight are the columns of W^T.
        dim = 1 if isinstance(module, nn.Embedding) else 0
        for key in list(module._parameters):
            self._spread(module, key, mesh, Shard(dim))


class RowwiseParallel(_LinearStyle):
    """An nn.Linear whose input features, or an nn.Embedding whose rows, are spread over the ranks.

    The output is a sum of terms of all ranks: all-reduced for Replicate, reduce-scattered for Shard.

    Args:
        input_layouts: The placement of the input, where it is a plain tensor; sharded on the last dim by default.
        output_layouts: The placement of the output; Replicate by default.
        use_local_output: Whether the output is the local tensor, and not the DTensor.

    Raises:
        TypeError: A layout is no placement.

    Source: torch.distributed.tensor.parallel.RowwiseParallel.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            layout_of("RowwiseParallel", "input_layouts", input_layouts, Shard(-1)),
            layout_of("RowwiseParallel", "output_layouts", output_layouts, Replicate()),
            use_local_output,
        )

    def _desired(self, module: nn.Module) -> Layouts:
        # The indices of an embedding are looked up in all rows: each rank answers for its own.
        self.desired_input_layouts = (Replicate(),) if isinstance(module, nn.Embedding) else (Shard(-1),)
        return self.desired_input_layouts

    def _partition(self, name: str, module: nn.Module, mesh: Mesh) -> None:
        if isinstance(module, nn.Embedding):
            self._spread(module, "weight", mesh, Shard(0))
            return
        self._spread(module, "weight", mesh, Shard(1))
        self._spread(module, "bias", mesh, Replicate())


class SequenceParallel(ParallelStyle):
    """A module that works on each element of the sequence alone (LayerNorm, RMSNorm, Dropout), on pieces of it.

    Parameters are replicated as each rank has them: norms begin with ones and zeros. The gradient of a parameter is the
    sum over the pieces, once somebody reads it.

    Args:
        sequence_dim: The dim of the sequence; a plain input is this rank's piece of it.
        use_local_output: Whether the output is the local tensor, and not the DTensor.

    Source: torch.distributed.tensor.parallel.SequenceParallel.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding: Layouts = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        def prepare(called: nn.Module, inputs: Any, mesh: Mesh) -> DTensor:
            return convert(first_input(self, called, inputs), mesh, self.sequence_sharding, self.sequence_sharding)

        def finish(called: nn.Module, output: Any, mesh: Mesh) -> Any:
            return output.to_local() if self.use_local_output else output

        return distribute_module(module, device_mesh, self._partition, prepare, finish)

    def _partition(self, name: str, module: nn.Module, mesh: Mesh) -> None:
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and not isinstance(parameter, DTensor):
                made = DTensor.from_local(parameter.detach(), mesh, [Replicate()])
                module.register_parameter(key, nn.Parameter(made, requires_grad=parameter.requires_grad))

    def __repr__(self) -> str:
        dim = self.sequence_sharding[0].dim  # type: ignore[union-attr]
        return f"SequenceParallel(sequence_dim={dim}, use_local_output={self.use_local_output})"
