"""What PyTorch takes on one GPU for what gpu_bench measures: the sum of stacked inputs, and its own symmetric memory.

Run by `benchmarks/gpu.sh`. Prints one JSON row for each size; times are microseconds, medians of graph replays.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20]  # bytes


def measured(call: Callable[[], object], meet: Callable[[], object], times: int = 50) -> float:
    """Microseconds of one call, in a graph of `times` of them."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    rounds = []
    for _ in range(9):
        meet()
        begun = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - begun) / times * 1e6)
    return statistics.median(rounds[1:])


def tell(what: str, ranks: int, size: int, us: float) -> None:
    print(json.dumps({"what": what, "ranks": ranks, "bytes": size, "us": round(us, 3)}), flush=True)


def sums() -> None:
    """`stack().sum(0)` of as many float32 inputs as there would be ranks."""
    for ranks in (2, 4, 8):
        for size in SIZES:
            inputs = [torch.rand(size // 4, device="cuda") for _ in range(ranks)]
            tell("stack().sum(0)", ranks, size, measured(lambda: torch.stack(inputs).sum(0), lambda: None))  # noqa: B023


def symmetric_rank(rank: int, size: int) -> None:
    import torch.distributed._symmetric_memory as symm_mem

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK=str(rank), WORLD_SIZE=str(size))
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    name = dist.group.WORLD.group_name
    for nbytes in SIZES:
        block = symm_mem.empty(nbytes // 4, dtype=torch.float32, device="cuda").fill_(rank + 1)
        symm_mem.rendezvous(block, name)
        us = measured(lambda: torch.ops.symm_mem.one_shot_all_reduce(block, "sum", name), dist.barrier, 20)  # noqa: B023
        if rank == 0:
            tell("torch.ops.symm_mem.one_shot_all_reduce, processes", size, nbytes, us)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:] == ["sums"]:
        sums()
    elif sys.argv[1:] == ["symmetric"]:
        mp.spawn(symmetric_rank, (2,), nprocs=2)
    else:
        sys.exit(__doc__)
