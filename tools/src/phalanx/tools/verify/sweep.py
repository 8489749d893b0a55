"""The sweep over torch's OpInfo database: what its samples call, forward and backward, is checked call by call."""

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from phalanx.dtensor._rules.registry import has_rule
from phalanx.tools._torch_compat import Recorder, is_plain, op_database
from phalanx.tools.verify.check import MESHES, Outcome, bound, check_call, tensors_in

# Larger samples show nothing that smaller ones do not, and cost much.
_MOST_ELEMENTS = 4096
_MOST_FAILURES = 8

Recorded = tuple[Any, list[Any]]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [_copied(one) for one in value]
    return value


def _key(op: Any, values: Sequence[Any]) -> str:
    def show(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{tuple(value.shape)}"
        if isinstance(value, (list, tuple)):
            return [show(one) for one in value]
        return value

    return f"{op}{[show(one) for one in values]}"


class Calls:
    """The calls of ops that have a rule, each pattern once.

    Args:
        wanted: Names of ops (`aten.add.Tensor`) to which to keep; all if empty.
        seen: Patterns that need no second look; grows.

    Attributes:
        found: The calls.
        refused: Why torch refused samples, a line for each.
        failure: An error of the rules, or of this class, which must not pass for one of torch.
    """

    def __init__(self, wanted: Sequence[str] = (), seen: set[str] | None = None) -> None:
        self.found: list[Recorded] = []
        self.refused: list[str] = []
        self.failure: Exception | None = None
        self._wanted = set(wanted)
        self._seen = set() if seen is None else seen

    def see(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep a call, with copies of its tensors."""
        try:
            self._see(op, args, kwargs)
        except Exception as error:
            self.failure = self.failure or error
            raise

    def refuse(self, error: Exception) -> None:
        """Note that torch refused a sample; raises what was not torch's."""
        if self.failure is not None:
            raise self.failure
        self.refused.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

    def _see(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not has_rule(op) or (self._wanted and str(op) not in self._wanted):
            return
        values = bound(op, args, kwargs)
        tensors = tensors_in(values)
        if not tensors or any(one.numel() > _MOST_ELEMENTS or not is_plain(one) for one in tensors):
            return
        key = _key(op, values)
        if key not in self._seen:
            self._seen.add(key)
            self.found.append((op, _copied(values)))


def _spread(samples: Iterator[Any], count: int, most: int = 64) -> list[Any]:
    """`count` of the samples, evenly over the first `most`."""
    found: list[Any] = []
    for sample in samples:
        found.append(sample)
        if len(found) == most:
            break
    return found if len(found) <= count else [found[index * len(found) // count] for index in range(count)]


def _backward(result: Any) -> None:
    results = [one for one in (result if isinstance(result, (list, tuple)) else [result]) if torch.is_tensor(one)]
    outputs = [one for one in results if one.requires_grad and one.is_floating_point()]
    if outputs:
        # Not all ones: a gradient that lost a factor must show.
        torch.autograd.backward(outputs, [torch.randn_like(one) for one in outputs])


def record(info: Any, dtype: torch.dtype, calls: Calls, sample_count: int = 4) -> None:
    """Run samples of an OpInfo entry, backward too for floats, and keep the calls that they make."""
    grad = dtype.is_floating_point and info.supports_autograd
    variants: list[Callable[..., Any]] = [info.op]
    if info.inplace_variant is not None:
        variants.append(info.inplace_variant)
    for variant in variants:
        for sample in _spread(iter(info.sample_inputs("cpu", dtype, requires_grad=grad)), sample_count):
            if variant is info.inplace_variant and isinstance(sample.input, torch.Tensor):
                sample.input = sample.input.detach()
            with Recorder(calls.see):
                try:
                    result = variant(sample.input, *sample.args, **sample.kwargs)
                    _backward(result)
                except Exception as error:
                    calls.refuse(error)


def entry_name(info: Any) -> str:
    """The name of an OpInfo entry with its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def check_calls(
    calls: Sequence[Recorded], meshes: Sequence[tuple[int, ...]] = MESHES, deadline_s: float = 60.0
) -> tuple[dict[str, Outcome], int]:
    """Check recorded calls, until `deadline_s` seconds have passed.

    Returns:
        What was found, by op; and how many calls were left.
    """
    found: dict[str, Outcome] = {}
    started = time.monotonic()
    for index, (op, values) in enumerate(calls):
        if time.monotonic() - started > deadline_s:
            return found, len(calls) - index
        count = sum(not one.kwarg_only for one in op._schema.arguments)
        kwargs = {one.name: value for one, value in zip(op._schema.arguments[count:], values[count:], strict=True)}
        outcome = check_call(op, values[:count], kwargs, meshes)
        if outcome is not None:
            found.setdefault(str(op), Outcome()).add(outcome)
    return found, 0


class Report:
    """What a sweep found so far, kept in a JSON file so that it can go on where it stopped.

    Args:
        path: The file, or None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.entries: dict[str, dict[str, dict[str, Any]]] = {}
        self.left: dict[str, int] = {}  # calls that were not checked, for want of time
        self.refused: dict[str, list[str]] = {}  # samples that torch refused
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            self.entries, self.left, self.refused = kept["entries"], kept["left"], kept["refused"]

    def put(self, entry: str, found: dict[str, Outcome], left: int = 0, refused: Sequence[str] = ()) -> None:
        """Keep what an entry's calls showed, and what was not looked at."""
        if left:
            self.left[entry] = left
        if refused:
            self.refused[entry] = list(refused)
        self.entries[entry] = {
            op: {"right": one.right, "wrong": one.wrong, "cut": one.cut, "failures": one.failures[:_MOST_FAILURES]}
            for op, one in found.items()
        }

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.path is not None:
            part = self.path.with_suffix(".part")
            kept = {"entries": self.entries, "left": self.left, "refused": self.refused}
            part.write_text(json.dumps({"torch": torch.__version__, **kept}, indent=1))
            os.replace(part, self.path)

    def by_op(self) -> dict[str, Outcome]:
        """The counts of all entries by op."""
        total: dict[str, Outcome] = {}
        for found in self.entries.values():
            for op, one in found.items():
                own = Outcome(one["right"], one["wrong"], one["cut"], list(one["failures"]))
                total.setdefault(op, Outcome()).add(own)
        return total


def sweep(
    report: Report,
    names: Sequence[str] = (),
    ops: Sequence[str] = (),
    sample_count: int = 4,
    show: Callable[[str], None] = print,
    reached: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Check what the samples of torch's OpInfo database call, and the hand-made samples.

    Args:
        report: Takes what is found; entries that it has are not run again.
        names: OpInfo entries to run (`add`, `nn.functional.linear`); all if empty.
        ops: Ops to check (`aten.add.Tensor`); all that have a rule if empty.
        sample_count: How many samples of each entry and dtype.
        show: Called with each line of progress.
        reached: Called with how many entries are done, and of how many.
    """
    from phalanx.tools.verify.samples import samples

    seen: set[str] = set()
    if not names and "samples" not in report.entries:
        calls = Calls(ops, seen)
        for op, args, kwargs in samples():
            calls.see(op, args, kwargs)
        _run_entry(report, "samples", calls, show, 600.0)
    infos = [info for info in op_database() if not names or info.name in names]
    entries = [(info, dtype) for info in infos for dtype in (torch.float32, torch.int64) if dtype in info.dtypes]
    for done, (info, dtype) in enumerate(entries):
        reached(done, len(entries))
        entry = f"{entry_name(info)} {str(dtype)[6:]}"
        if entry in report.entries:
            continue
        calls = Calls(ops, seen)
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                record(info, dtype, calls, sample_count)
            except Exception as error:  # of the generator of the samples
                calls.refuse(error)
            _run_entry(report, entry, calls, show)


def _run_entry(report: Report, entry: str, calls: Calls, show: Callable[[str], None], deadline_s: float = 60.0) -> None:
    found, left = check_calls(calls.found, deadline_s=deadline_s)
    report.put(entry, found, left, calls.refused)
    report.save()
    wrong = sum(one.wrong for one in found.values())
    right = sum(one.right for one in found.values())
    if right or wrong or left or calls.refused:
        more = f", {left} calls not checked for lack of time" if left else ""
        more += f", {len(calls.refused)} samples refused by torch ({calls.refused[0]})" if calls.refused else ""
        show(f"{entry}: {right} right, {wrong} wrong{more}")
    for one in found.values():
        for failure in one.failures[:_MOST_FAILURES]:
            show(f"  WRONG {failure}")
