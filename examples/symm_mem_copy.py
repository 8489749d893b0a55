"""Rank 0 copies into rank 1's memory; a barrier tells rank 1 that it is there. No process group is needed."""

import os

# [rank]
import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from phalanx import symm_mem


def run(rank: int, world_size: int, store: dist.Store) -> None:
    symm_mem.set_group_info("pair", rank, world_size, store)
    tensor = symm_mem.empty_strided_p2p((1024,), (1,), torch.float32, "cpu", group_name="pair")
    handle = symm_mem.rendezvous(tensor)
    tensor.fill_(42)
    handle.barrier()  # nobody fills any more
    if rank == 0:
        handle.get_buffer(1, tensor.shape, tensor.dtype).copy_(torch.full_like(tensor, 43))
        print("rank 0: copied 43 to rank 1")
    handle.barrier()
    expected = 43 if rank == 1 else 42
    assert tensor.eq(expected).all()
    print(f"rank {rank}: has {expected}")
    # [rank end]


def main() -> None:
    store, rank, world_size = next(dist.rendezvous("env://"))  # any store will do
    run(rank, world_size, store)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
