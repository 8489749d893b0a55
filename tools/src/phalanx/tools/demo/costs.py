"""What each collective of the training costs, over Phalanx and over gloo, on the same ranks in one run.

The two take turns in every round. Before each call the inputs are written anew, and a small all_reduce brings the ranks
together; in every round results are compared with what they must be; a time is the mean over the ranks. gloo works in
place where it can and writes to memory that is there, while Phalanx's functions make a new tensor each time.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx.tools.demo.meter import Call

# Newer torch has the same functions under these names, and warns about the old ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_WARM_UP_ROUNDS = 3
_CALLS_PER_ROUND = 3


class Cost(NamedTuple):
    """Medians in microseconds.

    Attributes:
        phalanx_us: Through `phalanx.collectives`.
        gloo_us: The same call of `torch.distributed`.
    """

    phalanx_us: float
    gloo_us: float


class WrongResultError(RuntimeError):
    """A collective returned something else than it must."""


def measure(
    calls: list[Call], group: dist.ProcessGroup, rounds: int, after_round: Callable[[], None]
) -> dict[Call, Cost]:
    """Measure collectives over Phalanx and gloo. Collective.

    Args:
        calls: The same on all ranks.
        group: Of gloo.
        rounds: How many.
        after_round: Is called after each.

    Raises:
        WrongResultError: A result was wrong.
    """
    cases = [_Case(call, group) for call in calls]
    times_ns = torch.zeros(len(cases), 2, rounds, _CALLS_PER_ROUND, dtype=torch.float64)
    for number in range(-_WARM_UP_ROUNDS, rounds):
        for index, case in enumerate(cases):
            for way, run in enumerate((case.phalanx, case.gloo)):
                taken_ns = case.round(run, number + _WARM_UP_ROUNDS)
                if number >= 0:
                    times_ns[index, way, number] = torch.tensor(taken_ns, dtype=torch.float64)
        if number >= 0:
            after_round()
    medians_us = (
        (pc.wait_tensor(pc.all_reduce(times_ns, "sum", group)) / group.size() / 1000).flatten(2).median(dim=2).values
    )
    return {call: Cost(*medians_us[index].tolist()) for index, call in enumerate(calls)}


class _Collective(NamedTuple):
    """How a collective is called over each of the two, and what it must return.

    Attributes:
        phalanx: Called with the input and the group.
        gloo: Called with the output, the input and the group. It returns nothing.
        expected: Called with the inputs of all ranks and the number of this one.
        in_place: Whether gloo writes the result into the input.
        input_is_part, output_is_part: Whether that side is the part of one rank.
    """

    phalanx: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]
    gloo: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]
    expected: Callable[[list[torch.Tensor], int], torch.Tensor]
    in_place: bool = False
    input_is_part: bool = False
    output_is_part: bool = False


_COLLECTIVES = {
    "all_reduce": _Collective(
        lambda x, group: pc.all_reduce(x, "sum", group),
        lambda output, x, group: dist.all_reduce(x, group=group),
        lambda inputs, rank: torch.stack(inputs).sum(0),
        in_place=True,
    ),
    "all_gather_tensor": _Collective(
        lambda x, group: pc.all_gather_tensor(x, 0, group),
        lambda output, x, group: _all_gather(output, x, group=group),
        lambda inputs, rank: torch.cat(inputs),
        input_is_part=True,
    ),
    "reduce_scatter_tensor": _Collective(
        lambda x, group: pc.reduce_scatter_tensor(x, "sum", 0, group),
        lambda output, x, group: _reduce_scatter(output, x, group=group),
        lambda inputs, rank: torch.stack(inputs).sum(0).chunk(len(inputs))[rank],
        output_is_part=True,
    ),
    "broadcast": _Collective(
        lambda x, group: pc.broadcast(x, 0, group),
        lambda output, x, group: dist.broadcast(x, 0, group=group),
        lambda inputs, rank: inputs[0],
        in_place=True,
    ),
}


class _Case:
    """One collective with inputs that every rank can compute for every other: `_values(rank, round)`."""

    def __init__(self, call: Call, group: dist.ProcessGroup) -> None:
        self.call = call
        self.group = group
        self.collective = _COLLECTIVES[call.name]
        whole = call.size_bytes // call.dtype.itemsize
        part = whole // group.size()
        self.input = torch.empty(part if self.collective.input_is_part else whole, dtype=call.dtype)
        self.output = torch.empty(part if self.collective.output_is_part else whole, dtype=call.dtype)
        self.meeting = torch.zeros(1)

    def phalanx(self) -> torch.Tensor:
        return pc.wait_tensor(self.collective.phalanx(self.input, self.group))

    def gloo(self) -> torch.Tensor:
        self.collective.gloo(self.output, self.input, self.group)
        return self.input if self.collective.in_place else self.output

    def round(self, run: Callable[[], torch.Tensor], number: int) -> list[int]:
        """Nanoseconds of each call of a round."""
        taken_ns = []
        values = self._values(self.group.rank(), number)
        for _ in range(_CALLS_PER_ROUND):
            self.input.copy_(values)
            pc.wait_tensor(pc.all_reduce(self.meeting, "sum", self.group))
            started = time.perf_counter_ns()
            result = run()
            taken_ns.append(time.perf_counter_ns() - started)
        inputs = [self._values(rank, number) for rank in range(self.group.size())]
        if not torch.equal(result, self.collective.expected(inputs, self.group.rank())):
            raise WrongResultError(
                f"{self.call.name} of {self.call.size_bytes} bytes over {run.__name__}: wrong result in round {number}"
            )
        return taken_ns

    def _values(self, rank: int, number: int) -> torch.Tensor:
        # Small integers, so that a sum is exact in every dtype.
        return ((torch.arange(self.input.numel()) * 7 + rank * 31 + number) % 61).to(self.call.dtype)
