"""One rank of the sweep: every case on gloo and on phalanx, and what came of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import others
import torch
import torch.distributed as dist
from others import Other
from reasons import GLOO_CRASHES
from sweep_calls import ENTRIES, Case, arguments, expected

LIMIT_S = 4  # of a call; whoever waits so long has lost the others
EITHER = ("AVG", "PREMUL_SUM")  # rounded: compared within one unit in the last place


def _same(got: torch.Tensor, want: torch.Tensor, rounded: bool) -> bool:
    got, want = got.detach(), want.detach()
    if torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
        return True
    if not rounded or not (got.dtype.is_floating_point or got.dtype.is_complex):
        return False
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    step = (
        2.0**-6
        if got.dtype == torch.bfloat16
        else 0.25
        if got.dtype.itemsize == 1
        else 1e-2
        if got.dtype.itemsize == 2
        else 1e-6
    )
    return torch.allclose(got.to(wide), want.to(wide), rtol=step, atol=0)


def _tried(case: Case | Other, group: dist.ProcessGroup, rank: int, size: int) -> tuple[str, Any]:
    """ "returned" and what is left, or the type of an error and its text."""
    began = time.monotonic()
    try:
        if isinstance(case, Other):
            return "returned", others.call(case, group, rank, size)
        given = arguments(case, rank, size)
        work = ENTRIES[case.kind][case.entry](group, case, given)
        if work is not None:
            work.wait()
        return "returned", given.memory
    except Exception as error:
        kind = "Timeout" if time.monotonic() - began > 0.9 * LIMIT_S else type(error).__name__
        return kind, str(error).split("\nException raised from")[0]


def judged(case: Case | Other, rank: int, size: int, outcome: tuple[str, Any]) -> tuple[str, str]:
    """ "right", "wrong", "undefined" (it returned, and has no one meaning) or the type of an error; and a text."""
    how, left = outcome
    if how != "returned":
        return how, left
    if isinstance(case, Other):
        want = others.wanted(case, rank, size)
        if want == "an error":
            return "undefined", f"returned {left}"
        return ("right", "") if left == want else ("wrong", f"returned {left} instead of {want}")
    memory = expected(case, rank, size)
    if memory is None:
        return "undefined", f"left {[each.tolist() for each in left]}"
    rounded = case.op in EITHER or case.dtype.startswith("float8")
    for got, want in zip(left, memory, strict=True):
        if not _same(got, want, rounded):
            return "wrong", f"left {got.tolist()} instead of {want.tolist()}"
    return "right", ""


def sweep(rank: int, size: int, cases: Sequence[Case | Other], folder: str) -> None:
    """Write, for each case, what gloo did, and what phalanx did."""
    import phalanx.collectives  # noqa: F401 - registers the back end

    def store(name: str) -> Any:
        return dist.FileStore(f"{folder}/{name}", size)

    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=store("default"), rank=rank, world_size=size, timeout=timedelta(seconds=120))
    groups = {name: dist.new_group(backend=name, timeout=limit) for name in ("gloo", "phalanx")}
    found = Path(folder) / f"found.{rank}"
    for case in cases:
        row = []
        for name, group in groups.items():
            if name == "gloo" and any(crash(case) for crash in GLOO_CRASHES):
                row.append(("crash", "not called, for the process would die"))
                continue
            (Path(folder) / f"called.{rank}").write_text(f"{name}: {case.name}")
            torch.manual_seed(0)
            outcome = _tried(case, group, rank, size)
            row.append(judged(case, rank, size, outcome))
            # 0: it returned; 1 and more: a kind of error. A group is used further if all ranks had the same.
            code = 0 if outcome[0] == "returned" else 1 + sum(outcome[0].encode())
            codes = torch.tensor([code, -code])
            dist.all_reduce(codes, dist.ReduceOp.MAX)
            alike = int(codes[0]) == -int(codes[1])
            if not alike or (code and not _works(group, size)):
                groups[name] = dist.new_group(backend=name, timeout=limit)
        with found.open("a") as file:  # as it comes: a rank may die
            file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def _works(group: dist.ProcessGroup, size: int) -> bool:
    """Whether a group goes on after an error that all ranks had; the same on all ranks."""
    try:
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        works = int(one) == size
    except Exception:
        works = False
    all_work = torch.tensor([int(works)])
    dist.all_reduce(all_work, dist.ReduceOp.MIN)
    return bool(all_work)
