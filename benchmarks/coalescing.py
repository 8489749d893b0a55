"""The coalescing manager beside single calls, and beside torch's manager over gloo, in turns.

    .venv/bin/python benchmarks/coalescing.py [--tensors 64] [--bytes 256,64k] [--rounds 60] [--json FILE]

Two ranks on a core each. Every round fills the tensors anew, runs each row once, in an order drawn for that round, and
checks what comes out. For each row: the median and the 10th and 90th percentile of the time of a whole body, the CPU
time of the rank's threads, and the time that the body itself takes, in which calls are only recorded.
"""

import argparse
import json
import os
import platform
import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

RANKS = 2
SUFFIXES = {"k": 1 << 10, "m": 1 << 20}


class Bodies:
    """What the rows run, on the tensors of one rank.

    Args:
        count: How many tensors.
        numel: Elements of each, in float32.
    """

    def __init__(self, count: int, numel: int) -> None:
        import phalanx.collectives as pc

        group = dist.group.WORLD
        assert group is not None
        self.pc, self.group = pc, group
        pc.enable_group(self.group)
        self.whole = [torch.empty(numel) for _ in range(count)]
        self.parts = [torch.empty(numel // RANKS) for _ in range(count)]

    def fill(self) -> None:
        """Give every rank other values, small integers."""
        for i, each in enumerate(self.whole):
            each.fill_(dist.get_rank() + i % 7)
        for i, each in enumerate(self.parts):
            each.fill_(dist.get_rank() + i % 7)

    def check(self, collective: str) -> None:
        """Raise unless the results are right."""
        for i, (whole, part) in enumerate(zip(self.whole, self.parts, strict=True)):
            if collective == "all_gather":
                right = whole[0] == i % 7 and whole[-1] == i % 7 + 1
            else:
                result = whole if collective == "all_reduce" else part
                right = result[0] == 2 * (i % 7) + 1 and result[-1] == result[0]
            if not right:
                raise AssertionError(f"{collective}: tensor {i} is wrong on rank {dist.get_rank()}")

    def ours(self, collective: str) -> None:
        """Each call of phalanx.collectives."""
        group = self.group
        if collective == "all_reduce":
            call = self.pc.all_reduce_
            for each in self.whole:
                call(each, "sum", group)
        elif collective == "all_gather":
            for whole, part in zip(self.whole, self.parts, strict=True):
                self.pc.all_gather_tensor_inplace(whole, part, group)
        else:
            for whole, part in zip(self.whole, self.parts, strict=True):
                self.pc.reduce_scatter_tensor_inplace(part, whole, "sum", group)

    def plain(self, collective: str) -> None:
        """Each call of torch.distributed."""
        if collective == "all_reduce":
            for each in self.whole:
                dist.all_reduce(each)
        elif collective == "all_gather":
            for whole, part in zip(self.whole, self.parts, strict=True):
                dist.all_gather_single(whole, part)
        else:
            for whole, part in zip(self.whole, self.parts, strict=True):
                dist.reduce_scatter_single(part, whole)

    def rows(self) -> dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[str], None]]]:
        """By name, what is entered around which body."""
        return {
            "one by one": (nullcontext, self.ours),
            "coalescing_manager": (lambda: self.pc.coalescing_manager(self.group), self.ours),
            "coalescing_manager, dist.*": (lambda: self.pc.coalescing_manager(self.group), self.plain),
            "torch's manager, gloo": (lambda: c10d._coalescing_manager(self.group), self.plain),
            "one by one, gloo": (nullcontext, self.plain),
        }


def measure(bodies: Bodies, collective: str, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of each row, on this rank."""
    rows = bodies.rows()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in rows}
    order = random.Random(7)  # the same on all ranks
    for turn in range(rounds + 3):
        for name in order.sample(list(rows), len(rows)):
            around, body = rows[name]
            bodies.fill()
            bodies.pc.wait_tensor(bodies.pc.all_reduce(torch.ones(1), "sum", bodies.group))  # start together
            cpu, begin = time.process_time_ns(), time.perf_counter_ns()
            with around():
                body(collective)
                middle = time.perf_counter_ns()
            end = time.perf_counter_ns()
            spent = time.process_time_ns() - cpu
            bodies.check(collective)
            if turn >= 3:
                found[name].append(((end - begin) / 1e3, spent / 1e3, (middle - begin) / 1e3))
    return {name: summary(times) for name, times in found.items()}


def summary(times: list[tuple[float, float, float]]) -> dict[str, float]:
    """The figures of a row."""
    walls = [wall for wall, _, _ in times]
    tenths = quantiles(walls, n=10)
    return {
        "median_us": median(walls),
        "p10_us": tenths[0],
        "p90_us": tenths[-1],
        "cpu_us": median(cpu for _, cpu, _ in times),
        "body_us": median(body for _, _, body in times),
    }


def rank_main(rank: int, port: int, options: argparse.Namespace, answers: Any) -> None:
    """One rank, from its start to its end."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not options.unpinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for nbytes in options.bytes:
        bodies = Bodies(options.tensors, nbytes // 4)
        for collective in ("all_reduce", "all_gather", "reduce_scatter"):
            results[f"{collective} {options.tensors} x {nbytes}"] = measure(bodies, collective, options.rounds)
    if rank == 0:
        answers.put(results)
    dist.destroy_process_group()


def size_of(text: str) -> int:
    """Bytes of 256, 64k or 8m; a multiple of what every rank needs."""
    number = int(text[:-1]) * SUFFIXES[text[-1].lower()] if text[-1].lower() in SUFFIXES else int(text)
    if number <= 0 or number % (4 * RANKS):
        raise argparse.ArgumentTypeError(f"{text} is no multiple of {4 * RANKS} bytes")
    return number


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print the tables."""
    for title, rows in results.items():
        peer = rows["torch's manager, gloo"]
        heads = "".join(f"{head:>10}" for head in ("p10", "p90", "CPU us", "body us"))
        print(f"\n{title + ' bytes':32}{'median us':>12}{heads}{'gloo / this':>13}")
        for name, row in rows.items():
            cells = "".join(f"{row[key]:10.1f}" for key in ("p10_us", "p90_us", "cpu_us", "body_us"))
            print(f"{name:32}{row['median_us']:12.1f}{cells}{peer['median_us'] / row['median_us']:12.2f}x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument(
        "--bytes", type=lambda text: [size_of(each) for each in text.split(",")], default=[256, 64 << 10]
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--unpinned", action="store_true", help="let the ranks run on any core")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, port, options, answers)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    results = None
    while results is None and all(each.exitcode in (None, 0) for each in ranks):
        if not answers.empty():
            results = answers.get()
        else:
            time.sleep(0.1)
    for each in ranks:
        if results is None:
            each.terminate()
        each.join()
    if results is None:
        return 1
    show(results)
    if options.json:
        about: dict[str, Any] = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
        about["ranks"], about["rounds"], about["load"] = RANKS, options.rounds, os.getloadavg()[0]
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
