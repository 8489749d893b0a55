"""Two processes: several collectives as one call, parts of different sizes, and messages in a ring."""

import os
import tempfile

import torch
import torch.distributed as dist

import phalanx.collectives as pc


def run(rank: int, world_size: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
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


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run, args=(2, os.path.join(directory, "store")), nprocs=2)


if __name__ == "__main__":
    main()
