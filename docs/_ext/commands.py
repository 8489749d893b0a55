"""Sphinx: the options of a command, made from its parser.

`{phalanx-command} MODULE` describes the options of the command whose module has a function `parser`; with `:mode: NAME`
those of a mode of it. `{phalanx-commands}` is a table of all commands.
"""

import argparse
import importlib
from collections.abc import Iterator

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from phalanx.core import _cli

WIDTH = 80  # of a usage


class CommandDirective(SphinxDirective):
    """The usage of a command, what it does, and each option as an entry of the index."""

    required_arguments = 1
    option_spec = {"mode": directives.unchanged}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0])
        self.env.note_dependency(module.__file__)
        parser = module.parser()
        if mode := self.options.get("mode"):
            parser = modes(parser)[mode]
        return self.parse_text_to_nodes("\n".join(described(parser)))


class CommandsDirective(SphinxDirective):
    """What each command does, and the distribution that it is in."""

    def run(self) -> list[nodes.Node]:
        rows = {name: (text, "phalanx-core") for name, (text, _) in _cli.BUILT_IN.items()} | _cli.KNOWN
        lines = ["| command | what it does | distribution |", "|---|---|---|"]
        lines += [
            f"| [`phalanx {name}`](#phalanx-{name}) | {text} | {where} |"
            for name, (text, where) in sorted(rows.items())
        ]
        return self.parse_text_to_nodes("\n".join(lines))


def modes(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the modes of a command."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def described(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Lines of Markdown."""
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=WIDTH)
    yield from (parser.description or "", "", "```text", parser.format_usage().removeprefix("usage: ").rstrip(), "```")
    yield from (f"```{{program}} {parser.prog}", "```")
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        yield from (f"````{{option}} {shown(action)}", (action.help or "").replace("%%", "%"), "````")
    yield from (parser.epilog or "", "")


def shown(action: argparse.Action) -> str:
    """An option as one writes it: `-v, --verbose`, `--ranks N`."""
    metavar = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else "")
    if action.nargs == "?":
        metavar = f"[{metavar}]"
    if not action.option_strings:
        return f"{metavar} ..." if action.nargs == "+" else str(metavar)
    return ", ".join(f"{option} {metavar}".strip() for option in action.option_strings)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("phalanx-command", CommandDirective)
    app.add_directive("phalanx-commands", CommandsDirective)
    return {"parallel_read_safe": True}
