"""Matrix products fused with a collective, beside the pair over Phalanx and over gloo, and the product alone, in turns.

    .venv/bin/python benchmarks/fused_matmul.py [--rounds 25] [--json FILE]

Two ranks on a core each. Every round has new values, and every result is compared with that of the pair over gloo. The
ranks start each call together, and it has taken what it took the slower one.
Shapes are (rows, inner, columns) of the whole product, of which all_gather, then matmul gathers the rows, and matmul,
then reduce_scatter scatters them: those of a tensor-parallel layer in prefill, and two of decoding.

*Alone* is the product without any communication. A core that computes cannot move data meanwhile, so no way of
overlapping can be faster than that, and `the pair / alone` is the bound of what fusing can gain over the pair; fusing
gets there by copying less. The last figure of a line is how much of it was got: 100% is a collective that costs
nothing.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as theirs

import phalanx.collectives as pc
from phalanx import symm_mem

RANKS = 2
SHAPES = [
    (8, 1024, 1024),
    (64, 1024, 1024),
    (512, 1024, 1024),
    (2048, 1024, 1024),
    (4096, 2048, 512),
    (2048, 4096, 256),
]
DTYPES = [torch.float32, torch.bfloat16]
SMALL_ROUNDS = 10  # times as many of a small product
PAIR, GLOO, ALONE = "the pair", "the pair, gloo", "alone"
ops = torch.ops.phalanx

Run = Callable[[], torch.Tensor]


@cache
def symmetric_of(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Made once: a model has its activations in the same memory in each step."""
    return symm_mem.empty(*shape, dtype=dtype)


def symmetric_like(a: torch.Tensor) -> torch.Tensor:
    return symmetric_of(a.shape, a.dtype)


def gathers(a: torch.Tensor, b: torch.Tensor) -> dict[str, Run]:
    """What each row runs: all_gather, then matmul."""
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    symmetric = symmetric_like(a).copy_(a)
    whole = theirs.all_gather_single(a, 0, group) + 0
    return {
        "fused": lambda: ops.fused_all_gather_matmul(a, [b], 0, name, return_A=False)[1][0],
        "fused, A symmetric": lambda: ops.fused_all_gather_matmul(symmetric, [b], 0, name, return_A=False)[1][0],
        PAIR: lambda: pc.all_gather_tensor(a, 0, group) @ b,
        GLOO: lambda: theirs.all_gather_single(a, 0, group) @ b,
        ALONE: lambda: whole @ b,
    }


def scatters(a: torch.Tensor, b: torch.Tensor) -> dict[str, Run]:
    """What each row runs: matmul, then reduce_scatter."""
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    return {
        "fused": lambda: ops.fused_matmul_reduce_scatter(a, b, "sum", 0, name),
        PAIR: lambda: theirs.wait_tensor(pc.reduce_scatter_tensor(a @ b, "sum", 0, group)),
        GLOO: lambda: theirs.wait_tensor(theirs.reduce_scatter_single(a @ b, "sum", 0, group)),
        ALONE: lambda: a @ b,
    }


def measure_one(
    ways: Callable[[torch.Tensor, torch.Tensor], dict[str, Run]],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    rounds: int,
    draw: random.Random,
) -> dict[str, torch.Tensor]:
    """Microseconds of each round."""
    rows, inner, columns = shape
    own = rows // RANKS if ways is gathers else rows
    drawn = torch.Generator().manual_seed(dist.get_rank())
    b = torch.randn(inner, columns, generator=torch.Generator().manual_seed(7)).to(dtype)
    took: dict[str, list[float]] = {}
    start = symm_mem.rendezvous(symm_mem.empty(1), dist.group.WORLD)
    for turn in range(rounds + 2):
        by_who = ways(torch.randn(own, inner, generator=drawn).to(dtype), b)
        expected = by_who[GLOO]()
        for who in draw.sample(list(by_who), len(by_who)):
            start.barrier()
            began = time.perf_counter()
            done = by_who[who]()
            end = time.perf_counter()
            if who != ALONE:
                torch.testing.assert_close(done, expected, rtol=2e-2, atol=0.5)
            if turn >= 2:
                took.setdefault(who, []).append((end - began) * 1e6)
    names = list(took)
    all_ranks = [torch.empty(len(names), rounds) for _ in range(RANKS)]
    dist.all_gather(all_ranks, torch.tensor([took[who] for who in names]))
    return dict(zip(names, torch.stack(all_ranks).amax(0), strict=True))


def measure(rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    draw = random.Random(1)  # the same order on all ranks
    for collective, ways in (("all_gather, matmul", gathers), ("matmul, reduce_scatter", scatters)):
        for dtype in DTYPES:
            for shape in SHAPES:
                times = rounds * (SMALL_ROUNDS if shape[0] < 256 else 1)
                by_round = measure_one(ways, dtype, shape, times, draw)
                us = {who: float(each.median()) for who, each in by_round.items()}
                rows.append(
                    {
                        "collective": collective,
                        "dtype": str(dtype),
                        "shape": shape,
                        "us": us,
                        "ratio_to_pair": ratio(by_round, PAIR, "fused"),
                        "ratio_to_gloo": ratio(by_round, GLOO, "fused"),
                        "bound": ratio(by_round, PAIR, ALONE),
                    }
                )
                if dist.get_rank() == 0:
                    print(line_of(rows[-1], us), flush=True)
    return rows


def ratio(by_round: dict[str, torch.Tensor], one: str, other: str) -> float:
    """Median of the ratios of single rounds, as the machine's speed changes from one to the next."""
    return float((by_round[one] / by_round[other]).median())


def line_of(row: dict[str, object], us: dict[str, float]) -> str:
    listed = ", ".join(f"{who} {taken:,.0f}" for who, taken in us.items())
    possible = us[PAIR] - us[ALONE]
    got = f"{(us[PAIR] - us['fused']) / possible:.0%} of the bound" if possible > 0 else "no bound: too much noise"
    return (
        f"{row['collective']}, {row['dtype']}, {row['shape']}: us: {listed}; fused is {row['ratio_to_pair']:.3f}x the "
        f"pair (bound {row['bound']:.3f}x), {row['ratio_to_gloo']:.2f}x gloo; {got}"
    )


def run_rank(rank: int, folder: str, rounds: int, output: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    rows = measure(rounds)
    if rank == 0 and output:
        about = {"ranks": RANKS, "rounds": rounds, "cores": os.cpu_count(), "torch": torch.__version__}
        Path(output).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, args=(folder, options.rounds, options.json), nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
