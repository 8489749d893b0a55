"""Matrix products fused with a collective, beside the pair over Phalanx and over gloo, in turns.

    .venv/bin/python benchmarks/fused_matmul.py [--rounds 15] [--json FILE]

Two ranks on a core each. Every result is compared with that of the pair over gloo. Shapes are those of a
tensor-parallel layer in prefill: (rows, inner, columns), of which all_gather, then matmul gathers the rows, and matmul,
then reduce_scatter scatters them.
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
import torch.distributed._functional_collectives as theirs

import phalanx.collectives as pc
import phalanx.symm_mem  # noqa: F401 - registers the ops

RANKS = 2
SHAPES = [(512, 1024, 1024), (2048, 1024, 1024), (4096, 2048, 512)]
DTYPES = [torch.float32, torch.bfloat16]
ops = torch.ops.phalanx


def functions() -> dict[str, dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]]:
    """What each row runs, by collective."""
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    return {
        "all_gather, matmul": {
            "fused": lambda a, b: ops.fused_all_gather_matmul(a, [b], 0, name, return_A=False)[1][0],
            "the pair": lambda a, b: pc.all_gather_tensor(a, 0, group) @ b,
            "the pair, gloo": lambda a, b: theirs.all_gather_single(a, 0, group) @ b,
        },
        "matmul, reduce_scatter": {
            "fused": lambda a, b: ops.fused_matmul_reduce_scatter(a, b, "sum", 0, name),
            "the pair": lambda a, b: pc.reduce_scatter_tensor(a @ b, "sum", 0, group) + 0,
            "the pair, gloo": lambda a, b: theirs.reduce_scatter_single(a @ b, "sum", 0, group) + 0,
        },
    }


def measure(rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    draw = random.Random(1)  # the same order on all ranks
    for collective, by_who in functions().items():
        for dtype in DTYPES:
            for shape in SHAPES:
                own = shape[0] // RANKS if collective.startswith("all_gather") else shape[0]
                drawn = torch.Generator().manual_seed(dist.get_rank())
                a = torch.randn(own, shape[1], generator=drawn).to(dtype)
                b = torch.randn(shape[1], shape[2], generator=torch.Generator().manual_seed(7)).to(dtype)
                expected = by_who["the pair, gloo"](a, b)
                took: dict[str, list[float]] = {who: [] for who in by_who}
                for turn in range(rounds + 2):
                    for who in draw.sample(list(by_who), len(by_who)):
                        dist.barrier()
                        began = time.perf_counter()
                        done = by_who[who](a, b)
                        end = time.perf_counter()
                        torch.testing.assert_close(done, expected, rtol=2e-2, atol=0.5)
                        if turn >= 2:
                            took[who].append((end - began) * 1e6)
                medians = {who: median(times) for who, times in took.items()}
                rows.append({"collective": collective, "dtype": str(dtype), "shape": shape, "us": medians})
    return rows


def run_rank(rank: int, folder: str, rounds: int, output: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    rows = measure(rounds)
    if rank == 0:
        for row in rows:
            us = row["us"]
            assert isinstance(us, dict)
            listed = ", ".join(f"{who} {taken:,.0f} us ({taken / us['fused']:.2f}x)" for who, taken in us.items())
            print(f"{row['collective']}, {row['dtype']}, {row['shape']}: {listed}")
        if output:
            about = {"ranks": RANKS, "rounds": rounds, "cores": os.cpu_count(), "torch": torch.__version__}
            Path(output).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, args=(folder, options.rounds, options.json), nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
