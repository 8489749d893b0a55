"""Rank 1 fills rank 0's memory and signals; rank 0 waits for the signal and reads.

Run it as it is, or with torchrun --nproc-per-node=2.
"""

import os
import tempfile

# [rank]
import torch
import torch.distributed as dist

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


def spawned(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    run()
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:  # torchrun started this process as one of the ranks
        dist.init_process_group("gloo")
        run()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(spawned, args=(os.path.join(directory, "store"),), nprocs=2)


if __name__ == "__main__":
    main()
