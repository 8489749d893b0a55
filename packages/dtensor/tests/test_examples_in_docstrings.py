"""The examples in docstrings of public functions give what they show: on two ranks, whose first one is looked at."""

import doctest
import importlib
import inspect
import os

import torch
from torch.distributed.device_mesh import init_device_mesh

import phalanx.dtensor
import phalanx.dtensor.parallel
from ranks import run_ranks

MODULES = ("", ".debug", ".experimental", ".parallel", ".parallel.input_reshard", ".random")


def public_functions():
    """The public functions of this package, each once."""
    found = {}
    for name in MODULES:
        module = importlib.import_module("phalanx.dtensor" + name)
        for function in (getattr(module, name) for name in module.__all__):
            if inspect.isfunction(function) and function.__module__.startswith("phalanx.dtensor"):
                found[function.__name__] = function
    return found


def runs_examples(rank, world_size, folder):
    os.chdir(folder)
    mesh = init_device_mesh("cpu", (world_size,))
    names = {**vars(phalanx.dtensor.parallel), **vars(phalanx.dtensor), **public_functions()}
    runner = doctest.DocTestRunner(verbose=False)
    ran, wrong = 0, []
    for name, function in public_functions().items():
        for test in doctest.DocTestFinder().find(function, name, globs={**names, "torch": torch, "mesh": mesh}):
            ran += runner.run(test, out=wrong.append).attempted
    # On other ranks local tensors differ, and what only the first rank prints is missing.
    assert rank or not wrong, "".join(wrong)
    return ran


def test_each_public_function_has_an_example_that_gives_what_it_shows(tmp_path):
    assert [name for name, function in public_functions().items() if ">>>" not in (function.__doc__ or "")] == []
    ran = run_ranks(runs_examples, 2, str(tmp_path), start_torch=True)
    assert min(ran) > 2 * len(public_functions()) - 10
    assert (tmp_path / "weight.svg").exists()
