"""The examples in docstrings."""

from docstring_examples import check_examples


def test_every_public_function_has_an_example_that_gives_what_it_says():
    check_examples("phalanx.collectives")
