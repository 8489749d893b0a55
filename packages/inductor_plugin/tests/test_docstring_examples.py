"""The examples in docstrings."""

import os

import phalanx.inductor_plugin
from docstring_examples import check_examples

WITHOUT = (
    "CollectiveReport",  # results of `reports`
    "Report",
    "Route",
    "StrictError",
    "add",  # these are for the plug-in itself
    "check_strict",
)


def names(rank, size):
    return {**vars(phalanx.inductor_plugin), "os": os}


def test_every_public_function_has_an_example_that_gives_what_it_says():
    modules = ("phalanx.inductor_plugin", "phalanx.inductor_plugin.config", "phalanx.inductor_plugin.report")
    check_examples(*modules, without=WITHOUT, add=names)
