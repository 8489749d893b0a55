"""What an op on a DTensor costs beside the op itself: ours, in Python and native, beside torch's and plain tensors.

    .venv/bin/python benchmarks/dtensor_dispatch.py [--rounds 30] [--calls 1000] [--shapes 100] [--json FILE]

One process, a mesh of one rank, tensors of 8x8: nothing communicates, and the op itself takes next to nothing. In every
round each row runs `--calls` times in each way, the ways in an order drawn for that round. The time of a way is that of
its thread (what other programs do counts little), as a median over the rounds; the JSON has wall time, too.

The second table is the first call with a shape that was not seen before, for which no plan is known: the median over
`--shapes` shapes, after ten that are not counted.

The native column needs what `phalanx build` compiles, and is left out without it.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import DeviceMesh

import phalanx.dtensor as ours
from phalanx.dtensor import _fastpath
from phalanx.dtensor._dispatch import forget_plans

SIZE = 8
UNSEEN = 10
Case = Callable[[], Any]
# Row: the goal of goals.md in microseconds, (Python, native).
GOALS = dict.fromkeys(("add", "relu", "mm", "view"), (6.5, 3.0))
GOALS |= {"from_local": (3.0, 3.0), "from_local, grad": (9.0, 9.0)}


class Ways:
    """How a tensor becomes what the rows work on, by name of the way."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.names = ["plain", "torch", "python"] + (["native"] if _fastpath.loaded() is not None else [])
        self.mesh = mesh

    def enter(self, way: str) -> None:
        """Have our ops run natively, or not."""
        module = _fastpath.loaded()
        if module is not None:
            module.use(way == "native")

    def made(self, way: str, local: torch.Tensor, *, whole: bool = False) -> Any:
        """A tensor of this way: rows dealt to the ranks, or `whole` on each."""
        if way == "plain":
            return local
        if way == "torch":
            return theirs.DTensor.from_local(local, self.mesh, [theirs.Replicate() if whole else theirs.Shard(0)])
        return ours.DTensor.from_local(local, self.mesh, [ours.Replicate() if whole else ours.Shard(0)])

    def rows(self, way: str, grad: bool) -> dict[str, Case]:
        """What is measured, by name."""
        local = torch.randn(SIZE, SIZE, requires_grad=grad)
        x, y, z = self.made(way, local), *(self.made(way, local.detach().clone()) for _ in range(2))
        w = self.made(way, local.detach(), whole=True)
        rows: dict[str, Case] = {
            "add": lambda: torch.add(x, y),
            "relu": lambda: torch.relu(x),
            "mm": lambda: torch.mm(x, w),
            "view": lambda: x.view(SIZE * SIZE),
            "mul by a number": lambda: x * 0.5,
            "add_": lambda: y.add_(z),
            "split": lambda: x.split(4, 1),
            "layer_norm": lambda: torch.nn.functional.layer_norm(x, (SIZE,)),
        }
        if way != "plain":
            mesh, placements = self.mesh, [theirs.Shard(0) if way == "torch" else ours.Shard(0)]
            make = theirs.DTensor.from_local if way == "torch" else ours.DTensor.from_local
            checks = {"run_check": False} if way == "torch" else {}
            rows["from_local"] = lambda: make(local, mesh, placements, **checks)
            rows["to_local"] = lambda: x.to_local()
        return rows

    def new_shapes(self, way: str, count: int) -> dict[str, list[Case]]:
        """By row, calls with a new shape each, which no other way has."""
        found: dict[str, list[Case]] = {}
        first = SIZE + 1 + self.names.index(way) * count
        for columns in range(first, first + count):
            local = torch.randn(SIZE, columns)
            x, w = self.made(way, local), self.made(way, torch.randn(columns, SIZE), whole=True)
            calls: dict[str, Case] = {
                "add": lambda x=x: torch.add(x, x),
                "relu": lambda x=x: torch.relu(x),
                "mm": lambda x=x, w=w: torch.mm(x, w),
                "view": lambda x=x, columns=columns: x.view(SIZE * columns),
                "sum": lambda x=x: x.sum(1),
                "add_": lambda x=x: x.add_(x),
            }
            for name, call in calls.items():
                found.setdefault(name, []).append(call)
        return found


def timed(call: Case, count: int) -> tuple[float, float]:
    """Microseconds of a call: (of the thread, of the clock)."""
    cpu, begin = time.thread_time_ns(), time.perf_counter_ns()
    for _ in range(count):
        call()
    end, spent = time.perf_counter_ns(), time.thread_time_ns()
    return (spent - cpu) / count / 1e3, (end - begin) / count / 1e3


def warm(ways: Ways, rounds: int, calls: int) -> dict[str, dict[str, dict[str, float]]]:
    """Rows whose plan is known: by row and way, the figures."""
    times: dict[str, dict[str, list[tuple[float, float]]]] = {}
    order = random.Random(7)
    for grad in (False, True):
        with nullcontext() if grad else torch.no_grad():
            rows = {way: ways.rows(way, grad) for way in ways.names}
            for turn in range(rounds + 1):
                for name in rows["torch"]:
                    for way in order.sample(ways.names, len(ways.names)):
                        if name not in rows[way]:
                            continue
                        ways.enter(way)
                        took = timed(rows[way][name], calls if turn else 20)
                        if turn:
                            label = f"{name}, grad" if grad else name
                            times.setdefault(label, {}).setdefault(way, []).append(took)
    return {name: {way: summary(took) for way, took in own.items()} for name, own in times.items()}


def summary(took: list[tuple[float, float]]) -> dict[str, float]:
    """The figures of a row in one way."""
    cpu, wall = ([one[index] for one in took] for index in (0, 1))
    return {"median_us": median(cpu), "least_us": min(cpu), "wall_median_us": median(wall), "wall_least_us": min(wall)}


def cold(ways: Ways, shapes: int) -> dict[str, dict[str, dict[str, float]]]:
    """First calls with a new shape: by row and way, the figures."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with torch.no_grad():
        for way in ways.names:
            ways.enter(way)
            forget_plans()  # those of the way before
            for name, calls in ways.new_shapes(way, shapes + UNSEEN).items():
                took = [timed(call, 1) for call in calls][UNSEEN:]
                found.setdefault(name, {})[way] = summary(took)
    return found


def show(title: str, table: dict[str, dict[str, dict[str, float]]], ways: list[str], goals: Any) -> None:
    """A table, with how much of torch's time ours takes."""
    last = ways[-1]
    print(f"\n{title:24}" + "".join(f"{way:>10}" for way in ways) + f"{f'{last} / torch':>18}   goal")
    for name, own in table.items():
        cells = "".join(f"{own[way]['median_us']:10.2f}" if way in own else f"{'':10}" for way in ways)
        goal = goals.get(name)
        text = "" if goal is None else f"   {goal[0]:g}" + (f", native {goal[1]:g}" if goal[1] != goal[0] else "")
        print(f"{name:24}{cells}{own[last]['median_us'] / own['torch']['median_us']:18.2f}{text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--shapes", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ways = Ways(dist.init_device_mesh("cpu", (1,)))
    results = {"warm": warm(ways, options.rounds, options.calls), "cold": cold(ways, options.shapes)}
    show("microseconds", results["warm"], ways.names, GOALS)
    show("new shape, microseconds", results["cold"], ways.names, dict.fromkeys(results["cold"], (200.0, 200.0)))
    if (why := _fastpath.why_not()) is not None:
        print(f"\nnot native: {why}")
    if options.json:
        about = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "rounds": options.rounds,
            "calls": options.calls,
            "load": os.getloadavg()[0],
            "native": _fastpath.loaded() is not None,
        }
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
