"""The commands of phalanx-tools: what each needs, and what it says where that is missing."""

import argparse
import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from phalanx.core import _cli
from phalanx.core.commands import CommandError
from phalanx.tools import _commands

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(_commands.__file__).parent


def test_the_benchmark_needs_no_torch_to_say_what_it_can_do():
    code = (
        "import sys\n"
        "from phalanx.tools import _commands\n"
        "try:\n"
        "    _commands.bench(['--help'])\n"
        "finally:\n"
        "    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.split()) == (0, ["False"])
    assert "phalanx bench" in done.stdout


@pytest.mark.parametrize(("command", "missing"), [("demo", "phalanx.dtensor"), ("verify", "expecttest")])
def test_a_command_names_what_is_missing_and_the_extra_that_brings_it(monkeypatch, command, missing):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(CommandError, match=rf"needs {missing}: install phalanx-tools\[{command}\]"):
        getattr(_commands, command)([])


def imported(path):
    """The modules that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_other_distribution_imports_the_tools():
    folders = (ROOT / "core" / "python", *(ROOT / "packages").glob("*/src"))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 100
    assert [path for path in files if any(name.startswith("phalanx.tools") for name in imported(path))] == []


def test_only_files_called_torch_compat_take_what_torch_keeps_private():
    private = [
        path.name
        for path in TOOLS.rglob("*.py")
        if any(part.startswith("_") for name in imported(path) if name.startswith("torch.") for part in name.split("."))
    ]
    assert set(private) == {"_torch_compat.py"}


def test_what_torch_keeps_private_is_where_it_was():
    pytest.importorskip(
        "torch.utils._python_dispatch", reason="torch has moved TorchDispatchMode: adapt phalanx/tools/_torch_compat.py"
    )
    from phalanx.tools._torch_compat import Store, TCPStore, TorchDispatchMode

    assert hasattr(TorchDispatchMode, "__torch_dispatch__")
    assert issubclass(TCPStore, Store)


# ---- the reference ---------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "reference" / "commands.md"
DESCRIBED = re.findall(r"^```\{phalanx-command\} (\S+)$(?:\n:mode: (\w+))?", PAGE.read_text(), re.MULTILINE)


def parser_of(module, mode):
    made = importlib.import_module(module).parser()
    for action in made._actions:
        if mode and isinstance(action, argparse._SubParsersAction):
            return action.choices[mode]
    return made


def test_every_command_is_in_the_reference_with_an_example():
    text = PAGE.read_text()
    programs = [parser_of(*place).prog for place in DESCRIBED]
    for name in (*_cli.BUILT_IN, *_cli.KNOWN):
        assert f"phalanx {name}" in programs
        section = text.partition(f"\n## phalanx {name}\n")[2].partition("\n## ")[0]
        assert f"```sh\nphalanx {name}" in section, name


def test_every_command_of_a_distribution_is_known_to_the_help():
    points = {point.name for point in entry_points(group=_cli.ENTRY_POINTS)}
    assert points == set(_cli.KNOWN)


@pytest.mark.parametrize(("module", "mode"), DESCRIBED)
def test_every_option_says_what_it_does_and_what_it_is_without_it(module, mode):
    for action in parser_of(module, mode)._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        assert action.help and not action.help.startswith(("of ", "for ")), action.option_strings
        assert "%%" not in action.help, action.option_strings
        plain = action.option_strings and action.nargs is None and not isinstance(action, argparse._StoreTrueAction)
        if plain and action.default not in (None, "", (), []):
            assert "default" in action.help, action.option_strings


def test_options_are_shown_as_one_writes_them():
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        commands = pytest.importorskip("commands", reason="needs Sphinx")
    finally:
        sys.path.pop(0)
    made = argparse.ArgumentParser(prog="phalanx x", description="It does.")
    made.add_argument("files", nargs="+", metavar="FILE", help="what to read")
    made.add_argument("-v", "--verbose", action="store_true", help="more by 3%%")
    made.add_argument("--device", choices=["cpu", "cuda"], help="where")
    made.add_argument("--hidden", help=argparse.SUPPRESS)
    lines = list(commands.described(made))
    assert lines[0] == "It does." and lines[3].startswith("phalanx x [-h] [-v]")
    options = [lines[i : i + 2] for i, line in enumerate(lines) if line.startswith("````{option}")]
    assert options == [
        ["````{option} FILE ...", "what to read"],
        ["````{option} -v, --verbose", "more by 3%"],
        ["````{option} --device {cpu,cuda}", "where"],
    ]
