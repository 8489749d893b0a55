"""What can be imported from torch.distributed.tensor can be imported from phalanx.dtensor, under the same path."""

import importlib
import inspect
import pkgutil
import types

import pytest
import torch.distributed.tensor

OURS, THEIRS = "phalanx.dtensor", "torch.distributed.tensor"

# Modules and names of torch that have no counterpart, and the reason.
LEFT_OUT = {
    ".parallel.ddp": "it has private names only, hooks by which DDP of torch wraps modules with DTensors of torch",
    ".parallel.fsdp": "DTensorExtensions is for FSDP1, which takes no DTensor of another class",
}

# Private paths that programs outside torch import as well.
PRIVATE = {
    "": ["_StridedShard"],
    "._api": ["DTensor", "distribute_module", "distribute_tensor"],
    "._dtensor_spec": ["DTensorSpec", "TensorMeta"],
    "._random": ["is_rng_supported_mesh", "manual_seed"],
    "._utils": ["compute_local_shape_and_global_offset"],
    ".placement_types": ["_StridedShard"],
}


def public_modules() -> list[str]:
    """The public modules of torch.distributed.tensor, each without that prefix."""
    found = pkgutil.walk_packages(torch.distributed.tensor.__path__, f"{THEIRS}.")
    paths = [""] + [module.name.removeprefix(THEIRS) for module in found]
    return [path for path in paths if not any(part.startswith("_") for part in path.split("."))]


def names_of(path: str) -> list[str]:
    """The public names of a module of torch: its `__all__`, or what it defines and shows."""
    module = importlib.import_module(THEIRS + path)
    names = list(getattr(module, "__all__", ()))
    if path == "":  # not in __all__, but documented there
        names += ["DeviceMesh", "init_device_mesh"]
    return names or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


@pytest.mark.parametrize("path", public_modules())
def test_each_public_name_of_torch_is_here(path):
    if path in LEFT_OUT:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(OURS + path)
        return
    ours = importlib.import_module(OURS + path)
    assert [name for name in names_of(path) if not hasattr(ours, name)] == []
    # In __all__ too: `from phalanx.dtensor.parallel import *` gives what it gives with torch.
    assert set(getattr(importlib.import_module(THEIRS + path), "__all__", ())) <= set(ours.__all__)


@pytest.mark.parametrize("path", PRIVATE)
def test_private_names_that_programs_use_are_here(path):
    theirs, ours = importlib.import_module(THEIRS + path), importlib.import_module(OURS + path)
    for name in PRIVATE[path]:
        assert hasattr(theirs, name) and hasattr(ours, name), name


def test_functions_take_the_arguments_that_they_take_in_torch():
    compared = 0
    for path in public_modules():
        if path in LEFT_OUT:
            continue
        theirs, ours = importlib.import_module(THEIRS + path), importlib.import_module(OURS + path)
        for name in names_of(path):
            if not isinstance(getattr(theirs, name), types.FunctionType):
                continue
            expected = inspect.signature(getattr(theirs, name)).parameters
            got = inspect.signature(getattr(ours, name)).parameters
            missing = [argument for argument in expected if argument not in got]
            assert not missing, f"{path}.{name} has no argument {missing}"
            compared += 1
    assert compared > 15
