"""Sphinx: the directive `environment-variables` lists those of `phalanx.core.environment`, the table in the library.

Its argument chooses the rows: `public`, or `internal` for those that only tests and developers of Phalanx set.
"""

from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from phalanx.core.environment import Variable, variables


def _entry(variable: Variable) -> Iterator[str]:
    yield f"```{{envvar}} {variable.name}"
    yield f"{variable.meaning} Read by `{variable.reader}`."
    yield ""
    yield f"Values: {variable.values}. Default: {variable.default}."
    yield "```"
    yield ""


def _table(rows: list[Variable]) -> Iterator[str]:
    yield "| variable | values | default | meaning |"
    yield "|---|---|---|---|"
    for row in rows:
        yield f"| `{row.name}` | {row.values} | {row.default} | {row.meaning} |"


class EnvironmentVariables(Directive):
    """The rows of the table, as Markdown."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        internal = self.arguments[0] == "internal"
        rows = [row for row in variables() if row.internal == internal]
        lines = list(_table(rows)) if internal else [line for row in rows for line in _entry(row)]
        node = nodes.Element()
        self.state.nested_parse(StringList(lines, source="core/src/base/environment.h"), self.content_offset, node)
        return node.children


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("environment-variables", EnvironmentVariables)
    return {"parallel_read_safe": True}
