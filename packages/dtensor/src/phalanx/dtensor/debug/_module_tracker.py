"""Which module runs, forward or backward, and what its parameters are."""

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import in_backward, tree_leaves

GLOBAL = "Global"


class ModuleTracker:
    """Knows the module that runs, in the forward pass, in the backward pass, and where that runs a forward again.

    Attributes:
        module_parameters_dict: By module, its own parameters by name.
        sharding_dict: By `module.parameter`, the placements of a DTensor.
        module_helper_dict: By module in the order in which they ran first: "depth", "module_type", "parameters".
        module_parents_dict: By module, the modules around it.
    """

    def __init__(self) -> None:
        self.module_parameters_dict: dict[str, dict[str, torch.Tensor]] = {}
        self.sharding_dict: dict[str, Any] = {}
        self.module_helper_dict: dict[str, dict[str, Any]] = {}
        self.module_parents_dict: dict[str, tuple[str, ...]] = {}
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._taken: set[str] = set()
        self._forward: list[str] = []
        self._backward: str = GLOBAL
        self._handles: list[RemovableHandle] = []

    @property
    def name(self) -> str:
        """The module that runs; "Global" outside all."""
        if self._forward:
            return self._forward[-1]
        return self._backward if self.is_bw else GLOBAL

    @property
    def is_bw(self) -> bool:
        """Whether a backward pass runs."""
        return in_backward()

    @property
    def activation_checkpointing(self) -> bool:
        """Whether a forward runs again within a backward pass."""
        return self.is_bw and bool(self._forward)

    def chain(self) -> tuple[str, ...]:
        """The module that runs and those around it, without repeating a name."""
        name = self.name
        return tuple(dict.fromkeys((name, *self.module_parents_dict.get(name, ()))))

    def __enter__(self) -> "ModuleTracker":
        for one in (self.module_parameters_dict, self.sharding_dict, self.module_helper_dict, self.module_parents_dict):
            one.clear()
        self._names.clear()
        self._taken = {GLOBAL}
        self._forward, self._backward = [], GLOBAL
        self.module_helper_dict[GLOBAL] = {"depth": 0}
        self.module_parents_dict[GLOBAL] = ()
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forward = []

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        name = self._name_of(module)
        parents = tuple(reversed(self._forward))
        self._forward.append(name)
        if not self.is_bw:
            self._backward = GLOBAL
            self._note(name, module, (*parents, GLOBAL))
        for one in _differentiable(inputs):
            one.register_hook(lambda _: self._left(name, parents[0] if parents else GLOBAL))  # type: ignore[no-untyped-call]

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._forward:
            name = self._forward.pop()
            for one in _differentiable(outputs):
                one.register_hook(lambda _: self._entered(name))  # type: ignore[no-untyped-call]

    # The backward of a module begins when a gradient of its outputs is there, and is over when one of its inputs is.
    # The output of one module may be that of the module around it, or the input of the next: the hooks of a tensor run
    # in the order in which they were made, so each looks where the pass is before it says where it goes.

    def _entered(self, name: str) -> None:
        if not self._is_within(name):
            self._backward = name

    def _left(self, name: str, parent: str) -> None:
        if self._is_within(name):
            self._backward = parent

    def _is_within(self, name: str) -> bool:
        return name == self._backward or name in self.module_parents_dict.get(self._backward, ())

    # ---- what a module is --------------------------------------------------------------------------------------------

    def _name_of(self, module: nn.Module) -> str:
        known = self._names.get(module)
        if known is not None:
            return known
        # A module that runs within another is named after its place there; another one after its class.
        for path, each in module.named_modules():
            if each not in self._names:
                base = type(module).__name__
                name = self._free(base) if not path else f"{self._names[module]}.{path}"
                self._taken.add(name)
                self._names[each] = name
        return self._names[module]

    def _free(self, base: str) -> str:
        name, count = base, 1
        while name in self._taken:
            name, count = f"{base}_{count}", count + 1
        return name

    def _note(self, name: str, module: nn.Module, parents: tuple[str, ...]) -> None:
        if name in self.module_helper_dict:
            return
        own: dict[str, Any] = {"depth": len(parents), "module_type": type(module).__qualname__}
        self.module_helper_dict[name] = own
        self.module_parents_dict[name] = parents
        for key, parameter in module.named_parameters(recurse=False):
            self.module_parameters_dict.setdefault(name, {})[key] = parameter.data
            if isinstance(parameter, DTensor):
                self.sharding_dict[f"{name}.{key}"] = parameter.placements
                own.setdefault("parameters", {})[key] = str(parameter.placements)


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.grad_fn is not None]
