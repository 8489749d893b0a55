"""Run by the part no-compiler of .ci/run, where there is no compiler: what the back end says, and what works."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import phalanx.collectives as pc


def work(rank: int, folder: str) -> None:
    told = "nothing"
    try:
        dist.init_process_group("phalanx", init_method=f"file://{folder}/phalanx", rank=rank, world_size=2)
    except dist.DistBackendError as error:
        told = str(error)
    for part in ("there is no C++ compiler", "Install a compiler", "PHALANX_NATIVE", "use the backend gloo"):
        assert part in told, told
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert pc.enable_group(group)
    assert pc.all_reduce(torch.full((4,), rank + 1.0), "sum", group).tolist() == [3.0] * 4
    dist.destroy_process_group()
    print(f"rank {rank}: {told}", file=sys.stderr)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(work, (scratch,), nprocs=2)
