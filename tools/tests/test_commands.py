"""The commands of phalanx-tools: what each needs, and what it says where that is missing."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

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
