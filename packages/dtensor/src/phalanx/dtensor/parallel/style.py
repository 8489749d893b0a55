"""Parallel styles: modules by columns, by rows and on shards of the sequence, and placements of inputs and outputs.

Semantics of torch.distributed.tensor.parallel of torch 2.13, with one difference: modules that share an input share its
conversion, and so the reduction of its gradient (see `_input_cache`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

from phalanx.dtensor._api import distribute_module, distribute_tensor
from phalanx.dtensor._mesh import Mesh
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.parallel._input_cache import Layouts, as_placed, convert, redistributed
from phalanx.dtensor.placement_types import AnyPlacement, Placement, Replicate, Shard, as_placement

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]


class ParallelStyle(ABC):
    """How a module is spread over a mesh. Derive from it, and write `_apply`, for a style of your own.

    Attributes:
        src_data_rank: The rank of the mesh whose parameters count, or None: each rank's own. `parallelize_module` sets
            it.
    """

    src_data_rank: int | None = 0
    _shown: ClassVar[tuple[str, ...]] = ()  # the attributes that repr shows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)}' for name in self._shown)})"

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


class _LinearStyle(ParallelStyle):
    """The common part of ColwiseParallel and RowwiseParallel."""

    desired_input_layouts: Layouts
    _shown = ("input_layouts", "output_layouts", "use_local_output")
    _defaults: ClassVar[tuple[AnyPlacement, AnyPlacement]]  # of the input and the output

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = self._layouts("input_layouts", input_layouts, self._defaults[0])
        self.output_layouts = self._layouts("output_layouts", output_layouts, self._defaults[1])
        self.use_local_output = use_local_output

    def _layouts(self, name: str, given: Placement | None, default: AnyPlacement) -> Layouts:
        """The layouts that an argument means: one placement, for a mesh of one dim."""
        if given is not None and not isinstance(given, Placement):
            who = type(self).__name__
            raise TypeError(f"{who}: {name} must be one placement, not {given!r}: write {name}=Shard(1)")
        return (default if given is None else as_placement(given),)

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

    def _desired(self, module: nn.Module) -> Layouts:
        """The placement of the input that the module works on."""
        return self.desired_input_layouts

    @abstractmethod
    def _partition(self, name: str, module: nn.Module, mesh: Mesh) -> None:
        """Make the module's parameters DTensors."""


class ColwiseParallel(_LinearStyle):
    """An nn.Linear whose output features, or an nn.Embedding whose embedding dim, are sharded over the ranks.

    Modules that get the same input tensor one after the other (q, k, v) share its conversion: its gradient is reduced
    once.

    Args:
        input_layouts: The placement of the input, if it is a plain tensor; Replicate by default. The input is
            redistributed to Replicate: gathered if it is a Shard.
        output_layouts: The placement of the output; sharded on the last dim by default.
        use_local_output: Whether the output is the local tensor, and not the DTensor.

    Raises:
        TypeError: A layout is not a placement.

    Source: torch.distributed.tensor.parallel.ColwiseParallel.
    """

    desired_input_layouts = (Replicate(),)
    _defaults = Replicate(), Shard(-1)

    def _partition(self, name: str, module: nn.Module, mesh: Mesh) -> None:
        # y = x W^T: the rows of a Linear's weight are the columns of W^T.
        dim = 1 if isinstance(module, nn.Embedding) else 0
        for key in list(module._parameters):
            self._spread(module, key, mesh, Shard(dim))


class RowwiseParallel(_LinearStyle):
    """An nn.Linear whose input features, or an nn.Embedding whose rows, are sharded over the ranks.

    The output is a sum of terms of all ranks: all-reduced for Replicate, reduce-scattered for Shard.

    Args:
        input_layouts: The placement of the input, if it is a plain tensor; sharded on the last dim by default.
        output_layouts: The placement of the output; Replicate by default.
        use_local_output: Whether the output is the local tensor, and not the DTensor.

    Raises:
        TypeError: A layout is not a placement.

    Source: torch.distributed.tensor.parallel.RowwiseParallel.
    """

    _defaults = Shard(-1), Replicate()

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
    """A module that works on each element of the sequence alone (LayerNorm, RMSNorm, Dropout), on a sharded sequence.

    Parameters are replicated with the values that each rank has: norms begin with ones and zeros. The gradient of a
    parameter is summed over the shards when it is read.

    Args:
        sequence_dim: The dim of the sequence; a plain input is this rank's shard of it.
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


# ---- inputs and outputs of modules -----------------------------------------------------------------------------------

Given: TypeAlias = Placement | Sequence[Placement | None]
Entries: TypeAlias = tuple[AnyPlacement | None, ...]
_Made: TypeAlias = list[tuple[torch.Tensor, Entries, DTensor]]
"""The conversions of the inputs of one call so far: (input, its layouts, DTensor)."""


def _entries(style: str, name: str, given: Given) -> Entries:
    """One entry for each input or output, None where there is nothing to do."""
    many = (given,) if isinstance(given, Placement) else tuple(given)
    for one in many:
        if one is not None and not isinstance(one, Placement):
            raise TypeError(
                f"{style}: {name} must be a placement, or one placement or None for each tensor, not {given!r}: "
                f"write {name}=(Shard(0), None)"
            )
    return tuple(None if one is None else as_placement(one) for one in many)


def _same_length(style: str, first: str, second: str, a: Any, b: Any) -> None:
    if len(a) != len(b):
        raise ValueError(
            f"{style}: {first} and {second} must have the same length, one entry for each tensor: they have {len(a)} "
            f"and {len(b)}"
        )


class _ConvertingStyle(ParallelStyle):
    """The common part of PrepareModuleInput and PrepareModuleOutput."""

    use_local_output: bool
    _word: ClassVar[str]  # "input" or "output"
    _what: ClassVar[str]

    def _all(
        self, values: Any, layouts: Entries, desired: Entries, mesh: Mesh, done: _Made | None = None
    ) -> tuple[Any, ...]:
        values = values if isinstance(values, tuple) else (values,)
        if len(values) != len(layouts):
            raise ValueError(
                f"{type(self).__name__}: {self._word}_layouts must have one entry for each {self._what} of the module: "
                f"there are {len(layouts)} for {len(values)} {self._word}s; write None for one to leave as it is"
            )
        parts = enumerate(zip(values, zip(layouts, desired, strict=True), strict=True))
        return tuple(self._one(index, *part, mesh, [] if done is None else done) for index, part in parts)

    def _one(self, which: int | str, value: Any, layouts: Entries, mesh: Mesh, done: _Made) -> Any:
        given, wanted = layouts
        if given is None:
            return value
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{type(self).__name__}: {self._word} {which!r} must be a tensor, not {type(value).__name__}: write "
                "None in the place of its layout"
            )
        # Inputs of one call that are one tensor (the query, key and value of an attention) are converted once.
        for one, how, known in () if torch.compiler.is_compiling() else done:
            if one is value and how == layouts:
                return known.to_local() if self.use_local_output else known
        made = value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, (given,))
        if wanted is not None:
            made = redistributed(made, (wanted,))
        done.append((value, layouts, made))
        return made.to_local() if self.use_local_output else made


class PrepareModuleInput(_ConvertingStyle):
    """Convert the inputs of a module to DTensors of the desired placements.

    Args:
        input_layouts: The placements of positional inputs that are plain tensors: one placement, or one for each input,
            with None for an input that is not changed. A DTensor has its own placements.
        desired_input_layouts: The placements to redistribute the inputs to; None for no redistribution.
        input_kwarg_layouts: As `input_layouts` for keyword inputs, by name; other keyword inputs are not changed.
        desired_input_kwarg_layouts: As `desired_input_layouts`, by name.
        use_local_output: Whether the module gets local tensors, and not DTensors.

    Raises:
        ValueError: There is another number of layouts than of desired layouts, or the desired ones are missing.
        TypeError: A layout is not a placement.

    Source: torch.distributed.tensor.parallel.PrepareModuleInput.
    """

    _word, _what = "input", "positional input"
    _shown = (
        "input_layouts",
        "desired_input_layouts",
        "input_kwarg_layouts",
        "desired_input_kwarg_layouts",
        "use_local_output",
    )

    def __init__(
        self,
        *,
        input_layouts: Given | None = None,
        desired_input_layouts: Given | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        who = type(self).__name__
        self.input_layouts = None if input_layouts is None else _entries(who, "input_layouts", input_layouts)
        self.desired_input_layouts: Entries | None = None
        if desired_input_layouts is not None:
            self.desired_input_layouts = _entries(who, "desired_input_layouts", desired_input_layouts)
        self.use_local_output = use_local_output
        if self.input_layouts is not None:
            if self.desired_input_layouts is None:
                raise ValueError(f"{who}: input_layouts was given without desired_input_layouts: give both")
            _same_length(who, "input_layouts", "desired_input_layouts", self.input_layouts, self.desired_input_layouts)
        self.with_kwargs = input_kwarg_layouts is not None
        self.input_kwarg_layouts = _named(who, input_kwarg_layouts)
        self.desired_input_kwarg_layouts = _named(who, desired_input_kwarg_layouts)
        if self.with_kwargs:
            names, wanted = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
            _same_length(who, "input_kwarg_layouts", "desired_input_kwarg_layouts", names, wanted)

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        if self.with_kwargs:

            def prepare(called: nn.Module, inputs: Any, named: Any) -> Any:
                made: _Made = []
                return self._prepared(inputs, device_mesh, made), self._prepared_by_name(named, device_mesh, made)

            module.register_forward_pre_hook(prepare, with_kwargs=True)
        else:
            module.register_forward_pre_hook(lambda called, inputs: self._prepared(inputs, device_mesh, []))
        return module

    def _prepared(self, inputs: Any, mesh: Mesh, made: _Made) -> Any:
        if self.input_layouts is None or self.desired_input_layouts is None:
            return inputs
        return self._all(inputs, self.input_layouts, self.desired_input_layouts, mesh, made)

    def _prepared_by_name(self, named: Mapping[str, Any], mesh: Mesh, made: _Made) -> dict[str, Any]:
        layouts, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        return {
            name: self._one(name, value, (layouts.get(name), desired.get(name)), mesh, made)
            for name, value in named.items()
        }


def _named(who: str, given: Mapping[str, Placement] | None) -> dict[str, AnyPlacement | None]:
    return {name: _entries(who, f"the layout of {name!r}", (one,))[0] for name, one in (given or {}).items()}


class PrepareModuleOutput(_ConvertingStyle):
    """Redistribute the outputs of a module to the desired placements.

    Args:
        output_layouts: The placements of outputs that are plain tensors: one placement, or one for each output, with
            None for an output that is not changed.
        desired_output_layouts: The placements to redistribute the outputs to.
        use_local_output: Whether the outputs are local tensors, and not DTensors.

    Raises:
        ValueError: There is another number of layouts than of desired layouts.
        TypeError: A layout is not a placement.

    Source: torch.distributed.tensor.parallel.PrepareModuleOutput.
    """

    _word = _what = "output"
    _shown = ("output_layouts", "desired_output_layouts", "use_local_output")

    def __init__(self, *, output_layouts: Given, desired_output_layouts: Given, use_local_output: bool = True) -> None:
        who = type(self).__name__
        self.output_layouts = _entries(who, "output_layouts", output_layouts)
        self.desired_output_layouts = _entries(who, "desired_output_layouts", desired_output_layouts)
        self.use_local_output = use_local_output
        _same_length(who, "output_layouts", "desired_output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        def finish(called: nn.Module, inputs: Any, outputs: Any) -> Any:
            done = self._all(outputs, self.output_layouts, self.desired_output_layouts, device_mesh)
            return done[0] if len(done) == 1 else done

        module.register_forward_hook(finish)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: As for
            PrepareModuleInput.
        use_local_input: Whether the module gets local tensors, and not DTensors.
        output_layouts, desired_output_layouts, use_local_output: As for PrepareModuleOutput.

    Raises:
        ValueError, TypeError: As for these.

    Source: torch.distributed.tensor.parallel.PrepareModuleInputOutput.
    """

    def __init__(
        self,
        *,
        input_layouts: Given | None = None,
        desired_input_layouts: Given | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Given,
        desired_output_layouts: Given,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prepare_module_input}, {self.prepare_module_output})"
