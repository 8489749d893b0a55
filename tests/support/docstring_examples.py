"""Runs the examples in docstrings on two ranks.

from docstring_examples import check_examples

def test_every_public_function_has_an_example_that_gives_what_it_says():
    check_examples("phalanx.collectives")

The names that an example has: torch, dist (torch.distributed), pc (phalanx.collectives), rank (of this process), group
(the default process group, of gloo), what the modules export, and what the test adds. Files go to a folder of the test.
What an example prints is compared on both ranks; with "on rank 0" (or 1) in a comment of the call, on that one.
"""

import doctest
import importlib
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ranks import run_ranks, scratch

__all__ = ["check_examples", "run_examples"]

_ON_RANK = re.compile(r"#.* on rank (\d)")
_ELSEWHERE = "<on another rank>"  # what a call for another rank is expected to print


class _Checker(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return want.startswith(_ELSEWHERE) or super().check_output(want, got, optionflags)


def public_objects(module_name: str) -> dict[str, Any]:
    """The functions and classes that a module exports and that its package defines, by name."""
    module = importlib.import_module(module_name)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    package = ".".join(module_name.split(".")[:2])
    found: dict[str, Any] = {}
    for name in names:
        value = getattr(module, name)
        ours = (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith(package)
        if ours and name == value.__name__:  # and not another name of the same
            found[name] = value
    return found


def _run(
    rank: int,
    size: int,
    module_names: tuple[str, ...],
    add: Callable[[int, int], dict[str, Any]] | None,
    left_out: Collection[str],
) -> dict[str, str]:
    import torch
    import torch.distributed as dist

    import phalanx.collectives as pc

    os.chdir(scratch())
    objects: dict[str, Any] = {}
    for module_name in module_names:
        objects |= public_objects(module_name)
    names = {"torch": torch, "dist": dist, "pc": pc, "rank": rank, "group": dist.group.WORLD}
    names |= {**(add(rank, size) if add is not None else {}), **objects}
    return run_examples(rank, {name: value for name, value in objects.items() if name not in left_out}, names)


def run_examples(rank: int, objects: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, str]:
    """Runs, on one rank, the examples of objects, which have these names. Returns what failed, by name."""
    failed = {}
    for name, value in objects.items():
        test = doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", dict(names), name, None, 0)
        for example in test.examples:
            on = _ON_RANK.search(example.source)
            if on and int(on[1]) != rank and example.want:
                example.want = f"{_ELSEWHERE}\n"
        report: list[str] = []
        runner = doctest.DocTestRunner(_Checker(), verbose=False, optionflags=doctest.ELLIPSIS)
        runner.run(test, out=report.append, clear_globs=False)  # Dynamo removes its own names from them
        if runner.failures:
            failed[name] = "".join(report)
    return failed


def check_examples(
    *module_names: str,
    classes: bool = True,
    without: Collection[str] = (),
    add: Callable[[int, int], dict[str, Any]] | None = None,
    left_out: Collection[str] = (),
) -> None:
    """Every public function and class has an example, and each gives what it says.

    Args:
        module_names: The modules.
        classes: Whether classes must have one, too; those that they have are run in any case.
        without: The names of those that have none.
        add: A function of a module: add(rank, size) gives further names that the examples have.
        left_out: The names of those whose examples cannot run here.
    """
    missing = [
        f"{module_name}.{name}"
        for module_name in module_names
        for name, value in public_objects(module_name).items()
        if ">>> " not in (value.__doc__ or "") and name not in without and (classes or not inspect.isclass(value))
    ]
    assert missing == [], "no example in the docstrings of these"
    for failed in run_ranks(_run, 2, module_names, add, left_out, start_torch=True):
        assert not failed, "\n".join(failed.values())
