"""Two processes: a functional all-reduce of PyTorch tensors, differentiable, over the core."""

import os
import tempfile

# [rank]
import torch
import torch.distributed as dist

import phalanx.collectives as pc


def run(rank: int, world_size: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    x = torch.full((4,), rank + 1.0, requires_grad=True)
    y = pc.all_reduce(x, "sum", dist.group.WORLD)  # started; waited for where y is used first
    (y * y).sum().backward()
    assert x.grad is not None
    print(f"rank {rank}: sum {y.tolist()}, gradient {x.grad.tolist()}")
    # [rank end]
    assert y.tolist() == [3.0] * 4
    assert x.grad.tolist() == [12.0] * 4  # 2 * y, summed over the two ranks
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run, args=(2, os.path.join(directory, "store")), nprocs=2)


if __name__ == "__main__":
    main()
