"""Two ranks train one model, of which each keeps half (FSDP2), and get the weights that one process gets."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor

STEPS = 3


def model() -> torch.nn.Sequential:
    torch.manual_seed(1)  # the same first weights on every rank
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def train(net: torch.nn.Module, part: slice) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x[part]), y[part]).backward()
        optimizer.step()


def main() -> None:
    # [fsdp]
    dist.init_process_group("phalanx")
    net = model()
    for layer in net:
        fully_shard(layer)  # its parameters are gathered while it runs, and freed after it
    fully_shard(net)
    # [fsdp end]
    train(net, slice(dist.get_rank(), None, dist.get_world_size()))
    alone = model()
    train(alone, slice(None))
    for shard, whole in zip(net.parameters(), alone.parameters(), strict=True):
        assert isinstance(shard, DTensor)
        torch.testing.assert_close(shard.full_tensor(), whole)
    print(f"rank {dist.get_rank()}: the same weights as one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
