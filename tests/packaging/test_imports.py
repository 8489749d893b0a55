"""What importing a package loads, and that .ci/layers.py finds what it is there to find."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

# What takes long to load, and only some programs need.
HEAVY = {"torch._dynamo", "sympy", "torch.distributed.tensor", "torch.distributed.fsdp"}
MODULES = [
    "phalanx.collectives",
    "phalanx.symm_mem",
    "phalanx.dtensor",
    "phalanx.dtensor.parallel",
    "phalanx.dtensor.experimental",
    "phalanx.dtensor.debug",
]


def modules_after(code: str) -> set[str]:
    """The modules of a fresh interpreter that has run some code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def of_torch() -> set[str]:
    """The modules that torch loads by itself."""
    return modules_after("import torch, torch.distributed")


@pytest.mark.parametrize("module", MODULES)
def test_importing_a_package_loads_nothing_heavy(module: str, of_torch: set[str]) -> None:
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert sorted(HEAVY & loaded - of_torch) == []


WATCHED = """
import gc, sys, torch, torch.distributed
{before}
full = []
gc.callbacks.append(lambda phase, info: full.append(info) if phase == "start" and info["generation"] == 2 else None)
try:
    import phalanx.collectives
except ImportError:
    print("ImportError")
print(len(full), gc.isenabled())
"""


@pytest.mark.parametrize(
    ("before", "printed"),
    [
        ("", ["0", "True"]),
        ("gc.disable()", ["0", "False"]),
        ("sys.modules['phalanx.core'] = None", ["ImportError", "0", "True"]),
    ],
)
def test_importing_collectives_starts_no_full_collection(before: str, printed: list[str]) -> None:
    code = WATCHED.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == printed, done.stderr


@pytest.fixture(scope="module")
def layers() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / ".ci" / "layers.py"
    spec = importlib.util.spec_from_file_location("layers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_circles_are_found_once_each(layers: ModuleType) -> None:
    arrows = {"a": {"b": 1, "d": 2}, "b": {"c": 3}, "c": {"b": 4}, "d": {"c": 5}}
    assert list(layers.circles(arrows)) == ["a circle: b:3 -> c:4 -> b"]


def test_arrows_that_go_upwards_are_found(layers: ModuleType) -> None:
    arrows = {"a": {"b": 7}, "b": {"a": 8}}
    assert list(layers.upward(arrows, {"a": "low", "b": "high"}, ["low", "high"])) == ["a:7: b (high) lies above (low)"]


def test_imports_are_found_wherever_they_stand(layers: ModuleType) -> None:
    code = """
import torch.distributed as dist
from phalanx.core import dtypes
if TYPE_CHECKING:
    from ._group_state import GroupState
def function():
    import torch
    from phalanx.collectives import _registry
    importlib.import_module("phalanx.core.group")
    return dist._world.size, torch._C, torch.ops._c10d_functional.wait_tensor
"""
    found = dict(layers.names_used(ast.parse(code), "phalanx.collectives"))
    assert {name: line for name, line in found.items() if name.startswith("phalanx")} == {
        "phalanx.core.dtypes": 3,
        "phalanx.collectives._group_state.GroupState": 5,
        "phalanx.collectives._registry": 8,
        "phalanx.core.group": 9,
    }
    assert sorted(name for name in found if name.startswith("torch") and layers.private(name)) == [
        "torch._C",
        "torch.distributed._world",
        "torch.distributed._world.size",
    ]
