"""Styles for what goes into a module and comes out of it.

Semantics of torch.distributed.tensor.parallel of torch 2.13.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from phalanx.dtensor._mesh import Mesh
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.parallel._input_cache import redistributed
from phalanx.dtensor.parallel.style import ParallelStyle
from phalanx.dtensor.placement_types import AnyPlacement, Placement, as_placement

Given: TypeAlias = Placement | Sequence[Placement | None]
Entries: TypeAlias = tuple[AnyPlacement | None, ...]
_Made: TypeAlias = list[tuple[torch.Tensor, tuple[AnyPlacement | None, ...], DTensor]]
"""What was made of the inputs of one call so far: (input, its layouts, DTensor)."""


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


class PrepareModuleInput(ParallelStyle):
    """Make DTensors of the inputs of a module, in the placements that it wants.

    Args:
        input_layouts: The placements of positional inputs that are plain tensors: one, or one for each input with None
            where an input is to stay as it is. A DTensor stays in the placements that it has until it is brought to the
            desired ones.
        desired_input_layouts: The placements to bring them to; None keeps what they have.
        input_kwarg_layouts: The same for keyword inputs, by name; what is not named stays as it is.
        desired_input_kwarg_layouts: The same, by name.
        use_local_output: Whether the module gets local tensors, and not DTensors.

    Raises:
        ValueError: Layouts and desired layouts are not as many, or the desired ones are missing.
        TypeError: A layout is no placement.

    Source: torch.distributed.tensor.parallel.PrepareModuleInput.
    """

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
                raise ValueError(f"{who}: with input_layouts desired_input_layouts are needed")
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
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        if len(given) != len(self.input_layouts):
            raise ValueError(
                f"{type(self).__name__}: input_layouts must have one entry for each positional input of the module: "
                f"there are {len(self.input_layouts)} for {len(given)} inputs; write None for one to leave as it is"
            )
        parts = zip(given, self.input_layouts, self.desired_input_layouts, strict=True)
        return tuple(self._one(index, *part, mesh, made) for index, part in enumerate(parts))

    def _prepared_by_name(self, named: Mapping[str, Any], mesh: Mesh, made: _Made) -> dict[str, Any]:
        return {
            name: self._one(
                name, value, self.input_kwarg_layouts.get(name), self.desired_input_kwarg_layouts.get(name), mesh, made
            )
            for name, value in named.items()
        }

    def _one(
        self,
        which: int | str,
        value: Any,
        given: AnyPlacement | None,
        wanted: AnyPlacement | None,
        mesh: Mesh,
        done: _Made,
    ) -> Any:
        if given is None:
            return value
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{type(self).__name__}: input {which!r} must be a tensor, not {type(value).__name__}: write None "
                "in the place of its layout"
            )
        # Inputs of one call that are one tensor (the query, key and value of an attention) are converted once.
        layouts = (given, wanted)
        for one, how, known in () if torch.compiler.is_compiling() else done:
            if one is value and how == layouts:
                return known.to_local() if self.use_local_output else known
        made = value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, (given,))
        if wanted is not None:
            made = redistributed(made, (wanted,))
        done.append((value, layouts, made))
        return made.to_local() if self.use_local_output else made

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, use_local_output={self.use_local_output})"
        )


def _named(who: str, given: Mapping[str, Placement] | None) -> dict[str, AnyPlacement | None]:
    return {name: _entries(who, f"the layout of {name!r}", (one,))[0] for name, one in (given or {}).items()}


class PrepareModuleOutput(ParallelStyle):
    """Bring the outputs of a module to the placements wanted.

    Args:
        output_layouts: The placements of outputs that are plain tensors: one, or one for each output with None where an
            output is to stay as it is.
        desired_output_layouts: The placements to bring them to.
        use_local_output: Whether local tensors come out, and not DTensors.

    Raises:
        ValueError: Layouts and desired layouts are not as many.
        TypeError: A layout is no placement.

    Source: torch.distributed.tensor.parallel.PrepareModuleOutput.
    """

    def __init__(self, *, output_layouts: Given, desired_output_layouts: Given, use_local_output: bool = True) -> None:
        who = type(self).__name__
        self.output_layouts = _entries(who, "output_layouts", output_layouts)
        self.desired_output_layouts = _entries(who, "desired_output_layouts", desired_output_layouts)
        self.use_local_output = use_local_output
        _same_length(who, "output_layouts", "desired_output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        module.register_forward_hook(lambda called, inputs, outputs: self._prepared(outputs, device_mesh))
        return module

    def _prepared(self, outputs: Any, mesh: Mesh) -> Any:
        given = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(given) != len(self.output_layouts):
            raise ValueError(
                f"{type(self).__name__}: output_layouts must have one entry for each output of the module: there are "
                f"{len(self.output_layouts)} for {len(given)} outputs; write None for one to leave as it is"
            )
        parts = zip(given, self.output_layouts, self.desired_output_layouts, strict=True)
        done = tuple(self._one(index, *part, mesh) for index, part in enumerate(parts))
        return done[0] if len(done) == 1 else done

    def _one(self, which: int, value: Any, given: AnyPlacement | None, wanted: AnyPlacement | None, mesh: Mesh) -> Any:
        if given is None:
            return value
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{type(self).__name__}: output {which} must be a tensor, not {type(value).__name__}: write None "
                "in the place of its layout"
            )
        made = value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, (given,))
        if wanted is not None:
            made = redistributed(made, (wanted,))
        return made.to_local() if self.use_local_output else made

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, use_local_output={self.use_local_output})"
        )


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
