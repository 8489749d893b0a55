"""The native fast path: calls whose OpPlan is to run the op on the local tensors, without Python between. Optional.

    phalanx build     # compiles it for the torch that is installed; imports find it then

It is kept where `phalanx build` keeps what it compiles (see `phalanx.collectives.building`; an empty PHALANX_NATIVE
turns it off). Without it everything works the same, slower; `why_not` says why it is not in use.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.collectives import building
from phalanx.dtensor import _autograd, _dispatch
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._tensor import DTensor

log = logging.getLogger("phalanx.dtensor")

_CSRC = Path(__file__).parent / "csrc"
_SOURCES = tuple(_CSRC / name for name in ("fastpath.cpp", "boundary.cpp"))
_MODULE = "phalanx_dtensor_native"  # as fastpath.cpp says

_loaded: list[Any] = []


def library() -> Path | None:
    """Where the compiled module is, or would be; None if there is no cache directory."""
    return building.file_of("dtensor", (*_SOURCES, _CSRC / "dtensor.h"), ())


def build() -> Path:
    """Compile it, whether or not it is there; it is used from the next import on, or from `load`. Not collective.

    Returns:
        Where it is.

    Raises:
        RuntimeError: There is no folder for it that only this user may write, or no compiler, or the compiler failed;
            says which.
    """
    path = library()
    if path is None:
        raise RuntimeError("there is no cache directory: set PHALANX_NATIVE to one, or HOME")
    building.compile_file(path, _SOURCES, [], "DTensors work without one, slower")
    return path


def ensure(force: bool) -> tuple[Path, bool]:
    """For `phalanx build`: compile it if it is not there, or if `force`; where it is, and whether it was there."""
    path = library()
    if path is not None and building.is_trusted(path) and not force:
        return path, True
    return build(), False


def load() -> Any | None:
    """The module, from now on in use; None where it was not built. Not collective."""
    path = library()
    if not _loaded and path is not None and building.is_trusted(path):
        try:
            module = building.load_file(_MODULE, path)
        except ImportError as error:
            log.warning("%s cannot be loaded: %s; `phalanx build --force` makes it anew", path, error)
            return None
        _start(module)
    return loaded()


def loaded() -> Any | None:
    """The module, if it is in use."""
    return _loaded[0] if _loaded else None


def why_not() -> str | None:
    """Why the native fast path is not in use; None if it is."""
    if _loaded:
        return None
    path = library()
    if path is None:
        return "PHALANX_NATIVE is empty, or there is no cache directory"
    if not path.exists():
        return f"{path} was not built: run `phalanx build`"
    return f"{path} may be written by others" if not building.is_trusted(path) else f"{path} was not loaded"


def _start(module: Any) -> None:
    module.open(DTensor, recipe)
    _autograd.use_native(module)
    _loaded.append(module)
    _dispatch.on_forget(module.forget)


def recipe(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What native code is to do for a call that Python has just done.

    Args:
        op: An OpOverload.
        args: As `dispatch` gets them.
        kwargs: As `dispatch` gets them.

    Returns:
        ((argument, value) to call it with instead, form of the results, their specs); None if that is not all.
    """
    plan = _dispatch.known_plan(op, args, kwargs)
    if plan is None or plan.call is None:
        return None
    if plan.in_place:
        return plan.sizes, "self", ()
    specs: tuple[DTensorSpec | None, ...] = (plan.direct,)
    if plan.several is None:
        form = "one"
    else:
        specs = plan.several[1]
        lists = [one.type.kind() == "ListType" for one in op._schema.returns]
        if any(lists) and lists != [True]:
            return None
        form = "list" if lists == [True] else "tuple"
    if any(spec is not None and type(spec) is not DTensorSpec for spec in specs):
        return None
    return plan.sizes, form, specs
