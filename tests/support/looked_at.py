"""What tools do with objects that they do not know: debuggers, loggers, memory profilers, vLLM's scan of all objects.

from looked_at import look_at
look_at(thing)       # raises AssertionError with the first thing that does not go well
"""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any

# What may come out of a look that is refused. All of them say why.
_REFUSALS = (TypeError, AttributeError, NotImplementedError, ValueError, RuntimeError, pickle.PicklingError, copy.Error)

_LOOKS: dict[str, Callable[[Any], object]] = {
    "hasattr(x, '__dict__')": lambda x: hasattr(x, "__dict__"),
    "vars(x)": vars,
    "dir(x)": dir,
    "inspect.getmembers(x)": inspect.getmembers,
    "repr(x)": repr,
    "str(x)": str,
    "x == x": lambda x: x == x,
    "x == object()": lambda x: x == object(),
    "x != None": lambda x: x != None,  # noqa: E711
    "hash(x)": hash,
    "isinstance(x, dict)": lambda x: isinstance(x, dict),
    "x.__class__": lambda x: x.__class__,
    "copy.copy(x)": copy.copy,
    "copy.deepcopy(x)": copy.deepcopy,
    "pickle.dumps(x)": pickle.dumps,
    "a copy by pickle": lambda x: pickle.loads(pickle.dumps(x)),
}
_NEVER_REFUSED = ("hasattr(x, '__dict__')", "dir(x)", "repr(x)", "isinstance(x, dict)", "x.__class__")


def look_at(thing: Any, expect_unlike: tuple[str, ...] = ()) -> None:
    """Do to an object what tools do. It may refuse, with a text; it must not break.

    Args:
        thing: Any object.
        expect_unlike: Looks to leave out.

    Raises:
        AssertionError: A look raised something else than a refusal, or a refusal without a text.
    """
    for name, look in _LOOKS.items():
        if name in expect_unlike:
            continue
        try:
            made = look(thing)
            del made  # a copy must not release what the original has
        except _REFUSALS as error:
            assert name not in _NEVER_REFUSED, f"{name} of a {type(thing)}: {type(error).__name__}: {error}"
            assert str(error), f"{name} of a {type(thing)}: {type(error).__name__} without a text"
        except Exception as error:
            raise AssertionError(f"{name} of a {type(thing)}: {type(error)}: {error}") from error


def public_objects(module: types.ModuleType) -> list[tuple[str, Any]]:
    """Everything that a module offers: by `__all__`, or all names without an underscore."""
    names = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
    return [(f"{module.__name__}.{name}", getattr(module, name)) for name in names]
