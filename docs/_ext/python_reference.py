"""The Python reference: `.. phalanx-module:: NAME` documents the public names of a module, with a table of them on top.

Public are the names in `__all__`; in a module without it, the functions and classes that it defines and its constants,
but for those that begin with an underscore and those that its package has in its own `__all__`. A name that means an
object of another public module, or of torch, is an entry that links there.
"""

import ast
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from c_reference import known
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import stringify_annotation

PACKAGES = ("phalanx.core", "phalanx.collectives", "phalanx.symm_mem", "phalanx.dtensor", "phalanx.dtensor.parallel",
            "phalanx.inductor_plugin")  # fmt: skip
KINDS = {"Functions": "function", "Classes": "class", "Exceptions": "exception", "Other names": "data"}
# Annotations that autodoc would write out.
ALIASES = (("phalanx.collectives", "GroupLike"), ("phalanx.dtensor.placement_types", "AnyPlacement"),
           ("phalanx.dtensor.placement_types", "AnyShard"))  # fmt: skip


def _constants(module: ModuleType) -> Iterable[str]:
    """Names that a module assigns at its top, in capitals."""
    for node in ast.parse(inspect.getsource(module)).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper())


def comment_on(value: Any, name: str) -> str:
    """The comment above or behind the assignment of a constant, in the module of ours that makes it."""
    for module in [each for key, each in sorted(sys.modules.items()) if key.startswith("phalanx.")]:
        if vars(module).get(name) is not value or not getattr(module, "__file__", "").endswith(".py"):
            continue
        source = inspect.getsource(module)
        found = re.search(rf"((?:^# .*\n)*)^{name}\b[^=\n]*= ?(?:.*?  # (.*))?", source, re.MULTILINE)
        if found and any(found.groups()):
            text = found[2] or re.sub(r"^# ?", "", found[1], flags=re.MULTILINE)
            text = " ".join(text.split())
            first = text.partition(" ")[0]
            text = text if re.search(r"[._(]\w", first) else text[:1].upper() + text[1:]
            return "" if text.startswith(("----", "Mypy:")) else text + ("" if text.endswith(".") or not text else ".")
    return f"As :c:func:`{name}` in C." if name in known() and name.islower() else ""


def public_names(name: str) -> list[str]:
    """The public names of a module."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    package = sys.modules[name.rpartition(".")[0]]
    found = {key for key, value in vars(module).items() if getattr(value, "__module__", "") == name and callable(value)}
    found |= set(_constants(module))
    return sorted(key for key in found if not key.startswith("_") and key not in getattr(package, "__all__", ()))


def kind_of(value: Any) -> str:
    """The kind of a name, a key of KINDS."""
    if inspect.isclass(value):
        return "Exceptions" if issubclass(value, BaseException) else "Classes"
    return "Functions" if inspect.isroutine(value) or hasattr(value, "__wrapped__") else "Other names"


def home_of(module: str, name: str) -> str:
    """The full name under which an object is documented, if this is not the one that is given; else nothing."""
    value = getattr(importlib.import_module(module), name)
    origin = getattr(value, "__module__", "")
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return ""
    if not origin.startswith("phalanx"):
        return f"{origin}.{value.__qualname__}"
    for package in PACKAGES:
        there = importlib.import_module(package)
        if package != module and name in there.__all__ and getattr(there, name) is value:
            return f"{package}.{name}" if package in module or origin.startswith(package) else ""
    return ""


def entry(module: str, name: str) -> list[str]:
    """The directive that documents a name."""
    value, full, home = getattr(importlib.import_module(module), name), f"{module}.{name}", home_of(module, name)
    kind = KINDS[kind_of(value)]
    if home:
        where = f":py:obj:`{home}`" if home.startswith("phalanx") else f"``{home}``, of torch"
        return [f".. py:{kind}:: {name}", f"   :module: {module}", "", f"   The same as {where}.", ""]
    lines = [f".. auto{kind}:: {full}"]
    if kind in ("class", "exception"):
        lines += ["   :members:"] + (["   :inherited-members: object"] if full == "phalanx.core.Group" else [])
    if kind == "data":
        lines += ["   :no-value:"]
    return [*lines, ""]


def summary(module: str, name: str) -> str:
    """The first sentence of a docstring."""
    value = getattr(importlib.import_module(module), name)
    text = comment_on(value, name) if kind_of(value) == "Other names" else inspect.getdoc(value) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    end = re.search(r"[.:](?= [A-Z`]|$)", first)
    return (first[: end.start()] if end else first) + ("." if first else "")


def module_lines(name: str) -> list[str]:
    """The whole of a module."""
    module, names = importlib.import_module(name), public_names(name)
    package, _, last = name.rpartition(".")
    lines = [f".. automodule:: {name}", "   :no-members:"]
    if last in getattr(sys.modules[package], "__all__", ()):  # a function has the same name
        lines += ["   :no-index:"]
    lines += [""]
    groups = {kind: [each for each in names if kind_of(getattr(module, each)) == kind] for kind in KINDS}
    for kind, members in groups.items():
        if members:
            lines += [f".. rubric:: {kind}", ""] if len([True for each in groups.values() if each]) > 1 else []
            lines += [".. list-table::", "   :widths: 30 70", ""]
            for each in members:
                lines += [f"   * - :py:obj:`{each} <{name}.{each}>`", f"     - {summary(name, each)}"]
            lines += [""]
    for members in groups.values():
        for each in members:
            lines += entry(name, each)
    return lines


class PhalanxModule(SphinxDirective):
    """A module with its public names."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        self.env.note_dependency(__file__)
        self.env.note_dependency(str(importlib.import_module(name).__file__))
        node = nodes.section()
        node.document = self.state.document
        self.state.nested_parse(StringList(module_lines(name), source=name), self.content_offset, node, match_titles=1)
        return node.children


def skip_member(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Fields of named tuples and values of enumerations are in the text of their class."""
    return True if type(value).__name__ == "_tuplegetter" or isinstance(value, enum.Enum) else None


def process_docstring(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Adds the values of an enumeration."""
    for number in range(len(lines) - 1, 1, -1):  # code without the marks that say so
        starts = lines[number].startswith("    ") and not lines[number - 1].strip()
        before = lines[number - 2].rstrip()
        if starts and before and not before.startswith((" ", "..", ":")) and not before.endswith("::"):
            lines[number:number] = [".. code-block:: python", ""]
    if what == "data":
        lines[:] = [comment_on(value, name.rpartition(".")[2]), ""]
    if what == "class" and issubclass(value, enum.Enum):
        lines += ["", "Values: " + ", ".join(f"``{each.name}``" for each in value) + ".", ""]


def process_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Writes the names of annotations that have one."""
    for module, alias in ALIASES:
        written = stringify_annotation(getattr(importlib.import_module(module), alias), "smart")
        signature = signature and signature.replace(written, alias)
        result = result and result.replace(written, alias)
    return signature, result


def setup(app: Sphinx) -> dict[str, Any]:
    """For Sphinx."""
    app.setup_extension("sphinx.ext.autodoc")
    app.add_directive("phalanx-module", PhalanxModule)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
