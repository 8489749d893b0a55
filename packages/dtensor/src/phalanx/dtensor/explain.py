"""explain: what every op of a function does with DTensors, and what it sends.

report = explain(lambda: torch.relu(x @ w).sum())
print(report)
report.bytes_moved

aten.mm.default: float32[8, 16] (tp: R), float32[16, 8] (tp: S(1)) -> float32[8, 8] (tp: S(1))
    rule 'm k, k n -> m n ; ...'; nothing is sent
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.dtensor import _fallback, _sharding_prop
from phalanx.dtensor._op_plan import OpPlan, RulePlan
from phalanx.dtensor._redistribute import Step
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import TorchDispatchMode, is_higher_order, tree_leaves
from phalanx.dtensor.debug._comm_mode import counted_as

_PROGRAM = "asked for by the program"


@dataclass
class Record:
    """One op, or communication that the program asked for.

    Attributes:
        op: Its name, such as "aten.mm.default".
        kind: "rule", "written back" (a rule of the op that makes a new tensor), "decomposed" (the ops it was made of
            follow with a larger depth), "replicated" (every rank works on the whole), "handled" (an algorithm or
            handler of its own), or "program": redistribute, full_tensor and the like.
        text: The rule, or what is done instead.
        depth: The number of ops that it is part of.
        inputs: Descriptions of the DTensors among its arguments.
        outputs: Descriptions of its results.
        steps: (argument, step of redistribution) that are needed before it, in order. Argument 3[0] is the first of a
            list.
        collectives: (name, bytes of its input on this rank) of all that it issued, as seen on this rank.
        cost_us: The estimate of the steps.
    """

    op: str
    kind: str
    text: str
    depth: int = 0
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    steps: list[tuple[str, Step]] = field(default_factory=list)
    collectives: list[tuple[str, int]] = field(default_factory=list)
    cost_us: float = 0.0

    @property
    def is_fallback(self) -> bool:
        """Whether every rank works on the whole."""
        return self.kind == "replicated"

    def __str__(self) -> str:
        return "\n".join("    " * self.depth + line for line in self._lines())

    def _lines(self) -> Iterator[str]:
        sides = [", ".join(self.inputs), ", ".join(self.outputs) or "nothing"]
        yield self.op if self.kind == "program" else f"{self.op}: {' -> '.join(sides)}"
        sent = not (self.steps or self.collectives)
        what = f"rule '{self.text}'" if self.kind == "rule" else self.text
        yield f"    {what}{'; nothing is sent' if sent and self.kind != 'decomposed' else ''}"
        for argument, step in self.steps:
            yield f"    argument {argument}: {step}"
        for name, size in self.collectives:
            yield f"    {name} of {size:,} bytes"


@dataclass
class Report:
    """The result of `explain`; print it to read it.

    Attributes:
        records: The ops in the order in which they began.
        result: The result of the function.
    """

    records: list[Record]
    result: Any = None

    @property
    def collectives(self) -> dict[str, int]:
        """The number of times that this rank issued each collective, by name."""
        return dict(Counter(name for record in self.records for name, _ in record.collectives))

    @property
    def bytes_moved(self) -> int:
        """Bytes that this rank gave to collectives."""
        return sum(size for record in self.records for _, size in record.collectives)

    @property
    def cost_us(self) -> float:
        """The estimate of all communication that ops needed."""
        return sum(record.cost_us for record in self.records)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.collectives.items()) or "no collective"
        waste = sum(record.is_fallback for record in self.records)
        total = f"{sum(one.kind != 'program' for one in self.records)} ops, {counts}, {self.bytes_moved:,} bytes"
        total += f"; communication that ops needed takes about {self.cost_us:.1f} us"
        return "\n".join([*map(str, self.records), total + (f"; {waste} without a rule" if waste else "")])


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run a function, and report what each op on DTensors does: rule, placements, communication. Collective if fn is.

    Args:
        fn: Any function; a backward pass in it is seen as well.
        args, kwargs: Its arguments.

    Returns:
        The report, with the result of fn.

    Raises:
        Exception: Any exception of fn.

    Example:
        >>> x = ones(4, 2, device_mesh=mesh, placements=[Shard(0)])
        >>> print(explain(lambda: x * 2))
        aten.mul.Tensor: float32[4, 2] (0: S(0)) -> float32[4, 2] (0: S(0))
            rule '... -> ... ; lin 0'; nothing is sent
        1 ops, no collective, 0 bytes; communication that ops needed takes about 0.0 us
    """
    watcher = _Watcher()
    with watcher:
        result = fn(*args, **kwargs)
    return Report(watcher.records, result)


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[Record] = []
        self._open: list[Record] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_higher_order(func):
            return func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, DTensor)]
        if not given:
            name = counted_as(func)
            if name is not None:
                self._sent(name, args)
            return func(*args, **kwargs)
        record = self._recorded(func, _sharding_prop.plan(func, args, kwargs), given)
        self._open.append(record)
        try:
            with self:  # what it is made of is seen as well
                result = DTensor.__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._open.pop()
        record.outputs = [_described(one) for one in tree_leaves(result) if one is not None]
        return result

    def _recorded(self, op: Any, plan: OpPlan, given: list[Any]) -> Record:
        record = Record(str(op), _kind(plan), plan.text, len(self._open), [_described(one) for one in given])
        for move in plan.moves:
            argument = op._schema.arguments[move.argument].name + ("" if move.place is None else f"[{move.place}]")
            record.steps += [(argument, step) for step in move.plan.steps]
            record.cost_us += move.plan.cost_us
        self.records.append(record)
        return record

    def _sent(self, name: Any, args: Any) -> None:
        size = sum(one.nbytes for one in tree_leaves(args) if isinstance(one, torch.Tensor))
        short = str(name).rpartition(".")[2]
        if not self._open:
            self.records.append(Record("communication", "program", _PROGRAM))
        record = self._open[-1] if self._open else self.records[-1]
        record.collectives.append((short, size))


def _kind(plan: OpPlan) -> str:
    if isinstance(plan, RulePlan):
        return "rule"
    run: Any = plan.run
    kinds = {
        _fallback.write_back: "written back",
        _fallback.decomposed: "decomposed",
        _fallback.replicated: "replicated",
    }
    return kinds.get(run, "handled")


def _described(value: Any) -> str:
    if isinstance(value, DTensor):
        return str(value._spec)
    return f"plain {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
