"""Products fused with a collective, compared with mm and the collective as two ops, in turns.

    .venv/bin/python benchmarks/pipelined_products.py [--rounds 25] [--pieces 0,1,2,4,8] [--json FILE]

Two ranks on a core each. Shapes are (rows, inner, columns) of the whole product. Both write fresh results. *Alone* is
the product without communication: on CPU a core that computes moves no data, so pieces can save only waits of ranks for
each other and accesses to memory.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import phalanx.collectives as pc

RANKS = 2
SHAPES = [
    (64, 1024, 1024),
    (512, 1024, 1024),
    (2048, 1024, 1024),
    (4096, 512, 512),
    (4096, 2048, 512),
    (8192, 256, 1024),
    (2048, 4096, 256),
]
DTYPES = [torch.float32, torch.bfloat16]
PAIR, ALONE = "the pair", "alone"
ops = torch.ops.phalanx

Run = Callable[[], torch.Tensor]


def reduce_scatters(a: torch.Tensor, b: torch.Tensor, name: str, pieces: list[int]) -> dict[str, Run]:
    ways: dict[str, Run] = {
        f"{count} pieces": lambda count=count: ops.mm_reduce_scatter(a, b, "sum", RANKS, name, count)  # type: ignore[misc]
        for count in pieces
    }
    pair = lambda: ops.wait_tensor(ops.reduce_scatter_tensor(a @ b, "sum", RANKS, name))  # noqa: E731
    return {**ways, PAIR: pair, ALONE: lambda: a @ b}


def all_gathers(a: torch.Tensor, b: torch.Tensor, name: str, _: list[int]) -> dict[str, Run]:
    shard = a[: a.shape[0] // RANKS].clone()
    return {
        "fused": lambda: ops.all_gather_mms(shard, [b], RANKS, name)[0],
        PAIR: lambda: ops.wait_tensor(ops.all_gather_into_tensor(shard, RANKS, name)) @ b,
        ALONE: lambda: a @ b,
    }


def measure_one(ways: dict[str, Run], rounds: int, draw: random.Random) -> dict[str, float]:
    """Medians in microseconds, of rounds in which every way is run once, in a new order."""
    took: dict[str, list[float]] = {who: [] for who in ways}
    expected = ways[PAIR]().clone()
    for who, run in ways.items():
        if who != ALONE:
            torch.testing.assert_close(run(), expected, rtol=2e-2, atol=0.5)
    for _ in range(rounds):
        for who in draw.sample(list(ways), len(ways)):
            dist.barrier()
            began = time.perf_counter()
            ways[who]()
            took[who].append((time.perf_counter() - began) * 1e6)
    return {who: median(times) for who, times in took.items()}


def measure(rounds: int, pieces: list[int]) -> list[dict[str, object]]:
    group = dist.group.WORLD
    assert group is not None
    pc.all_reduce(torch.ones(1), "sum", group)  # here the ranks meet
    rows: list[dict[str, object]] = []
    draw = random.Random(1)  # the same order on all ranks
    makers = {"mm, reduce_scatter": reduce_scatters, "all_gather, mm": all_gathers}
    for collective, make in makers.items():
        for dtype in DTYPES:
            for shape in SHAPES:
                m, k, n = shape
                drawn = torch.Generator().manual_seed(dist.get_rank())
                a = torch.randn(m, k, generator=drawn).to(dtype)
                b = torch.randn(k, n, generator=torch.Generator().manual_seed(7)).to(dtype) / k**0.5
                us = measure_one(make(a, b, group.group_name, pieces), rounds, draw)
                rows.append({"collective": collective, "dtype": str(dtype), "shape": shape, "us": us})
                if dist.get_rank() == 0:
                    print(line_of(rows[-1], us), flush=True)
    return rows


def line_of(row: dict[str, object], us: dict[str, float]) -> str:
    listed = ", ".join(f"{who} {taken:,.0f} ({us[PAIR] / taken:.3f}x)" for who, taken in us.items())
    return f"{row['collective']}, {row['dtype']}, {row['shape']}: us (speed beside the pair): {listed}"


def run_rank(rank: int, folder: str, rounds: int, pieces: list[int], output: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    rows = measure(rounds, pieces)
    if rank == 0 and output:
        about = {"ranks": RANKS, "rounds": rounds, "cores": os.cpu_count(), "torch": torch.__version__}
        Path(output).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--pieces", default="0,1,2,4,8", help="0: as many as the op chooses")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    pieces = [int(count) for count in options.pieces.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, options.rounds, pieces, options.json)
        torch.multiprocessing.spawn(run_rank, args=arguments, nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
