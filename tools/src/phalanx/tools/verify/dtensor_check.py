"""One sample in one placing, on real ranks, against one process: values, gradients, in place."""

import contextlib
import math
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.collectives import all_reduce_
from phalanx.dtensor import DTensor, Partial, _fallback, distribute_tensor
from phalanx.dtensor.placement_types import Placement, Replicate, without_partial
from phalanx.tools._torch_compat import Recorder
from phalanx.tools.verify.dtensor_samples import Case, Placed, leaves_of, seed
from phalanx.tools.verify.outcomes import CompareOutcomes, OutcomesDiffer
from phalanx.tools.verify.simulate import TOLERATED, Mismatch, compare, cut

# What an attempt comes to, the worst last.
RIGHT, FALLBACK, ERROR, WRONG, BROKEN = "right", "fallback", "error", "wrong", "broken"
_RANKING = (RIGHT, FALLBACK, ERROR, WRONG, BROKEN)

# What comes out of these has no defined values: only shapes and dtypes are compared.
_UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")

# Bits by which terms of a Partial on two mesh dims, and sums of some of them, are wider than the value.
_BITS_OF_TERMS = 8

Function = Callable[..., Any]


class OutOfStep(Exception):
    """A rank raised and another did not, or one did not come: no collective of these ranks can be relied on."""


class Ranks:
    """The mesh of this rank, and what lets all ranks agree. Collective to make.

    Args:
        shape: The shape of the mesh.
        compare_outcomes: Whether ranks compare after each op what it came to.
    """

    def __init__(self, shape: tuple[int, ...], compare_outcomes: bool = False) -> None:
        self.shape = shape
        self.mesh = init_device_mesh("cpu", shape)
        # The reference of what is random: the same on a mesh of one rank.
        size = dist.get_world_size()
        self.outcomes: CompareOutcomes | None = None
        self.alone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("others", "alone"))["alone"]
        # A group of its own, which goes on when those of a mesh have failed.
        self._group = dist.new_group(list(range(size)))
        if compare_outcomes:
            self.outcomes = CompareOutcomes(self._group)

    def worst(self, status: str, go_on: bool = True) -> tuple[str, bool]:
        """The worst status of any rank, and whether all want to go on. Collective.

        Raises:
            OutOfStep: Ranks do not agree on whether something was raised, or one lost the others.
        """
        rank = _RANKING.index(status)
        seen = torch.tensor([rank, -rank, -int(go_on)])
        all_reduce_(seen, "max", self._group)
        worst, best = int(seen[0]), -int(seen[1])
        raised = _RANKING.index(ERROR)
        if worst == len(_RANKING) - 1 or (worst == raised and best != raised):
            raise OutOfStep
        return _RANKING[worst], int(seen[2]) == -1


# ---- the reference --------------------------------------------------------------------------------------------------


class Reference:
    """What one process gets for a sample; raises what torch raises.

    Attributes:
        outputs: The tensors that come out.
        gradients: For each tensor that goes in its gradient, or None; None if nothing has gradients.
        is_random: Whether the result depends on the random generator.
        is_data_dependent: Whether shapes or control flow depend on values.
    """

    def __init__(
        self, function: Function, case: Case, name: str, tensors: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.function, self.case, self.name = function, case, name
        self.tensors = list(case.tensors if tensors is None else tensors)
        self.is_random = self.is_data_dependent = False
        seed(11)
        with Recorder(self._see):
            inputs = [_fresh(one) for one in self.tensors]
            outputs = forward(function, case, inputs)
        self.cotangents = cotangents_of(outputs)
        with Recorder(self._see):
            self.gradients = gradients(outputs, inputs, self.cotangents)
        self.outputs = [torch.zeros_like(one) if name in _UNDEFINED else one.detach() for one in outputs]
        inexact = [one.dtype for one in self.tensors if one.is_floating_point() or one.is_complex()]
        self.coarsest = max((torch.finfo(one).eps for one in inexact), default=0.0)

    def allow_its_own_error(self) -> None:
        """Take differences for rounding up to four times those between this result and others that are as good: that of
        float64, and those of inputs that differ by rounding. Below 10 %, so that a jump is not taken for rounding."""
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        others = [[one.detach().to(wide.get(one.dtype, one.dtype)) for one in self.tensors]]
        random = torch.Generator().manual_seed(7)
        for _ in range(3):
            others.append([_nudged(one.detach(), random) for one in self.tensors])
        for number, given in enumerate(others):
            tensors = [one.requires_grad_(old.requires_grad) for one, old in zip(given, self.tensors, strict=True)]
            try:
                other = Reference(self.function, self.case, self.name, tensors)
            except Exception:  # an argument says float32
                continue
            pairs = [*zip(self.outputs, other.outputs, strict=True)]
            pairs += zip(self.gradients or (), other.gradients or (), strict=True)
            allowed = 4 * max((_off(mine, its) for mine, its in pairs), default=0.0)
            if number == 0 or allowed < 0.1:
                self.coarsest = max(self.coarsest, min(allowed, 0.1) / TOLERATED)

    def rerun_alone(self, ranks: Ranks) -> None:
        """Take the results of a mesh of one rank instead: for what is random."""
        seed(11)
        inputs = [_distributed(_fresh(one), ranks.alone, (Replicate(),)) for one in self.tensors]
        outputs = forward(self.function, self.case, inputs)
        self.outputs = [_full(one) for one in outputs]
        given = [
            _distributed(cotangent, ranks.alone, (Replicate(),))
            if isinstance(output, DTensor) and cotangent is not None
            else cotangent
            for output, cotangent in zip(outputs, self.cotangents, strict=True)
        ]
        found = gradients(outputs, inputs, given)
        self.gradients = None if found is None else [None if one is None else _full(one) for one in found]

    def _see(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_random |= torch.Tag.nondeterministic_seeded in op.tags
        self.is_data_dependent |= bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(op.tags))


def _nudged(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """The tensor, each element of a float or complex one changed by no more than rounding may."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    steps = torch.rand(tensor.shape, generator=random, dtype=torch.float64) * 2 - 1
    return (tensor * (1 + steps * torch.finfo(tensor.dtype).eps)).to(tensor.dtype)


def _off(own: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """The largest difference, relative to the largest element."""
    if own is None or other is None or not own.numel() or not (own.is_floating_point() or own.is_complex()):
        return 0.0
    off = (own - other).abs()
    worst = float(off[torch.isfinite(off)].max()) if torch.isfinite(off).any() else 0.0
    size = float(own[torch.isfinite(own)].abs().max()) if torch.isfinite(own).any() else 0.0
    return worst / (1 + size)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the same values, strides where they can be kept, and gradients."""
    copy = tensor.detach().clone().resolve_neg().resolve_conj()
    return copy.requires_grad_(tensor.requires_grad)


def forward(function: Function, case: Case, tensors: Sequence[Any]) -> list[Any]:
    """The tensors that a function returns for a sample with these tensors."""
    args, kwargs = case.make(tensors)
    result = case.process(function(*args, **kwargs))
    return [one for one in leaves_of(result) if isinstance(one, torch.Tensor)]


def cotangents_of(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """A random tensor like each output that has gradients. Not all ones: a gradient that lost a factor must show."""
    random = torch.Generator().manual_seed(5)
    found: list[torch.Tensor | None] = []
    for one in outputs:
        # Eighths between -2 and 2, without 0.
        steps = torch.randint(1, 17, (2, *one.shape), generator=random)
        signs = torch.randint(2, (2, *one.shape), generator=random) * 2 - 1
        parts = steps * signs / 8
        value = torch.complex(parts[0], parts[1]) if one.is_complex() else parts[0]
        found.append(value.to(one.dtype) if one.requires_grad else None)
    return found


def gradients(
    outputs: Sequence[Any], tensors: Sequence[Any], cotangents: Sequence[Any]
) -> list[torch.Tensor | None] | None:
    """The gradient of each tensor that wants one; None if no output has gradients."""
    pairs = [(one, cotangent) for one, cotangent in zip(outputs, cotangents, strict=True) if cotangent is not None]
    wanted = [index for index, one in enumerate(tensors) if one.requires_grad]
    if not pairs or not wanted:
        return None
    found = torch.autograd.grad(
        [one for one, _ in pairs], [tensors[index] for index in wanted], [one for _, one in pairs], allow_unused=True
    )
    done: list[torch.Tensor | None] = [None] * len(tensors)
    for index, one in zip(wanted, found, strict=True):
        done[index] = None if one is None else one.detach()
    return done


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def _distributed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def _placed(tensor: torch.Tensor, ranks: Ranks, placements: Sequence[Placement]) -> Any:
    """A leaf on the mesh: this rank's piece, or its random term of a Partial."""
    own = _fresh(tensor)
    if not any(isinstance(one, Partial) for one in placements):
        return _distributed(own, ranks.mesh, placements)
    local = cut(own.detach(), placements, ranks.shape, torch.Generator().manual_seed(7))
    made = DTensor.from_local(
        local[tuple(ranks.mesh.get_coordinate() or ())], ranks.mesh, placements, shape=tensor.shape
    )
    return made.requires_grad_(tensor.requires_grad)


def coarse(tensor: torch.Tensor) -> torch.Tensor:
    """Near the tensor, with values of so few bits that ranks sum terms of them without rounding, in any order."""
    own = tensor.detach()
    if own.is_complex():
        own = torch.complex(coarse(own.real), coarse(own.imag))
    elif own.is_floating_point():
        bits = max(2, -int(math.log2(torch.finfo(own.dtype).eps)) - _BITS_OF_TERMS)
        mantissa, exponent = torch.frexp(own)
        own = torch.where(torch.isfinite(own), torch.ldexp((mantissa * 2**bits).round(), exponent - bits), own)
    return own.clone().requires_grad_(tensor.requires_grad)


def _full(tensor: Any) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    plain: torch.Tensor = whole.detach().resolve_conj().resolve_neg()
    return plain


class Attempt:
    """One sample in one placing on the mesh. Collective; every step ends with all ranks knowing its status.

    Args:
        reference: What one process gets.
        placed: The placements of each tensor.
        ranks: This rank and the others.
        turn: A number by which attempts differ in what is free: where cotangents are.
        function: What is called in the place of the reference's function: that, compiled.
    """

    def __init__(
        self, reference: Reference, placed: Placed, ranks: Ranks, turn: int, function: Function | None = None
    ) -> None:
        self.reference, self.placed, self.ranks, self.turn = reference, placed, ranks, turn
        self.function = function
        self.text = ""
        self._outputs: list[Any] = []
        self._inputs: list[Any] = []

    def values(self) -> str:
        """Whether what the op returns is right."""
        return self._steps(self._forward, self._compare_outputs)

    def gradients(self) -> str:
        """Whether gradients are right; after `values`."""
        return self._steps(self._compare_gradients)

    def values_and_gradients(self) -> str:
        """Whether what the op returns and its gradients are right."""
        steps = [self._forward, self._compare_outputs]
        return self._steps(*steps, *([] if self.reference.gradients is None else [self._compare_gradients]))

    def written(self) -> str:
        """Whether the function, an in-place variant, writes and returns what is right."""
        return self._steps(self._write, self._compare_outputs)

    def _steps(self, *steps: Callable[[], None]) -> str:
        worst = RIGHT
        for step in steps:
            # Ranks agree before any of them communicates for the sake of the comparison alone.
            status, _ = self.ranks.worst(self._status(step))
            worst = max(worst, status, key=_RANKING.index)
            if worst in (ERROR, WRONG):
                return worst
        return worst

    def _status(self, step: Callable[[], None]) -> str:
        _fallback._warned.clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", _fallback.ReplicatedFallback)
            try:
                with self.ranks.outcomes or contextlib.nullcontext():
                    step()
            except (Mismatch, OutcomesDiffer) as mismatch:
                self.text = str(mismatch)
                return WRONG
            except Exception as error:
                self.text = described(error)
                return BROKEN if _lost(error) else ERROR
        return FALLBACK if any(issubclass(one.category, _fallback.ReplicatedFallback) for one in seen) else RIGHT

    def _forward(self) -> None:
        reference = self.reference
        self._inputs = [
            _placed(one, self.ranks, placements) for one, placements in zip(reference.tensors, self.placed, strict=True)
        ]
        seed(11)
        self._outputs = forward(self.function or reference.function, reference.case, self._inputs)

    def _write(self) -> None:
        tensors = self.reference.tensors
        inputs = [
            _placed(one.detach(), self.ranks, placements) for one, placements in zip(tensors, self.placed, strict=True)
        ]
        seed(11)
        returned = forward(self.reference.function, self.reference.case, inputs)
        if not returned or returned[0] is not inputs[0]:
            raise Mismatch("what is returned is not the tensor written into")
        self._outputs = returned

    def _compare_outputs(self) -> None:
        wanted = self.reference.outputs
        if len(self._outputs) != len(wanted):
            raise Mismatch(f"{len(self._outputs)} tensors come out, not {len(wanted)}")
        wrong: list[str] = []
        for index, (got, want) in enumerate(zip(self._outputs, wanted, strict=True)):
            full = _full(got)
            if self.reference.name in _UNDEFINED:
                full = torch.zeros_like(full)
            _compared(full, want, f"output {index}", self.reference.coarsest, wrong)
            if tuple(got.shape) != tuple(want.shape) or got.dtype != want.dtype:
                wrong.append(f"output {index} shows {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}")
        if wrong:
            raise Mismatch("; ".join(wrong))

    def _compare_gradients(self) -> None:
        reference = self.reference
        given: list[Any] = []
        for output, cotangent in zip(self._outputs, reference.cotangents, strict=True):
            if cotangent is not None and not output.requires_grad:
                raise Mismatch("no gradient is recorded")
            if cotangent is not None and isinstance(output, DTensor):
                whole = (Replicate(),) * len(self.ranks.shape)
                at = whole if self.turn % 2 else without_partial(output.placements)
                cotangent = _distributed(cotangent, output.device_mesh, at)
            given.append(cotangent)
        found = gradients(self._outputs, self._inputs, given)
        wanted = reference.gradients
        assert found is not None and wanted is not None
        wrong: list[str] = []
        plain: list[int] = []
        for index, (got, want) in enumerate(zip(found, wanted, strict=True)):
            if got is None and want is None:
                continue
            # torch itself gives zeros or nothing, as it comes.
            like = reference.tensors[index].detach()
            full = torch.zeros_like(like) if got is None else _full(got)
            if got is not None and not isinstance(got, DTensor):
                plain.append(index)
            _compared(
                full, torch.zeros_like(like) if want is None else want, f"gradient {index}", reference.coarsest, wrong
            )
        if wrong:
            raise Mismatch("; ".join(wrong))
        if plain:
            raise TypeError(f"gradient {plain[0]} has the right values, but is a plain tensor")


def _compared(got: torch.Tensor, want: torch.Tensor, what: str, coarsest: float, wrong: list[str]) -> None:
    # Every tensor is brought together before one is found wrong: a rank that stops early would lose the others.
    try:
        compare(got, want, what, coarsest)
    except Mismatch as mismatch:
        wrong.append(str(mismatch))


def _lost(error: Exception) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return any(word in text for word in ("revoked", "timed out", "timeout", "every rank of a group must", "peererror"))


def described(error: Exception) -> str:
    """An exception in few words: what, and where in this package."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "/dtensor/" in one.filename]
    places = [f"{one.filename.rsplit('/', 1)[-1]}:{one.lineno}" for one in frames if "dtensor_" not in one.filename]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]} ({' '.join(places[-3:])})"
