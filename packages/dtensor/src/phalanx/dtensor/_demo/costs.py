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
from phalanx.dtensor._demo.meter import Call

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


def measure(calls: list[Call], group: dist.ProcessGroup, rounds: int) -> dict[Call, Cost]:
    """Measure collectives over Phalanx and gloo. Collective.

    Args:
        calls: The same on all ranks.
        group: Of gloo.
        rounds: How many.

    Raises:
        WrongResultError: A result was wrong.
    """
    cases = [_CASES[call.name](call, group) for call in calls]
    times_ns = torch.zeros(len(cases), 2, rounds, _CALLS_PER_ROUND, dtype=torch.float64)
    for number in range(-_WARM_UP_ROUNDS, rounds):
        for index, case in enumerate(cases):
            for way, run in enumerate((case.phalanx, case.gloo)):
                taken_ns = case.round(run, number + _WARM_UP_ROUNDS)
                if number >= 0:
                    times_ns[index, way, number] = torch.tensor(taken_ns, dtype=torch.float64)
    medians_us = (
        (pc.wait_tensor(pc.all_reduce(times_ns, "sum", group)) / group.size() / 1000).flatten(2).median(dim=2).values
    )
    return {call: Cost(*medians_us[index].tolist()) for index, call in enumerate(calls)}


class _Case:
    """One collective with inputs that every rank can compute for every other: `_values(rank, round)`."""

    def __init__(self, call: Call, group: dist.ProcessGroup) -> None:
        self.call = call
        self.group = group
        self.count = call.size_bytes // call.dtype.itemsize  # of the larger side
        self.input = torch.empty(self.input_count(), dtype=call.dtype)
        self.output = torch.empty(self.output_count(), dtype=call.dtype)
        self.meeting = torch.zeros(1)

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
        expected = self.expected([self._values(rank, number) for rank in range(self.group.size())])
        if not torch.equal(result, expected):
            raise WrongResultError(
                f"{self.call.name} of {self.call.size_bytes} bytes over {run.__name__}: wrong result in round {number}"
            )
        return taken_ns

    def _values(self, rank: int, number: int) -> torch.Tensor:
        # Small integers, so that a sum is exact in every dtype.
        return ((torch.arange(self.input_count()) * 7 + rank * 31 + number) % 61).to(self.call.dtype)

    def input_count(self) -> int:
        return self.count

    def output_count(self) -> int:
        return self.count

    def own(self, values: torch.Tensor) -> torch.Tensor:
        return values.chunk(self.group.size())[self.group.rank()]

    def phalanx(self) -> torch.Tensor:
        raise NotImplementedError

    def gloo(self) -> torch.Tensor:
        raise NotImplementedError

    def expected(self, values: list[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


class _AllReduce(_Case):
    def phalanx(self) -> torch.Tensor:
        return pc.wait_tensor(pc.all_reduce(self.input, "sum", self.group))

    def gloo(self) -> torch.Tensor:
        dist.all_reduce(self.input, group=self.group)
        return self.input

    def expected(self, values: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(values).sum(0)


class _AllGather(_Case):
    def input_count(self) -> int:
        return self.count // self.group.size()

    def phalanx(self) -> torch.Tensor:
        return pc.wait_tensor(pc.all_gather_tensor(self.input, 0, self.group))

    def gloo(self) -> torch.Tensor:
        _all_gather(self.output, self.input, group=self.group)
        return self.output

    def expected(self, values: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(values)


class _ReduceScatter(_Case):
    def output_count(self) -> int:
        return self.count // self.group.size()

    def phalanx(self) -> torch.Tensor:
        return pc.wait_tensor(pc.reduce_scatter_tensor(self.input, "sum", 0, self.group))

    def gloo(self) -> torch.Tensor:
        _reduce_scatter(self.output, self.input, group=self.group)
        return self.output

    def expected(self, values: list[torch.Tensor]) -> torch.Tensor:
        return self.own(torch.stack(values).sum(0))


class _Broadcast(_Case):
    def phalanx(self) -> torch.Tensor:
        return pc.wait_tensor(pc.broadcast(self.input, 0, self.group))

    def gloo(self) -> torch.Tensor:
        dist.broadcast(self.input, 0, group=self.group)
        return self.input

    def expected(self, values: list[torch.Tensor]) -> torch.Tensor:
        return values[0]


class _AllToAll(_Case):
    def phalanx(self) -> torch.Tensor:
        return pc.wait_tensor(pc.all_to_all_single(self.input, None, None, self.group))

    def gloo(self) -> torch.Tensor:
        dist.all_to_all_single(self.output, self.input, group=self.group)
        return self.output

    def expected(self, values: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([self.own(each) for each in values])


_CASES: dict[str, type[_Case]] = {
    "all_reduce": _AllReduce,
    "all_gather_tensor": _AllGather,
    "reduce_scatter_tensor": _ReduceScatter,
    "broadcast": _Broadcast,
    "all_to_all_single": _AllToAll,
}
