"""Placements in any order of imports, and what changes in modules of torch that are imported later."""

import subprocess
import sys

import pytest


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("first", ["torch.distributed.tensor", "phalanx.dtensor"])
def test_placements_are_those_of_torch_whichever_module_is_imported_first(first):
    code = f"""
import importlib
importlib.import_module({first!r})
import phalanx.dtensor as ours
made = [ours.Shard(1), ours.Replicate(), ours.Partial("max"), ours.StridedShard(0, 2)]
hashes = [hash(placement) for placement in made]
import torch.distributed.tensor as theirs
from torch.distributed.tensor.placement_types import _StridedShard
expected = [theirs.Shard(1), theirs.Replicate(), theirs.Partial("max"), _StridedShard(0, split_factor=2)]
print([isinstance(one, type(other)) and one == other and other == one for one, other in zip(made, expected)],
      hashes == [hash(placement) for placement in expected])
"""
    assert run(code) == "[True, True, True, True] True"


@pytest.mark.parametrize("module", ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"])
def test_modules_of_torch_that_are_imported_later_know_our_dtensors(module):
    code = f"""
import importlib, sys
import phalanx.dtensor
assert {module!r} not in sys.modules
importlib.import_module({module!r})
from torch.distributed import _state_dict_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param
names = _state_dict_utils.DTensor, _fsdp_param.DTensor
print([isinstance(phalanx.dtensor.DTensor.__new__(phalanx.dtensor.DTensor, __import__("torch").ones(2),
    phalanx.dtensor.AbstractMesh((1,)), [phalanx.dtensor.Replicate()]), name) for name in names])
"""
    assert run(code) == "[True, True]"
