"""Runs the examples in docstrings on two ranks.

from docstring_examples import check_examples

def test_every_public_function_has_an_example_that_runs():
    check_examples("phalanx.collectives")

The names that an example has: torch, dist (torch.distributed), pc (phalanx.collectives), rank (of this process), group
(the default process group, of gloo), and what the module exports. What it prints is compared on both ranks; with
"# on rank 0" (or 1) in the line of the call, on that one.
"""

import doctest
import importlib
import inspect
import re
from collections.abc import Collection
from typing import Any

from ranks import run_ranks

__all__ = ["check_examples"]

_ON_RANK = re.compile(r"#.* on rank (\d)")


class _Checker(doctest.OutputChecker):
    """Compares nothing where the call is for another rank: `want` begins with a mark then."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return want.startswith(_ELSEWHERE) or super().check_output(want, got, optionflags)


_ELSEWHERE = "<on another rank>"


def public_objects(module_name: str) -> dict[str, Any]:
    """The functions and classes that a module exports and that are defined in this project, by name."""
    module = importlib.import_module(module_name)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found: dict[str, Any] = {}
    for name in names:
        value = getattr(module, name)
        ours = (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith(module_name)
        if ours and name == value.__name__:  # and not another name of the same
            found[name] = value
    return found


def _run(rank: int, size: int, module_names: tuple[str, ...]) -> dict[str, str]:
    import torch
    import torch.distributed as dist

    import phalanx.collectives as pc

    failed = {}
    for module_name in module_names:
        objects = public_objects(module_name)
        for name, value in objects.items():
            names = {**objects, "torch": torch, "dist": dist, "pc": pc, "rank": rank, "group": dist.group.WORLD}
            test = doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", names, name, None, 0)
            for example in test.examples:
                on = _ON_RANK.search(example.source)
                if on and int(on[1]) != rank and example.want:
                    example.want = f"{_ELSEWHERE}\n"
            report: list[str] = []
            runner = doctest.DocTestRunner(_Checker(), verbose=False, optionflags=doctest.ELLIPSIS)
            runner.run(test, out=report.append, clear_globs=False)
            if runner.failures:
                failed[f"{module_name}.{name}"] = "".join(report)
    return failed


def check_examples(*module_names: str, without: Collection[str] = ()) -> None:
    """Every public function and class has an example, and each gives what it says.

    Args:
        module_names: The modules.
        without: The names of those that have none.
    """
    missing = [
        f"{module_name}.{name}"
        for module_name in module_names
        for name, value in public_objects(module_name).items()
        if ">>> " not in (value.__doc__ or "") and name not in without
    ]
    assert missing == [], "no example in the docstrings of these"
    for failed in run_ranks(_run, 2, module_names, start_torch=True):
        assert not failed, "\n".join(failed.values())
