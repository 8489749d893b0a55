"""Cases on process groups of torch: made by hand, and with futures whose callbacks wait for other collectives.

A group made by hand has its own store, no default group beside it, and its ranks in reverse. What the core's cases
show of steps is not repeated here: a rank fails between two calls.
"""

from __future__ import annotations

import datetime
import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from cases import REST_MS, TIMEOUT_MS

import phalanx.collectives  # noqa: F401  (registers the back end)

LONG_MS = 60_000
TRY_SECONDS = 8
DEPTH = 3  # of futures that wait for futures


def build() -> None:
    """Compiles the back end, and loads it, before ranks are forked."""
    from phalanx.collectives._c10d import _build

    _build.module()


def make(path: str, position: int, size: int, timeout_ms: int) -> Any:
    """A group that torch's default group knows nothing of: there is none."""
    store = dist.PrefixStore("update", dist.FileStore(path, size))
    limit = datetime.timedelta(milliseconds=timeout_ms)
    helper: Any = dist.distributed_c10d._new_process_group_helper
    group, _ = helper(size, position, [], dist.Backend("phalanx"), store, group_name=f"update {path}", timeout=limit)
    dist.distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def live(rank: Any) -> None:
    """The life of a rank of such a case; what it says is judged as in the phase collective."""
    case, size = rank.case, rank.case.ranks
    torch.set_num_threads(1)
    position = size - 1 - rank.rank if case.phase == "handmade" else rank.rank
    group = make(str(rank.directory / "first"), position, size, LONG_MS)  # the fault comes after they have met
    if case.kind == "stop":
        group.set_timeout(datetime.timedelta(milliseconds=TIMEOUT_MS))
    step = nested if case.phase == "nested" else plain
    try:
        step(rank, group, 0, position)
        _call_until_error(rank, group, step, position)
        if rank.fails and case.shut_out:
            _find_shut_out(rank, group, step, position)
    finally:
        group.abort()

    def meet_again() -> None:
        members = case.survivors
        rest = make(str(rank.directory / "rest"), members.index(rank.rank), len(members), REST_MS)
        step(rank, rest, 3, members.index(rank.rank))
        rank.say("sum", ranks=members)
        rest.shutdown()

    rank.shut_out_or(meet_again)


def _call_until_error(rank: Any, group: Any, step: Any, position: int) -> None:
    deadline = time.monotonic() + TRY_SECONDS
    for number in itertools.count(1):
        if time.monotonic() > deadline:
            rank.say("wrong", text=f"{number} calls after the fault raised nothing")
            return
        try:
            if rank.fails and number == 1:
                rank.fail_by_hand(None)
            step(rank, group, number, position)
        except RuntimeError as error:
            rank.say_error("error", error, time.monotonic_ns())
            return


def _find_shut_out(rank: Any, group: Any, step: Any, position: int) -> None:
    """A rank that was stopped learns that the others went on without it."""
    try:
        step(rank, group, 0, position)
        rank.say("wrong", text="a rank that the others had given up completed a call")
    except RuntimeError as error:
        rank.say_error("shut out", error)


def plain(rank: Any, group: Any, number: int, position: int) -> None:
    """A sum, and what the first rank of the group has."""
    size = group.size()
    x = torch.full((96,), float(position + number))
    dist.all_reduce(x, group=group)
    _compare(rank, x, size * number + size * (size - 1) / 2)
    y = torch.full((96,), float(position))
    dist.broadcast(y, group_src=0, group=group)
    _compare(rank, y, 0.0)


def nested(rank: Any, group: Any, number: int, position: int) -> None:
    """A sum in the callback of the future of a sum, and so on; each callback waits for the next one."""
    size = group.size()

    def deeper(depth: int) -> Any:
        def then(future: Any) -> Any:
            x = future.value()[0]
            if depth == 0:
                return x
            return dist.all_reduce(x, group=group, async_op=True).get_future().then(deeper(depth - 1)).wait()

        return then

    x = torch.full((96,), float(position + number))
    result = dist.all_reduce(x, group=group, async_op=True).get_future().then(deeper(DEPTH)).wait()
    _compare(rank, result, (size * number + size * (size - 1) / 2) * size**DEPTH)


def _compare(rank: Any, x: torch.Tensor, expected: float) -> None:
    rank.exact += 1
    if not bool((x == expected).all()):
        rank.say("wrong", text=f"result {rank.exact}: {x[0].item()} instead of {expected}")
