"""The examples in docstrings."""

from torch.distributed.device_mesh import init_device_mesh

import phalanx.dtensor.parallel
from docstring_examples import check_examples


def names(rank, size):
    return {**vars(phalanx.dtensor.parallel), **vars(phalanx.dtensor), "mesh": init_device_mesh("cpu", (size,))}


def test_every_public_function_has_an_example_that_gives_what_it_says():
    modules = ("", ".debug", ".experimental", ".parallel", ".parallel.input_reshard", ".random")
    check_examples(*("phalanx.dtensor" + module for module in modules), classes=False, add=names)
