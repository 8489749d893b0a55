"""Two processes train one model with DistributedDataParallel over the backend `phalanx`, and get what one would get."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import phalanx.collectives  # noqa: F401 - makes the backend known

STEPS = 3


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=numbers)
    return x, x.sum(1, keepdim=True)


def train(net: torch.nn.Module, part: slice) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x[part]), y[part]).backward()
        optimizer.step()
    return [each.detach() for each in net.parameters()]


def run(rank: int, world_size: int, path: str) -> None:
    # [ddp]
    dist.init_process_group("phalanx", init_method=f"file://{path}", rank=rank, world_size=world_size)
    net = DistributedDataParallel(model())
    # [ddp end]
    together = train(net, slice(rank, None, world_size))
    for ours, alone in zip(together, train(model(), slice(None)), strict=True):
        torch.testing.assert_close(ours, alone)
    print(f"rank {rank}: the same weights as one process")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run, args=(2, os.path.join(directory, "store")), nprocs=2)


if __name__ == "__main__":
    main()
