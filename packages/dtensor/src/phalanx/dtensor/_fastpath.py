"""The native fast path: calls whose OpPlan is to run the op on the local tensors, without Python between. Optional.

    phalanx build     # compiles it for the torch that is installed; imports find it then

`phalanx.collectives.extension` describes its place; an empty PHALANX_NATIVE turns it off. Without it everything works
the same, slower; `why_not` says why it is not in use.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.collectives.extension import Extension
from phalanx.dtensor import _autograd, _dispatch
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._tensor import DTensor

_CSRC = Path(__file__).parent / "csrc"


def _start(module: Any) -> None:
    module.open(DTensor, recipe)
    _autograd.use_native(module)
    _dispatch.forget_native = module.forget


EXTENSION = Extension(
    "dtensor",
    "phalanx_dtensor_native",
    [_CSRC / "fastpath.cpp", _CSRC / "boundary.cpp"],
    "DTensors work without one, slower",
    headers=[_CSRC / "dtensor.h"],
    prepare=_start,
)
ensure = EXTENSION.ensure  # for `phalanx build`
load = EXTENSION.load_built
why_not = EXTENSION.why_not


def loaded() -> Any:
    """The module, or None if it is not in use."""
    return EXTENSION.module


def recipe(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Tell native code how to repeat a call that Python has just done, with the arguments that `dispatch` gets.

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
