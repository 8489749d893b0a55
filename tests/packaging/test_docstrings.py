"""The docstrings of what the packages make public say what every argument is and what is raised."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest

# Users get their instances from functions, and do not call the classes.
MADE_BY_FUNCTIONS = ("SymmetricMemory",)
PACKAGES = ("collectives", "symm_mem", "dtensor", "inductor_plugin")

_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Attributes|Example|Examples):$", re.MULTILINE)
_ENTRY = re.compile(r"^    ([*\w][*\w., ]*): ", re.MULTILINE)
_NAMELESS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def sections(text: str) -> dict[str, list[str]]:
    """The names that each section of a docstring has entries for, by the section's title."""
    parts = _SECTION.split(text)
    return {
        title: [name.strip(" *") for entry in _ENTRY.findall(body) for name in entry.split(",")]
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


class Public(NamedTuple):
    """A public function or method, or the making of a public class: its name, code, parameters and docstring."""

    name: str
    code: Callable[..., Any]
    parameters: list[str]
    text: str


def faults(one: Public) -> Iterator[str]:
    """What is wrong with a docstring."""
    if not one.text.strip():
        yield f"{one.name} has no docstring"
        return
    found = sections(one.text)
    documented = found.get("Args", [])
    yield from (f"{one.name}: Args does not have '{name}'" for name in one.parameters if name not in documented)
    yield from (
        f"{one.name}: Args has '{name}', which it does not take" for name in documented if name not in known(one)
    )
    if raised(one.code) and "Raises" not in found:
        yield f"{one.name} raises {', '.join(sorted(raised(one.code)))}, and has no Raises"


def known(one: Public) -> list[str]:
    """All parameters, those of unknown number included."""
    return list(inspect.signature(one.code).parameters)


def raised(code: Callable[..., Any]) -> set[str]:
    """The classes that a function raises itself: not in functions within it, and not what it caught."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError):  # made at run time
        return set()
    names, left = set(), list(ast.iter_child_nodes(tree))
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            names.add(ast.unparse(node.exc.func).split(".")[-1])
        left.extend(ast.iter_child_nodes(node))
    return {name for name in names if name[0].isupper()} - {"AttributeError", "StopIteration"}


def public_modules(package: str) -> Iterator[ModuleType]:
    """A package and the modules in it whose names have no part that begins with an underscore."""
    top = importlib.import_module(f"phalanx.{package}")
    yield top
    for found in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            yield importlib.import_module(found.name)


def public(package: str) -> Iterator[Public]:
    """All public functions and methods of a package, and the making of its classes, each once."""
    seen: set[int] = set()
    for module in public_modules(package):
        exported = getattr(module, "__all__", None)
        for name in exported or [each for each in vars(module) if not each.startswith("_")]:
            value = getattr(module, name)
            home = str(getattr(value, "__module__", ""))
            if id(value) in seen or not (
                home.startswith(f"phalanx.{package}") if exported else home == module.__name__
            ):
                continue
            seen.add(id(value))
            if inspect.isclass(value):
                yield from of_class(f"{module.__name__}.{name}", value)
            elif inspect.isfunction(inspect.unwrap(value)) if callable(value) else False:
                yield one(f"{module.__name__}.{name}", inspect.unwrap(value))


def of_class(name: str, made: type) -> Iterator[Public]:
    """The class itself, with what its __init__ takes, and its own public methods and properties."""
    init, new = made.__init__, vars(made).get("__new__")  # its own or of a base
    init = new.__func__ if isinstance(new, staticmethod) else init
    text = inspect.getdoc(made) or ""
    written = inspect.isfunction(init) and init.__code__.co_filename == inspect.getsourcefile(made)  # not generated
    if written and made.__name__ not in MADE_BY_FUNCTIONS:
        both = f"{text}\n\n{inspect.cleandoc(init.__doc__ or '')}"
        yield one(name, init, text=both, method=True)
    else:
        yield Public(name, lambda: None, [], text)
    for key, value in vars(made).items():
        code = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        code = code.fget if isinstance(code, property) else code
        if not key.startswith("_") and inspect.isfunction(code) and not is_described_by_a_base(made, key, code):
            yield one(f"{name}.{key}", code, method=not isinstance(value, staticmethod))


def is_described_by_a_base(made: type, key: str, code: Callable[..., Any]) -> bool:
    """Whether a method has no docstring of its own, and takes the place of one that has."""
    return not code.__doc__ and any(getattr(vars(base).get(key), "__doc__", None) for base in made.__mro__[1:])


def one(name: str, code: Callable[..., Any], text: str | None = None, method: bool = False) -> Public:
    """A function or method; its `self` or `cls` is left out."""
    parameters = list(inspect.signature(code).parameters.values())[1 if method else 0 :]
    named = [each.name for each in parameters if each.kind not in _NAMELESS and not each.name.startswith("_")]
    return Public(name, code, named, inspect.getdoc(code) or "" if text is None else text)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_public_names_have_every_argument_and_say_what_is_raised(package):
    checked = list(public(package))
    assert len(checked) > 10
    assert [fault for each in checked for fault in faults(each)] == []
