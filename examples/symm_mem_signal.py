"""Rank 1 fills rank 0's memory and signals; rank 0 waits for the signal and reads."""

import os

# [rank]
import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from phalanx import symm_mem


def run() -> None:
    rank = dist.get_rank()
    tensor = symm_mem.empty(1024, dtype=torch.int32)
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    if rank == 1:
        handle.get_buffer(0, tensor.shape, tensor.dtype).fill_(42)
        handle.put_signal(0)
    else:
        handle.wait_signal(1)  # what rank 1 wrote before its signal is here now
        assert tensor.eq(42).all()
        print(f"rank 0: got {tensor[0].item()} from rank 1")
    handle.barrier()
    # [rank end]


def main() -> None:
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
