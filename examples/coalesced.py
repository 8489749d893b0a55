"""Two processes: several collectives as one call, parts of different sizes, and messages in a ring."""

import os

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

import phalanx.collectives as pc


def main() -> None:
    dist.init_process_group("phalanx")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    # [coalesced]
    losses, count = torch.full((3,), float(rank)), torch.tensor([10 + rank])
    with pc.coalescing_manager(group):
        pc.all_reduce_(losses, "avg", group)
        pc.all_reduce_(count, "sum", group)
        ranks = pc.all_gather_tensor(torch.tensor([rank]), 0, group)
    # here all three are complete, after one call of the core
    # [coalesced end]
    assert losses.tolist() == [0.5] * 3
    assert count.tolist() == [21]
    assert ranks.tolist() == [0, 1]
    # [uneven]
    sizes = [3, 1]  # rows on rank 0 and on rank 1
    whole = pc.all_gather_v(torch.full((sizes[rank], 2), float(rank)), sizes, 0, group)  # 4 rows
    part = pc.reduce_scatter_v(whole, "sum", sizes, 0, group)  # sizes[rank] rows
    # [uneven end]
    assert whole[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert part[:, 0].tolist() == [0.0] * 3 if rank == 0 else [2.0]
    # [messages]
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    mine, came = torch.full((2,), float(rank)), torch.empty(2)
    works = pc.batch_isend_irecv([pc.P2POp(pc.isend, mine, right), pc.P2POp(pc.irecv, came, left)])
    for work in works:
        work.wait()
    # [messages end]
    assert came.tolist() == [float(left)] * 2
    print(f"rank {rank}: losses {losses.tolist()}, count {count.item()}, from the left {came.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
