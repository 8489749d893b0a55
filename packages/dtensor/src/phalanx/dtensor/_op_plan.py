"""The plan of a call of an op: made once, and run for every call of the same kind.

An OpPlan says which inputs move where, what changes among the arguments, which op runs on the local tensors, and what
the results are. It knows no rules: `_sharding_prop` makes it, `_dispatch` finds it, and Python (here) and native code
run it with the same results.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch

from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._graph_agreement import moved_once
from phalanx.dtensor._index_bounds import Bound, check_bounds
from phalanx.dtensor._mesh import mesh_id
from phalanx.dtensor._mode import is_strict, strict_error
from phalanx.dtensor._redistribute import RedistributePlan
from phalanx.dtensor._rules.local_adjustments import LocalWork, results_of
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import bare, is_recorded, is_torch_dtensor

Run = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Move:
    """One input that is redistributed before the op runs."""

    argument: int  # counted in the op's schema
    place: int | None  # where in it, if it is a list
    plan: RedistributePlan


@dataclass(slots=True, eq=False)
class OpPlan:
    """How one call is done."""

    run: Run  # called with (op, args, kwargs): does it
    _: KW_ONLY
    moves: tuple[Move, ...] = ()  # the communication before the op
    text: str = ""  # the rule, or why there is none: for `explain`
    specs: tuple[DTensorSpec | None, ...] = ()  # of the results, None for one that is no tensor
    # What runs on the local tensors, if that is all: then `_dispatch` or native code does it, without `run`. None
    # otherwise, and then what follows says nothing.
    call: Callable[..., Any] | None = None
    sizes: tuple[tuple[int, Any], ...] = ()  # (argument, value): what else it is called with
    direct: DTensorSpec | None = None  # the spec of the result, if there is one result
    in_place: bool = False  # whether it returns its first argument, into which it writes
    several: tuple[Any, tuple[DTensorSpec | None, ...]] | None = None  # (list or tuple, their specs or None)


# ---- arguments ------------------------------------------------------------------------------------------------------


def bound(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Every argument of the op's schema, in order, with defaults filled in."""
    count = len(args)
    return [
        args[index] if index < count else kwargs.get(one.name, one.default_value)
        for index, one in enumerate(op._schema.arguments)
    ]


def call_bound(op: Any, values: Sequence[Any]) -> Any:
    """Call an op with every argument of its schema."""
    arguments = op._schema.arguments
    keyword = {one.name: value for value, one in zip(values, arguments, strict=True) if one.kwarg_only}
    if not keyword:
        return op(*values)
    return op(*values[: len(values) - len(keyword)], **keyword)


def is_list(value: Any) -> bool:
    """Whether an argument is a list of some kind."""
    return type(value) is list or type(value) is tuple


def flat(values: Iterable[Any]) -> list[Any]:
    """Arguments with the elements of lists in the place of these."""
    return [one for value in values for one in (value if is_list(value) else (value,))]


def local_of(value: Any) -> Any:
    """An argument with local tensors in the place of DTensors."""
    if isinstance(value, DTensor):
        return value._local_tensor
    if is_list(value):
        return [local_of(one) for one in value]
    return value


def written_arguments(op: Any) -> tuple[int, ...]:
    """The arguments into which an op writes."""
    return tuple(
        index
        for index, one in enumerate(op._schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )


def returned_argument(op: Any, index: int) -> int | None:
    """The argument that result `index` is, for an op that writes into it and returns it."""
    alias = op._schema.returns[index].alias_info if index < len(op._schema.returns) else None
    if alias is None or not alias.is_write:
        return None
    for argument, one in enumerate(op._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write and one.alias_info.before_set & alias.before_set:
            return argument
    return None


# ---- views of what lies otherwise than it says -----------------------------------------------------------------------

VIEW = torch.ops.aten.view.default


def viewed(local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """View a local tensor, or copy it where its strides do not allow what those of the whole allow.

    Torch's kernels for meta tensors, which say how a whole result lies, differ from those of a CPU where arguments lie
    in several ways (`elu_backward`, `xlogy`). Autograd takes the copy for a view, so that `check_writable` knows it.
    """
    try:
        seen: torch.Tensor = bare(VIEW)(local, shape)
    except RuntimeError:
        return local.reshape(shape)
    return seen


def check_writable(op: Any, tensor: Any) -> None:
    """Refuse to write into a view that is a copy: the tensor viewed would not change."""
    if getattr(tensor, "_is_view_of_copy", False) or _lies_elsewhere(tensor):
        raise RuntimeError(
            f"{op}: it writes into a view that needed communication, or another layout: such a view is a copy, so the "
            "original tensor would not change. Redistribute that tensor before the view is taken, or clone() the "
            "view to write into it"
        )


def _lies_elsewhere(tensor: Any) -> bool:
    """Whether autograd takes a DTensor for a view of one whose local tensor has other memory."""
    base = tensor._base if isinstance(tensor, DTensor) else None
    if not isinstance(base, DTensor):
        return False
    mine, theirs = tensor._local_tensor, base._local_tensor
    if type(mine) is not torch.Tensor or type(theirs) is not torch.Tensor:
        return False
    # The storage, and not the address of its memory: a rank that has nothing of the tensor has none.
    return bool(mine.untyped_storage()._cdata != theirs.untyped_storage()._cdata)


class RulePlan(OpPlan):
    """An OpPlan that a rule gave, in its general form: moves, other arguments, shares of means, several results."""

    __slots__ = ("bounds", "is_view", "is_view_of_copy", "local_op", "returned", "shape", "work", "written")

    def __init__(
        self,
        op: Any,
        moves: tuple[Move, ...],
        work: LocalWork | None,
        specs: tuple[DTensorSpec | None, ...],
        shape: Any,
        text: str,
        bounds: tuple[Bound, ...] = (),
    ) -> None:
        """`op` runs on the local tensors; `work` is what this rank does differently, None outside the mesh. `shape` is
        the form of what the op returns: (type, entries), where an entry is the number of a spec or None.
        """
        super().__init__(self._run, moves=moves, text=text, specs=specs)
        self.local_op = op
        self.work = work
        self.shape = shape
        self.returned = tuple(returned_argument(op, index) for index in range(len(op._schema.returns)))
        # Lists of them are looked at by who takes lists.
        self.written = tuple(
            index for index in written_arguments(op) if "[]" not in str(op._schema.arguments[index].type)
        )
        self.is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in op._schema.returns)
        self.is_view_of_copy = bool(moves) and self.is_view
        self.bounds = bounds

    def _run(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = bound(op, args, kwargs)
        # Every rank refuses the call, whatever its local tensors are.
        if self.moves and is_strict():
            raise strict_error(op, self)
        for index in self.written:
            if given[index] is not None:
                check_writable(op, given[index])
        work = self.work
        if work is None:
            return self._wrapped(given, [], partial(self._outside, given))
        values = [local_of(value) for value in given]
        if self.bounds:
            self._check_bounds(op, values, before=True)
        for move in self.moves:
            holder, at = (values, move.argument) if move.place is None else (values[move.argument], move.place)
            holder[at] = self._moved(holder[at], move.plan)
        if self.bounds:
            self._check_bounds(op, values, before=False)
        if work.fills:
            device = next(one for one in flat(values) if isinstance(one, torch.Tensor)).device
            results = work.filled([one.dtype for one in self.specs if one is not None], device)
            return self._wrapped(given, results, None)
        for argument, value in work.sizes:
            values[argument] = value
        result = viewed(values[0], values[1]) if self.local_op is VIEW else call_bound(self.local_op, values)
        if self.shape is None:
            return result
        results = results_of(op, values, result)
        if work.scales:
            results = work.finish(results)
        return self._wrapped(given, results, None)

    def _check_bounds(self, op: Any, values: list[Any], before: bool) -> None:
        for one in self.bounds:
            if one.before == before:
                index = values[one.argument]
                check_bounds(op, index if one.place is None else index[one.place], one)

    def _moved(self, local: torch.Tensor, plan: RedistributePlan) -> torch.Tensor:
        # The tensor of which a view is taken may be written into.
        if self.is_view_of_copy or not is_recorded():
            return plan.run(local)
        source, target = plan.source, plan.target
        key = mesh_id(source.mesh), source.placements, mesh_id(target.mesh), target.placements
        return moved_once(local, key, lambda: plan.run(local))

    def _outside(self, given: list[Any], spec: DTensorSpec) -> torch.Tensor:
        """The result on a rank outside the mesh: an empty tensor; for a view, an empty view of the same memory."""
        viewed = local_of(given[0])
        if self.is_view and not self.moves and isinstance(viewed, torch.Tensor):
            return viewed.view(spec.dtype)
        return torch.empty(0, dtype=spec.dtype, device=spec.mesh.device_type)

    def _wrapped(self, given: list[Any], results: Sequence[torch.Tensor], make: Any) -> Any:
        kind, entries = self.shape
        done: list[Any] = []
        for index, entry in enumerate(entries):
            argument = self.returned[index] if kind is None or index < len(self.returned) else None
            if argument is not None:
                done.append(given[argument])
            elif entry is None:
                done.append(None)
            else:
                spec = self.specs[entry]
                assert spec is not None
                local = make(spec) if make is not None else results[entry]
                wrapped = DTensor._wrap(local, spec)
                if self.is_view_of_copy:
                    wrapped._is_view_of_copy = True  # type: ignore[attr-defined]
                done.append(wrapped)
        if kind is None:
            return done[0]
        return kind(done)


def mixed(op: Any, tensor: object, advice: str) -> RuntimeError:
    """The error of an op that gets DTensors and a tensor that is not one; the advice is for a plain tensor."""
    if is_torch_dtensor(tensor):
        return RuntimeError(
            f"{op}: a torch DTensor and a phalanx DTensor cannot be mixed in one op; convert one of them with "
            "phalanx.dtensor.from_torch(tensor) or phalanx.dtensor.to_torch(tensor)"
        )
    return RuntimeError(f"{op}: got mixed distributed and non-distributed tensors: {advice}")
