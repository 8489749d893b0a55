"""Data parallelism: every rank trains the same model on data of its own."""

import os

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("phalanx")  # the only change: it was "gloo"
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)  # other data on each rank
    loss = torch.zeros(())
    for _ in range(200):
        x = torch.randn(32, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # averages the gradients over the ranks
        optimizer.step()
    print(f"rank {rank} of {size}: the loss is {loss.item():.1e}")
    assert loss.item() < 1e-3
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
