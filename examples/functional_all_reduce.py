"""A functional all_reduce of PyTorch tensors: it returns a new tensor, and has a gradient."""

import os

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

import phalanx.collectives as pc


def main() -> None:
    dist.init_process_group("phalanx")  # or "gloo": both share memory then
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), rank + 1.0, requires_grad=True)
    y = pc.all_reduce(x, "sum", dist.group.WORLD)  # waited for where y is used
    y.square().sum().backward()
    assert x.grad is not None
    print(f"rank {rank}: sum {y.tolist()}, gradient {x.grad.tolist()}")
    assert y.tolist() == [size * (size + 1) / 2] * 4
    assert torch.equal(x.grad, 2 * size * y)  # 2 y of every rank
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
